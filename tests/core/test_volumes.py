"""What claims mean for the jobs that use them."""

from dataclasses import replace

import pytest

from queuectl.control.world import World
from queuectl.core.cycle import plan
from queuectl.core.lifecycle import BackOff
from queuectl.core.volumes import Volumes
from queuectl.model.objects import Job, NodeTerm, Requirement, Role, Topology, VolumeUse
from queuectl.model.volumes import Claim, StorageClass, Volume
from tests.support.builders import flavor, gang, node, queue, role

ZONE = "topology.kubernetes.io/zone"
B = (NodeTerm((Requirement(ZONE, "In", ("b",)),)),)
BOUND = Claim("team/data", ("ReadWriteMany",), volume="pv", bound=True)
PV = Volume("pv", "team/data", (B,))
FAST = StorageClass("fast", waits=True, reach=B)


def _job(*roles: Role, use: VolumeUse | None = None) -> Job:
    given = roles or (role(pods=2, gpu=8),)
    uses = tuple(use or VolumeUse(one.name, "data", claim="data") for one in given)
    return Job(gang("j", *given), generation=1, resource_version="1", volumes=uses)


def _volumes(claim: Claim | None = None, volume: Volume | None = PV, kind: StorageClass = FAST) -> Volumes:
    result = Volumes(known=True)
    result.claims |= {claim.key: claim} if claim else {}
    result.volumes |= {volume.name: volume} if volume else {}
    result.classes[kind.name] = kind
    return result


def test_pods_go_where_their_volume_can_be_reached() -> None:
    job = _volumes(BOUND).judge(_job())
    assert (job.problem, job.unpromised, job.gang.roles[0].constraints.volumes) == (None, (), (B,))


UNBOUND = Claim("team/data", ("ReadWriteMany",), storage_class="slow")
WAITING = {
    "none": (None, PV, "it does not exist"),
    "not bound": (UNBOUND, PV, "it is not bound to a volume"),
    "of no class": (replace(UNBOUND, storage_class=""), PV, "it is not bound to a volume"),
    "being bound": (replace(UNBOUND, volume="pv"), PV, "it has yet to be bound to volume pv"),
    "being deleted": (replace(BOUND, deleting=True), PV, "it is being deleted"),
    "lost": (replace(BOUND, lost=True), None, "its volume pv does not exist"),
    "without its volume": (BOUND, None, "its volume pv does not exist"),
}


@pytest.mark.parametrize(("claim", "volume", "problem"), WAITING.values(), ids=WAITING.keys())
def test_a_job_waits_for_its_claim(claim: Claim | None, volume: Volume | None, problem: str) -> None:
    told = _volumes(claim, volume, StorageClass("slow")).judge(_job()).problem
    assert told is not None
    assert (told.code, str(told)) == ("VolumeNotReady", f"Its role worker uses claim data, and {problem}.")


def test_a_claim_that_waits_for_its_pod_goes_where_its_class_makes_volumes() -> None:
    claim = replace(UNBOUND, storage_class="fast", node="n7")
    one = _volumes(claim).judge(_job(role(pods=1)))
    here = (NodeTerm(fields=(Requirement("metadata.name", "In", ("n7",)),)),)
    assert (one.problem, one.unpromised, one.gang.roles[0].constraints.volumes) == (None, (), (B, here))
    [told] = _volumes(claim).judge(_job(role(pods=2))).unpromised
    assert "spec.roles[worker].template.spec.volumes[data]" in told
    assert "gets its volume where the first of 2 pods goes" in told
    [told] = _volumes(claim, kind=replace(FAST, provisions=False)).judge(_job(role(pods=1))).unpromised
    assert "made beforehand" in told


def test_claims_that_each_pod_makes_follow_their_class_or_the_default() -> None:
    use = VolumeUse("worker", "scratch")
    assert str(_volumes().judge(_job(use=use)).problem).endswith("nor is one the default.")
    default = _volumes(kind=replace(FAST, default_since="2026")).judge(_job(use=use))
    assert (default.problem, default.unpromised) == (None, ())
    assert default.gang.roles[0].constraints.volumes == (B,)
    named = VolumeUse("worker", "scratch", storage_class="fast")
    assert _volumes().judge(_job(use=named)).gang.roles[0].constraints.volumes == (B,)
    at_once = _volumes(kind=replace(FAST, waits=False)).judge(_job(use=named))
    assert "does not wait for the pod" in at_once.unpromised[0]


def test_a_claim_for_one_pod_bars_a_job_with_more_and_one_for_a_node_is_told() -> None:
    alone = _volumes(replace(BOUND, modes=("ReadWriteOncePod",)))
    [open_] = alone.judge(_job(role(pods=1))).unpromised
    assert open_.endswith("(claim data is ReadWriteOncePod: it may be that a pod of another job has it)")
    told = alone.judge(_job(role("a"), role("b"))).problem
    assert told is not None
    assert (told.code, "and the job has 2 that do" in str(told)) == ("Misconfigured", True)
    once = _volumes(replace(BOUND, modes=("ReadWriteOnce",)))
    assert "one node can have it at a time" in once.judge(_job()).unpromised[0]
    on_one_node = replace(role(pods=2), topology=Topology(required="node"))
    assert once.judge(_job(on_one_node)).unpromised == ()


def _world(*zones: str) -> World:
    world = World(BackOff())
    world.on_flavor(None, flavor())
    world.on_queue(None, queue())
    for index, zone in enumerate(zones):
        world.on_node(None, node(f"{zone}{index}", labels={ZONE: zone}))
    return world


def _cycle(world: World) -> tuple[set[str], str]:
    """Return the nodes that the job gets, and why it waits else."""
    world.submissions(world.take_changes().submissions)
    decided = plan(world.snapshot(0.0), 0.0)
    wait = world.gangs.problem("j") or decided.waits.get("j")
    return {p.node for one in decided.admissions for p in one.placements}, str(wait or "")


def test_a_job_goes_on_when_its_claim_does_and_is_told_when_the_zone_is_full() -> None:
    world = _world("a", "a", "b", "b")
    assert not world.volumes.used.is_set()
    world.on_job(None, _job())
    assert world.volumes.used.is_set()
    assert "has yet to read" in _cycle(world)[1]
    world.volumes_are_known()
    assert "it does not exist" in _cycle(world)[1]
    world.on_volume_claim(None, BOUND)
    assert "its volume pv does not exist" in _cycle(world)[1]
    world.on_volume(None, PV)
    assert world.changes
    assert _cycle(world) == ({"b2", "b3"}, "")
    world.on_node(node("b3", labels={ZONE: "b"}), None)
    nodes, wait = _cycle(world)
    assert not nodes
    assert "its volumes can't be reached from 2 other nodes that it could use" in wait
    world.on_volume(PV, replace(PV, reach=()))
    assert len(_cycle(world)[0]) == 2

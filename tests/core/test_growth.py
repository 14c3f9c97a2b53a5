"""A running elastic gang gets more of the pods that it asks for where they are free and nobody waits for them."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from queuectl.core.backlog import Backlog
from queuectl.core.cycle import plan
from queuectl.core.elastic import numbered
from queuectl.core.growth import growths
from queuectl.core.snapshot import Elastic, Snapshot
from queuectl.model.objects import Flavor, Gang, Level, Node, Queue, Together, Topology
from queuectl.model.plan import Placement, Portion
from queuectl.model.policy import Cap, Quota, StopPolicy
from queuectl.model.resources import CARD, CARDS, total
from tests.support.builders import GPU, flavor, gang, node, queue, role, snapshot

NOW = 10_000.0
CELL = ("any", GPU)
NOTHING = Portion(())


def elastic(name: str = "e", *, pods: int = 8, least: int = 1, size: int = 1, **given: Any) -> Gang:
    """Return a gang of pods with one GPU each."""
    topology = Topology(slice_level="node", slice_size=size) if size > 1 else Topology()
    return gang(name, replace(role(pods=pods, gpu=1), least=least, topology=topology), **given)


def grow(
    nodes: Sequence[Node],
    those: Iterable[tuple[Gang, dict[str, int]]],
    waiting: Iterable[Gang] = (),
    *,
    queues: Sequence[Queue] = (),
    kind: Flavor | None = None,
) -> dict[str, dict[str, int]]:
    """Return by gang and node the pods that come in addition, after a cycle."""
    view = snapshot(waiting, nodes=nodes, queues=queues or [queue()], flavors=[kind or flavor()])
    assert view.fleet is not None
    running = []
    for job, places in those:
        only = job.roles[0]
        placements = tuple(Placement(only.name, "any", name, pods, only.requests) for name, pods in places.items())
        has = Portion(placements, {CELL: sum(places.values())})
        running.append(Elastic(job, has))
        for tree in (view.tree, view.later):
            tree.add(job.queue, has.quota)
        view.held.add(view.queues[job.queue], job.namespace, job.user, {GPU: has.pods})
        for p in placements:
            view.fleet.reserve(p.node, p.requests, p.pods)
    view, waits = _after_a_cycle(view)
    found = growths(view, waits, running, 100)
    for one in running:
        before, after = (
            numbered(one.has.placements),
            numbered(one.has.plus(found.get(one.gang.uid, NOTHING)).placements),
        )
        assert {key: after[key].node for key in before} == {key: p.node for key, p in before.items()}
    assert all(part.quota == {CELL: part.pods} for part in found.values())
    return {uid: dict(total({p.node: p.pods} for p in part.placements)) for uid, part in found.items()}


def _after_a_cycle(view: Snapshot) -> tuple[Snapshot, Any]:
    decided = plan(view, NOW)
    after = view.copy()
    for admission in decided.admissions:
        job = view.waiting.get(admission.uid)
        assert job is not None
        after.assume(job, admission)
    left = [job for job in view.waiting if job.uid in decided.waits]
    return replace(after, waiting=Backlog(left)), decided.waits


def test_it_gets_all_that_is_missing_or_as_many_as_there_are_places() -> None:
    assert grow([node("n0"), node("n1")], [(elastic(), {"n0": 3})]) == {"e": {"n0": 5}}
    assert grow([node("n0"), node("n1", gpu=2)], [(elastic(pods=16), {"n0": 6})]) == {"e": {"n0": 2, "n1": 2}}
    assert grow([node("n0", gpu=3)], [(elastic(), {"n0": 3})]) == {}


def test_it_keeps_to_quota_and_one_that_is_not_preemptible_to_its_own() -> None:
    owned = {CELL: Quota(5)}
    tree = [Queue("all"), Queue("q", "all", quotas=owned), Queue("other", "all", quotas=owned)]
    assert grow([node("n0")], [(elastic(), {"n0": 3})], queues=[queue(any={GPU: 5})]) == {"e": {"n0": 2}}
    assert grow([node("n0")], [(elastic(), {"n0": 3})], queues=tree) == {"e": {"n0": 5}}
    assert grow([node("n0")], [(elastic(preemptible=False), {"n0": 3})], queues=tree) == {"e": {"n0": 2}}


def test_it_keeps_to_what_its_user_may_hold_however_many_jobs_that_may_be() -> None:
    limits = replace(queue(), max_running=1, per_user=Cap(1, ((GPU, 6),)))
    assert grow([node("n0")], [(elastic(user="ann"), {"n0": 4})], queues=[limits]) == {"e": {"n0": 2}}


def test_two_that_grow_get_no_more_than_there_is() -> None:
    those = [(elastic("first", seq=1), {"n0": 1}), (elastic("second", seq=2), {"n0": 1})]
    assert grow([node("n0")], those) == {"first": {"n0": 6}}
    assert grow([node("n0")], those, queues=[queue(any={GPU: 4})]) == {"first": {"n0": 2}}
    limit = replace(queue(), per_user=Cap(None, ((GPU, 5),)))
    assert grow([node("n0")], [(replace(g, user="ann"), at) for g, at in those], queues=[limit]) == {"first": {"n0": 3}}


@pytest.mark.parametrize(
    ("job", "grows"),
    [
        (gang("w", role(gpu=8)), False),
        (gang("w", role(gpu=8), hold=True), True),
        (gang("w", role(gpu=8), not_before=NOW + 60), True),
        (gang("w", role(gpu=16)), True),
        (gang("w", role(gpu=8), gpu_models=("H100",)), True),
    ],
    ids=["lacks nodes", "held", "backs off", "exceeds the cluster", "no such model"],
)
def test_nobody_grows_into_what_somebody_waits_for(job: Gang, grows: bool) -> None:  # noqa: FBT001
    assert bool(grow([node("n0")], [(elastic(), {"n0": 3})], [job])) is grows


def test_whoever_starts_goes_first() -> None:
    assert grow([node("n0")], [(elastic(), {"n0": 3})], [gang("w", role(gpu=4))]) == {"e": {"n0": 1}}


def test_a_stopped_queue_grows_nobody() -> None:
    assert grow([node("n0")], [(elastic(), {"n0": 3})], queues=[replace(queue(), stop=StopPolicy.HOLD)]) == {}


def test_what_it_asks_of_its_topology_holds_for_all_of_its_pods() -> None:
    racks = replace(flavor(), levels=(Level("rack", "rack"),))
    nodes = [node("n0", gpu=4, labels={"rack": "a"}), node("n1", labels={"rack": "b"})]
    bound = elastic(together=Together(required="rack"))
    assert grow(nodes, [(bound, {"n0": 3})], kind=racks) == {"e": {"n0": 1}}
    assert grow(nodes, [(elastic(), {"n0": 3})], kind=racks) == {"e": {"n1": 5}}


def test_its_slices_stay_whole() -> None:
    nodes = [node("n0", gpu=4), node("n1", gpu=3)]
    assert grow(nodes, [(elastic(pods=8, size=4), {"n0": 4})]) == {}
    assert grow([*nodes, node("n2", gpu=4)], [(elastic(pods=12, size=4), {"n0": 4})]) == {"e": {"n2": 4}}


def test_it_grows_by_as_many_slices_as_the_quota_of_cards_holds() -> None:
    slices: Any = {"nvidia.com/mig-1g.10gb": 1}
    job = gang("e", replace(role(pods=12, **slices), least=1))
    has = Placement("worker", "any", "n0", 3, job.roles[0].requests, cards=CARD // 7)
    usage = {("any", CARDS): 3 * CARD // 7}
    there = node("n0", gpu=0, **{"nvidia.com/mig-1g.10gb": 20})  # type: ignore[arg-type]
    view = snapshot([], nodes=[there], queues=[queue(any={CARDS: CARD})])
    for tree in (view.tree, view.later):
        tree.add("q", usage)
    more = growths(view, {}, [Elastic(job, Portion((has,), usage))], 100)["e"]
    assert [(p.pods, p.first, p.cards) for p in more.placements] == [(4, 3, CARD // 7)]
    assert view.tree.nodes["q"].usage == {("any", CARDS): CARD}

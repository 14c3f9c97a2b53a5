"""What is seen of maintenance: who is on which node, who can't be told to leave it, and what is said of nodes."""

from dataclasses import replace

from queuectl.control.world import World
from queuectl.core.lifecycle import BackOff
from queuectl.core.maintenance import UPGRADE_STATE, progress
from queuectl.model.lifecycle import Attempt, AttemptState, Workload
from queuectl.model.maintenance import Maintenance, NodePhase, NodeState, NodeTest, Phase, TestPhase
from queuectl.model.objects import Budget, Job, Mark, Pod
from queuectl.model.plan import Placement
from tests.support.builders import gang, node, requests, role

NOW = 1000.0


def world(*jobs: str, preemptible: bool = True) -> World:
    """Return a world of node n0, on which all of these jobs run with two pods each."""
    result = World(BackOff())
    seen(result, node("n0"))
    workloads, attempts = [], []
    for seq, name in enumerate(jobs):
        one = gang(name, role(pods=2, gpu=1), preemptible=preemptible)
        result.on_job(None, Job(one, generation=1, resource_version="1"))
        workloads.append(Workload(name, one.namespace, name, "q", 0, 0.0, seq))
        placement = Placement("worker", "h100", "n0", 2, requests(gpu=1))
        attempts.append(Attempt(name, 1, AttemptState.RUNNING, 1, (placement,), 0.0, running_at=0.0))
    result.load(workloads, attempts, len(jobs))
    return result


def seen(result: World, *nodes: object) -> None:
    for one in nodes:
        result.on_node(None, one)  # type: ignore[arg-type]
        result.upkeep.on_node(None, one)  # type: ignore[arg-type]


def drains(result: World) -> None:
    state = NodeState("n0", NodePhase.DRAINING, NOW)
    result.upkeep.on_maintenance(None, Maintenance("m", nodes=("n0",), phase=Phase.ACTIVE, states=(state,)))


def leaves(result: World, job: str) -> bool:
    view = result.view(job, NOW)
    assert view is not None
    return view.leave is not None


def test_jobs_on_a_node_under_maintenance_leave_and_nobody_new_goes_there_until_it_is_over() -> None:
    here = world("a")
    assert here.upkeep.say(NOW) == {}
    assert not leaves(here, "a")
    drains(here)
    assert here.upkeep.say(NOW)["n0"].jobs == {"a": f"{here.workloads['a'].namespace}/a"}
    assert leaves(here, "a")
    here.upkeep.on_maintenance(here.upkeep.maintenances["m"], None)
    here.upkeep.say(NOW)
    assert not leaves(here, "a")


def test_who_is_not_preemptible_is_named_and_not_told_to_leave() -> None:
    here = world("a", preemptible=False)
    drains(here)
    [told] = here.upkeep.say(NOW)["n0"].stuck
    assert told.endswith("a, which is not preemptible")
    assert not leaves(here, "a")


def test_a_disruption_budget_is_spent_once() -> None:
    here = world("a", "b")
    drains(here)
    namespace = here.workloads["a"].namespace
    here.on_budget(None, Budget(namespace, "pdb", (), allowed=2))
    [told] = here.upkeep.say(NOW)["n0"].stuck
    assert told == f"{namespace}/b, as PodDisruptionBudget {namespace}/pdb does not allow it now"
    here.on_budget(Budget(namespace, "pdb", (), 2), Budget(namespace, "pdb", (), allowed=4))
    assert here.upkeep.say(NOW)["n0"].stuck == ()
    assert leaves(here, "a")


def test_pods_of_others_are_known_by_the_devices_that_they_hold() -> None:
    here = world()
    drains(here)
    pod = Pod("p", "team", "inference", "1", node="n0", phase="Running", requests=requests(gpu=2))
    agent = Pod("d", "kube-system", "agent", "1", node="n0", phase="Running", requests=requests(cpu=1))
    for one in (pod, agent):
        here.upkeep.on_pod(None, one)
    assert here.upkeep.say(NOW)["n0"].others == ("team/inference",)
    here.upkeep.on_pod(pod, replace(pod, phase="Succeeded", requests=()))
    assert here.upkeep.say(NOW)["n0"].others == ()


def test_they_are_known_also_when_the_node_has_another_object() -> None:
    here = world()
    drains(here)
    here.upkeep.on_pod(None, Pod("p", "team", "inference", "1", node="n0", phase="Running", requests=requests(gpu=2)))
    here.upkeep.on_node(here.upkeep.nodes["n0"], None)
    seen(here, node("n0"))
    assert here.upkeep.say(NOW)["n0"].others == ("team/inference",)


def test_who_has_left_a_node_and_may_run_there_yet_is_named() -> None:
    here = world("a")
    drains(here)
    here.on_pod(None, Pod("p", "team", "a-worker-1-0", "1", node="n0", phase="Running", deleting=True, workload="a"))
    there = here.upkeep.say(NOW)["n0"]
    assert there.left == ("team/a-worker-1-0",)
    [state] = progress(here.upkeep.maintenances["m"], {"n0": replace(there, jobs={})}, {}, {}, NOW).states
    assert state.message.endswith("has room there; pods that should have stopped may still run: team/a-worker-1-0.")


def test_a_node_whose_driver_the_gpu_operator_upgrades_is_left() -> None:
    here = world("a")
    before = here.upkeep.nodes["n0"]
    for state, left in (("upgrade-required", False), ("cordon-required", True), ("upgrade-done", False)):
        after = replace(before, labels={UPGRADE_STATE: state})
        here.on_node(before, after)
        here.upkeep.on_node(before, after)
        here.upkeep.say(NOW)
        assert leaves(here, "a") == left, state
        before = after


def test_there_is_nothing_to_do_without_a_maintenance_and_notes_on_nodes() -> None:
    here = world("a")
    assert here.upkeep.idle
    before = here.upkeep.nodes["n0"]
    noted = replace(before, mark=Mark("gone", cordoned=True))
    here.upkeep.on_node(before, noted)
    assert not here.upkeep.idle
    here.upkeep.on_node(noted, None)
    assert here.upkeep.idle


def test_tests_that_were_refused_are_forgotten_with_their_maintenance() -> None:
    here = world()
    drains(here)
    one = here.upkeep.maintenances["m"]
    here.upkeep.refused[one.uid, "n0"] = NodeTest(one.uid, "n0", "ns", "t", TestPhase.RUNNING, 0.0, "forbidden")
    here.upkeep.on_maintenance(one, replace(one, uid="another"))
    assert here.upkeep.refused == {}

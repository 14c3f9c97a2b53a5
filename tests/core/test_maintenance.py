from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queuectl.core.maintenance import (
    UPGRADE_SKIP,
    UPGRADE_STATE,
    closed,
    for_upgrade,
    has_to_leave,
    is_as_wanted,
    most,
    next_ones,
    owners,
    progress,
    taken_at,
    to_test,
    wanted,
)
from queuectl.model.maintenance import (
    CLOSED,
    MAX_NODES,
    OVER,
    Drain,
    Maintenance,
    NodePhase,
    NodeState,
    NodeTest,
    NodeWork,
    Phase,
    TestPhase,
    There,
    Wanted,
)
from queuectl.model.objects import Mark, Node
from queuectl.model.reasons import Reason

NOW = 1000.0
TEST = {"template": {"spec": {"containers": []}}, "namespace": "x"}


class Place:
    """A maintenance, its nodes and who is there, step by step."""

    def __init__(self, count: int = 4, **spec: object) -> None:
        names = tuple(f"n{number}" for number in range(count))
        self.one = replace(Maintenance("m", nodes=names, canary=0), **spec)  # type: ignore[arg-type]
        self.nodes = {name: Node(name) for name in names}
        self.jobs: dict[str, dict[str, str]] = {}
        self.stuck: dict[str, tuple[str, ...]] = {}
        self.leaving: set[str] = set()
        self.tests: dict[str, NodeTest] = {}
        self.now = NOW

    @property
    def there(self) -> dict[str, There]:
        return {
            name: There(node, self.jobs.get(name, {}), frozenset(self.leaving), self.stuck.get(name, ()))
            for name, node in self.nodes.items()
        }

    def run(self, job: str, *nodes: str) -> None:
        for node in nodes:
            self.jobs.setdefault(node, {})[job] = f"a/{job}"

    def end(self, job: str) -> None:
        for jobs in self.jobs.values():
            jobs.pop(job, None)

    def label(self, node: str, **labels: str) -> None:
        self.nodes[node] = replace(self.nodes[node], labels={**self.nodes[node].labels, **labels})

    def upgrade(self, state: str, *nodes: str) -> None:
        for node in nodes or tuple(self.nodes):
            self.label(node, **{UPGRADE_STATE: state})

    def say_done(self, node: str) -> None:
        self.nodes[node] = replace(self.nodes[node], mark=Mark("m", done=True))

    def test(self, node: str, phase: TestPhase, problem: str = "") -> None:
        self.tests[node] = NodeTest("m", node, "x", f"test-{node}", phase, self.now, problem)

    def step(self, *others: Maintenance) -> Phase:
        """Take in what has happened."""
        owner = owners([self.one, *others], self.nodes, self.now)
        told = progress(self.one, self.there, owner, self.tests, self.now)
        self.one = replace(self.one, phase=told.phase, states=told.states)
        for state in told.states:
            if state.name in self.nodes and wanted(self.one, state).done_is_taken:
                node = self.nodes[state.name]
                self.nodes[state.name] = replace(node, mark=replace(node.mark, done=False))
        return told.phase

    def phases(self) -> dict[str, str]:
        return {state.name: state.phase.value for state in self.one.states}

    def message(self, node: str) -> str:
        return next(state.message for state in self.one.states if state.name == node)


def test_a_node_is_safe_once_no_job_is_left_and_released_once_its_work_is_said_to_be_done() -> None:
    place = Place(1)
    place.run("a", "n0")
    assert place.step() is Phase.ACTIVE
    assert place.phases() == {"n0": "Draining"}
    assert "a/a leave it" in place.message("n0")
    place.step()
    assert place.phases() == {"n0": "Draining"}
    place.end("a")
    place.step()
    assert place.phases() == {"n0": "Safe"}
    place.say_done("n0")
    assert place.step() is Phase.FINISHED
    assert place.phases() == {"n0": "Released"}
    assert not place.nodes["n0"].mark.done
    place.nodes["n9"] = Node("n9")
    assert place.step() is Phase.FINISHED
    assert place.phases() == {"n0": "Released"}


def test_a_node_said_to_be_done_before_its_turn_is_left_out_and_not_released() -> None:
    place = Place(2, test=TEST)
    place.run("a", "n1")
    place.step()
    assert place.phases() == {"n0": "Draining", "n1": "Pending"}
    place.say_done("n1")
    place.step()
    assert place.phases()["n1"] == "Skipped"
    assert place.message("n1") == "It was left out: its work was said to be done before its turn came."


def test_what_is_said_of_the_maintenance_that_has_a_node_is_not_taken_by_one_that_waits_for_it() -> None:
    place = Place(1, created_at=10.0)
    older = Maintenance("older", nodes=("n0",), created_at=5.0)
    place.step(older)
    place.nodes["n0"] = replace(place.nodes["n0"], mark=Mark("older", done=True))
    place.step(older)
    assert place.phases() == {"n0": "Pending"}


def test_canaries_go_first_then_as_many_as_may() -> None:
    place = Place(6, canary=2, max_unavailable="50%")
    place.step()
    assert place.phases() == {"n0": "Draining", "n1": "Draining"} | dict.fromkeys(("n2", "n3", "n4", "n5"), "Pending")
    assert "n0, n1 goes first" in place.message("n5")
    place.step()
    place.say_done("n0")
    place.step()
    assert place.phases()["n2"] == "Pending", "one of the canaries has yet to be released"
    place.say_done("n1")
    place.step()
    assert [name for name, phase in place.phases().items() if phase == "Draining"] == ["n2", "n3", "n4"]
    assert "at most 3" in place.message("n5")


@pytest.mark.parametrize(("given", "nodes", "expected"), [(1, 9, 1), ("25%", 9, 3), ("1%", 9, 1), (20, 9, 20)])
def test_how_many_at_a_time(given: int | str, nodes: int, expected: int) -> None:
    assert most(Maintenance("m", max_unavailable=given), nodes) == expected


def test_a_failed_test_halts_the_rest_until_the_node_is_said_to_be_good() -> None:
    place = Place(2, canary=1, test=TEST, test_seconds=60)
    place.step()
    place.step()
    place.say_done("n0")
    place.step()
    assert place.phases() == {"n0": "Verifying", "n1": "Pending"}
    assert list(to_test(place.one, place.one.states, place.there)) == ["n0"]
    place.test("n0", TestPhase.RUNNING)
    place.step()
    assert place.phases()["n0"] == "Verifying"
    place.test("n0", TestPhase.FAILED, "container test exited with 7")
    assert place.step() is Phase.HALTED
    assert place.phases() == {"n0": "Failed", "n1": "Pending"}
    assert "x/test-n0: container test exited with 7" in place.message("n0")
    assert place.step() is Phase.HALTED
    place.say_done("n0")
    assert place.step() is Phase.ACTIVE
    assert place.phases() == {"n0": "Released", "n1": "Draining"}


def test_a_test_that_does_not_come_to_an_end_has_failed() -> None:
    place = Place(1, test=TEST, test_seconds=60)
    place.step()
    place.step()
    place.say_done("n0")
    place.step()
    place.now += 59
    place.step()
    assert place.phases() == {"n0": "Verifying"}
    place.now += 1
    assert place.step() is Phase.HALTED
    assert "had not succeeded within 60 s" in place.message("n0")


def test_the_word_that_the_work_is_done_is_not_taken_for_one_about_the_test() -> None:
    place = Place(1, test=TEST)
    place.step()
    place.step()
    place.nodes["n0"] = replace(place.nodes["n0"], mark=Mark("m", done=True))
    told = progress(place.one, place.there, {}, {}, NOW)
    assert list(to_test(place.one, told.states, place.there)) == [], "first the word has to be gone"


def test_few_jobs_have_to_go() -> None:
    place = Place(7)
    place.run("big", "n0", "n1", "n2")
    place.run("small", "n3", "n5")
    place.step()
    pending = [NodeState(name, NodePhase.PENDING, NOW) for name in place.nodes]
    assert next_ones(pending, place.there) == ["n4", "n6", "n3", "n5", "n0", "n1", "n2"]
    place.leaving = {"big"}
    assert next_ones(pending, place.there) == ["n0", "n1", "n2", "n4", "n6", "n3", "n5"]


def test_nobody_goes_where_its_turn_comes_next_and_nobody_leaves_there_yet() -> None:
    place = Place(4, why="driver 580")
    place.run("a", "n0", "n1", "n2", "n3")
    place.step()
    assert closed(place.one, place.there, {}, NOW) == {
        "n0": "it is under maintenance m: driver 580",
        "n1": "its turn in maintenance m comes next: driver 580",
    }
    told = has_to_leave(place.one, place.there["n0"])
    assert told is not None
    assert str(told) == "It leaves node n0 for maintenance: m, driver 580."


def test_who_cannot_be_told_to_leave_is_named_and_nobody_else_leaves_in_vain() -> None:
    place = Place(1)
    place.run("a", "n0")
    place.stuck["n0"] = ("a/a, which is not preemptible",)
    place.step()
    place.step()
    assert place.phases() == {"n0": "Draining"}
    assert place.message("n0") == "Jobs there can't be told to leave it: a/a, which is not preemptible."
    assert has_to_leave(place.one, place.there["n0"]) is None
    place.end("a")
    place.stuck.clear()
    place.step()
    assert place.phases() == {"n0": "Safe"}


def test_jobs_that_are_waited_for_are_not_told_to_leave() -> None:
    place = Place(1, drain=Drain.WAIT)
    place.run("a", "n0")
    place.step()
    assert "may run to their end" in place.message("n0")
    assert has_to_leave(place.one, place.there["n0"]) is None


def test_before_its_window_nothing_is_done_and_when_it_is_over_nodes_are_released() -> None:
    place = Place(3, start=NOW + 100, end=NOW + 200)
    place.run("a", "n0", "n1", "n2")
    assert place.step() is Phase.WAITING
    assert closed(place.one, place.there, {}, NOW) == {}
    assert taken_at([place.one], place.nodes) == dict.fromkeys(place.nodes, NOW + 100)
    place.now += 100
    assert place.step() is Phase.ACTIVE
    assert taken_at([place.one], place.nodes) == dict.fromkeys(place.nodes, NOW + 100)
    assert place.phases()["n0"] == "Draining"
    place.now += 100
    assert place.step() is Phase.FINISHED
    assert place.phases() == {"n0": "Released", "n1": "Skipped", "n2": "Skipped"}
    assert taken_at([place.one], place.nodes) == {}


def test_a_node_is_worked_on_by_one_maintenance_at_a_time_the_oldest_first() -> None:
    place = Place(2, created_at=10.0)
    older = Maintenance("older", nodes=("n0",), created_at=5.0)
    place.step(older)
    assert place.phases() == {"n0": "Pending", "n1": "Draining"}
    assert "maintenance older is not done with it" in place.message("n0")
    done = replace(older, states=(NodeState("n0", NodePhase.RELEASED, NOW),))
    place.one = replace(place.one, max_unavailable=2)
    place.step(done)
    assert place.phases()["n0"] == "Draining"


@pytest.mark.parametrize(
    "older",
    [
        Maintenance("older", nodes=("n0", "n1"), start=NOW + 86_400),
        Maintenance("older", nodes=("n0", "n1"), phase=Phase.HALTED, states=(NodeState("n1", NodePhase.FAILED, NOW),)),
    ],
    ids=["its window is ahead", "it has halted"],
)
def test_who_waits_leaves_nodes_with_which_it_has_not_begun_to_others(older: Maintenance) -> None:
    """Else nobody could change a fan before the next window of the whole cluster is over."""
    place = Place(1, created_at=10.0)
    place.step(older)
    assert place.phases() == {"n0": "Draining"}
    begun = replace(older, start=None, phase=Phase.ACTIVE)
    assert owners([place.one, begun], place.nodes, NOW)["n0"] == "m", "who has begun goes on"
    over = replace(place.one, states=(NodeState("n0", NodePhase.RELEASED, NOW),))
    assert owners([over, older], place.nodes, NOW)["n0"] == "older"


def test_a_node_is_of_who_was_said_to_be_done_until_that_word_is_taken() -> None:
    place, later = Place(1), Maintenance("later", nodes=("n0",), created_at=20.0)
    place.step(later)
    place.say_done("n0")
    over = replace(place.one, phase=Phase.FINISHED, states=(NodeState("n0", NodePhase.RELEASED, NOW),))
    assert owners([over, later], place.nodes, NOW) == {"n0": "m"}
    place.nodes["n0"] = replace(place.nodes["n0"], mark=Mark())
    assert owners([over, later], place.nodes, NOW) == {"n0": "later"}


def test_nodes_come_and_go() -> None:
    place = Place(3, nodes=(), selector=(("pool", "a"),))
    assert place.step() is Phase.WAITING
    for name in ("n0", "n1"):
        place.label(name, pool="a")
    place.step()
    assert place.phases() == {"n0": "Draining", "n1": "Pending"}
    del place.nodes["n0"]
    place.nodes["n1"] = Node("n1")
    place.label("n2", pool="a")
    place.step()
    assert place.phases() == {"n0": "Skipped", "n2": "Draining"}


def test_a_node_that_does_not_exist_is_told() -> None:
    place = Place(2)
    del place.nodes["n0"]
    place.step()
    assert place.phases() == {"n0": "Skipped", "n1": "Draining"}
    assert "there is no such node" in place.message("n0")


def test_more_nodes_than_a_status_has_lines_for_are_not_begun() -> None:
    place = Place(MAX_NODES + 1, nodes=(), selector=(("pool", "a"),))
    for name in place.nodes:
        place.label(name, pool="a")
    assert place.step() is Phase.WAITING
    assert place.phases() == {}
    place.label("n0", pool="b")
    assert place.step() is Phase.ACTIVE
    place.label("n0", pool="a")
    place.step()
    assert len(place.phases()) == MAX_NODES


class TestDriverUpgrade:
    def place(self, nodes: int = 2) -> Place:
        place = Place(nodes, work=NodeWork.DRIVER_UPGRADE)
        place.upgrade("upgrade-done")
        return place

    def test_nodes_are_held_back_and_not_drained_before_the_operator_asks_for_it(self) -> None:
        place = self.place()
        place.step()
        assert place.phases() == {"n0": "Pending", "n1": "Pending"}
        assert "does not ask" in place.message("n0")
        assert all(wanted(place.one, state).held for state in place.one.states)
        place.upgrade("upgrade-required")
        place.step()
        assert place.phases() == {"n0": "Draining", "n1": "Pending"}

    def test_a_safe_node_is_let_go_and_is_done_when_the_operator_says_so(self) -> None:
        place = self.place(1)
        place.upgrade("upgrade-required")
        place.run("a", "n0")
        place.step()
        [state] = place.one.states
        assert wanted(place.one, state) == Wanted("m", cordoned=True, held=True, done_is_taken=False)
        place.end("a")
        place.step()
        [state] = place.one.states
        assert (state.phase, wanted(place.one, state).held) == (NodePhase.SAFE, False)
        for step in ("cordon-required", "wait-for-jobs-required", "pod-restart-required", "uncordon-required"):
            place.upgrade(step)
            place.step()
            assert place.phases() == {"n0": "Safe"}
        place.upgrade("upgrade-done")
        assert place.step() is Phase.FINISHED

    def test_a_failed_upgrade_halts_until_it_succeeds(self) -> None:
        place = self.place()
        place.upgrade("upgrade-required")
        place.step()
        place.step()
        place.upgrade("upgrade-failed", "n0")
        assert place.step() is Phase.HALTED
        assert "upgrade of its driver failed" in place.message("n0")
        assert place.phases()["n1"] == "Pending"
        place.upgrade("upgrade-done", "n0")
        assert place.step() is Phase.ACTIVE
        assert place.phases() == {"n0": "Released", "n1": "Draining"}

    def test_the_window_ends_no_upgrade_half_way_and_what_was_left_out_stays_held_back(self) -> None:
        place = self.place(3)
        place.one = replace(place.one, end=NOW + 10, max_unavailable=2)
        place.upgrade("upgrade-required")
        place.step()
        place.step()
        place.upgrade("drain-required", "n0")
        place.now += 10
        place.step()
        assert place.phases() == {"n0": "Safe", "n1": "Released", "n2": "Skipped"}
        assert [wanted(place.one, state).held for state in place.one.states] == [False, False, True]
        place.upgrade("upgrade-done", "n0")
        assert place.step() is Phase.FINISHED

    @pytest.mark.parametrize("state", ["cordon-required", "wait-for-jobs-required", "node-maintenance-required"])
    def test_without_a_maintenance_jobs_leave_but_for_who_may_stay_while_the_operator_waits(self, state: str) -> None:
        node = Node("n0", labels={UPGRADE_STATE: state})
        told = for_upgrade(There(node, {"a": "a/a"}))
        assert told is not None
        assert told.reason is Reason.NODE_MAINTENANCE
        assert for_upgrade(There(node, {"a": "a/a"}, stuck=("a/a, which is not preemptible",))) is None
        later = Node("n0", labels={UPGRADE_STATE: "pod-deletion-required"})
        assert for_upgrade(There(later, {"a": "a/a"}, stuck=("a/a, which is not preemptible",))) is not None


def test_nothing_of_ours_is_left_on_a_node_that_is_released() -> None:
    noted = Node("n0", mark=Mark("m", cordoned=True, held=True), labels={UPGRADE_SKIP: "true"}, unschedulable=True)
    assert not is_as_wanted(noted, Wanted())
    assert is_as_wanted(Node("n0", unschedulable=True, labels={UPGRADE_SKIP: "true"}), Wanted())
    assert is_as_wanted(noted, Wanted("m", cordoned=True, held=True))
    assert not is_as_wanted(noted, Wanted("m", cordoned=True, held=False))
    assert not is_as_wanted(Node("n0", mark=Mark(done=True)), Wanted())


ARROWS = {
    NodePhase.PENDING: {NodePhase.DRAINING, NodePhase.SKIPPED},
    NodePhase.DRAINING: {NodePhase.SAFE, NodePhase.VERIFYING, NodePhase.FAILED, NodePhase.RELEASED, NodePhase.SKIPPED},
    NodePhase.SAFE: {NodePhase.VERIFYING, NodePhase.FAILED, NodePhase.RELEASED, NodePhase.SKIPPED},
    NodePhase.VERIFYING: {NodePhase.RELEASED, NodePhase.FAILED, NodePhase.SKIPPED},
    NodePhase.FAILED: {NodePhase.RELEASED, NodePhase.VERIFYING, NodePhase.SKIPPED},
    NodePhase.RELEASED: set[NodePhase](),
    NodePhase.SKIPPED: set[NodePhase](),
}


EVENTS = ("end", "done", "pass", "fail", "late", "delete", "nothing")


@given(
    st.integers(1, 6),
    st.sampled_from([1, 2, "50%", "100%"]),
    st.integers(0, 3),
    st.sampled_from([None, TEST]),
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 5)), max_size=40),
)
def test_whatever_happens(
    nodes: int, most_at_once: int | str, canary: int, test: dict[str, object] | None, history: list[tuple[str, int]]
) -> None:
    place = Place(nodes, max_unavailable=most_at_once, canary=canary, test=test)
    for number in range(nodes):
        place.run(f"job-{number // 2}", f"n{number}")
    before: dict[str, NodeState] = {}
    for what, number in history:
        happen(place, what, number, f"n{number % nodes}")
        phase = place.step()
        now = {state.name: state for state in place.one.states}
        goes_on(before, now)
        assert sum(state.phase in CLOSED for state in now.values()) <= most(place.one, max(1, len(now)))
        assert (phase is Phase.FINISHED) == (bool(now) and all(state.phase in OVER for state in now.values()))
        before = now


def happen(place: Place, what: str, number: int, node: str) -> None:
    if what == "end":
        place.end(f"job-{number}")
    elif what == "done" and node in place.nodes:
        place.say_done(node)
    elif what in {"pass", "fail"}:
        place.test(node, TestPhase.SUCCEEDED if what == "pass" else TestPhase.FAILED)
    elif what == "late":
        place.now += 1000
    elif what == "delete":
        place.nodes.pop(node, None)


def goes_on(before: Mapping[str, NodeState], now: Mapping[str, NodeState]) -> None:
    """See that nodes go on by the arrows alone, that nobody begins after a failure, and no other before the canaries."""
    was = {name: before[name].phase if name in before else NodePhase.PENDING for name in now}
    for name, state in now.items():
        assert state.phase is was[name] or state.phase in ARROWS[was[name]]
        assert was[name] not in OVER or state == before[name]
    begun = [state for name, state in now.items() if state.phase in CLOSED and was[name] is NodePhase.PENDING]
    failed = any(state.phase is NodePhase.FAILED for state in now.values())
    waiting = any(state.canary and state.phase not in OVER for state in now.values())
    assert not begun or not failed
    assert not waiting or all(state.canary for state in begun)

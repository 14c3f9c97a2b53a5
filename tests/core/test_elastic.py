"""Which pods a gang can give up, and what it keeps."""

from dataclasses import replace

from queuectl.core.elastic import alike, finished, keys, last, numbered, pods_of, spare
from queuectl.kube.pods import nodes_of
from queuectl.model.lifecycle import Attempt, AttemptState, Shrink
from queuectl.model.plan import Placement, Portion, place
from queuectl.model.reasons import Reason, why
from tests.support.builders import GPU, requests, role

ASKS = requests(gpu=2, cpu=4)
HOLDS = Portion(
    (
        Placement("worker", "a", "n3", 2, ASKS),
        Placement("worker", "b", "n1", 1, ASKS),
        Placement("worker", "a", "n1", 3, ASKS),
        Placement("ps", "a", "n2", 1, requests(cpu=4)),
    ),
    {("a", GPU): 10, ("b", GPU): 2, ("b", "cpu"): 4000},  # cpu has a quota in one flavor only
)
WHY = why(Reason.RUNNING, pods=7)


def test_the_last_pods_go_and_take_their_quota_along() -> None:
    part = last(HOLDS, {"worker": 3})
    assert [(p.node, p.flavor, p.pods) for p in part.placements] == [("n1", "b", 1), ("n3", "a", 2)]
    assert part.quota == {("a", GPU): 4, ("b", GPU): 2, ("b", "cpu"): 4000}
    rest = HOLDS.without(part)
    assert rest.quota == {("a", GPU): 6}
    assert pods_of(rest.placements) == {"worker": 3, "ps": 1}


def test_those_that_stay_keep_their_index_and_their_node() -> None:
    before = Attempt("g", 1, AttemptState.RUNNING, 1, HOLDS.placements, 0.0, quota=HOLDS.quota)
    for pods in range(6):
        after = before.shrinking(Shrink(WHY, last(HOLDS, {"worker": pods})))
        stay = nodes_of(after)
        assert stay.items() <= nodes_of(before).items()
        assert sorted(stay) == [("ps", 0), *(("worker", index) for index in range(6 - pods))]
        assert sorted(nodes_of(replace(after, placements=after.held)).values()) == sorted(nodes_of(before).values())


def test_no_more_can_be_given_than_there_is() -> None:
    assert last(HOLDS, {"worker": 9}).pods == 6
    assert last(HOLDS, {}) == Portion((), {})
    assert HOLDS.has(HOLDS)
    assert not last(HOLDS, {"worker": 3}).has(HOLDS)
    assert HOLDS.without(HOLDS) == Portion((), {})


def test_what_a_gang_can_spare() -> None:
    roles = [replace(role("worker", 8), least=4), role("ps", 1)]

    def spared(workers: int, done: int = 0) -> int:
        placements = [Placement(name, "a", "n", pods, ASKS) for name, pods in {"worker": workers, "ps": 1}.items()]
        gang = Attempt("g", 1, AttemptState.RUNNING, 1, tuple(p for p in placements if p.pods), 0.0)
        gang = replace(gang, done=frozenset(("worker", index) for index in range(done)))
        found = spare(roles, gang)
        assert found["ps"] == 0
        return found["worker"]

    assert [spared(workers) for workers in (8, 6, 4, 3)] == [4, 2, 0, 0]
    # Those that are done are of the four that it must have; the last one that runs decides about the gang and stays.
    assert [spared(8 - done, done) for done in (1, 2, 3, 4, 5, 6, 7)] == [4, 4, 4, 3, 2, 1, 0]
    assert spared(0, 8) == 0


def test_the_done_leave_the_indexes_and_the_nodes_of_the_others_as_they_are() -> None:
    before = Attempt("g", 1, AttemptState.RUNNING, 1, HOLDS.placements, 0.0, quota=HOLDS.quota)
    at = numbered(before.placements)
    order = [("worker", 4), ("worker", 0), ("worker", 5), ("worker", 2)]
    for one in range(len(order)):
        done = finished(before, order[one : one + 1])
        assert done.part.placements == (replace(at[order[one]], pods=1),)
        after = before.without(done)
        assert numbered(after.placements, after.done) == {
            key: replace(p, pods=next(q.pods for q in after.placements if place(q) == place(p)))
            for key, p in at.items()
            if key not in order[: one + 1]
        }
        before = after
    assert before.quota == {("a", GPU): 2, ("b", GPU): 2, ("b", "cpu"): 4000}
    # What it gives up then are the last ones of those that run.
    less = before.shrinking(Shrink(WHY, last(before.whole, {"worker": 1})))
    assert less.leaving is not None
    assert [place(p) for p in less.leaving.placements] == [place(at["worker", 3])]
    assert keys(less.placements, less.done) == [("ps", 0), ("worker", 1)]
    assert keys(less.held, less.done) == [("ps", 0), ("worker", 1), ("worker", 3)]


def test_pods_that_are_done_together_are_given_back_together() -> None:
    gang = Attempt("g", 1, AttemptState.RUNNING, 1, HOLDS.placements, 0.0, quota=HOLDS.quota)
    done = finished(gang, [("worker", index) for index in range(5)])
    assert done.part.quota == {("a", GPU): 8, ("b", GPU): 2, ("b", "cpu"): 4000}
    assert pods_of(gang.without(done).placements) == {"worker": 1, "ps": 1}


def test_how_pods_are_shared_among_roles() -> None:
    assert [alike({"a": 4, "b": 2, "c": 0}, n) for n in (0, 3, 6)] == [
        {"a": 0, "b": 0, "c": 0}, {"a": 2, "b": 1, "c": 0}, {"a": 4, "b": 2, "c": 0},
    ]  # fmt: skip
    assert alike({"a": 0}, 0) == {"a": 0}

"""Which pods a gang can give up, and what it keeps."""

from dataclasses import replace

from queuectl.core.elastic import alike, last, pods_of, spare
from queuectl.kube.pods import nodes_of
from queuectl.model.lifecycle import Attempt, AttemptState, Shrink
from queuectl.model.plan import Placement, Portion
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
    assert spare(roles, {"worker": 6, "ps": 1}) == {"worker": 2, "ps": 0}
    assert spare(roles, {"worker": 3, "ps": 1}) == {"worker": 0, "ps": 0}
    assert [alike({"a": 4, "b": 2, "c": 0}, n) for n in (0, 3, 6)] == [
        {"a": 0, "b": 0, "c": 0}, {"a": 2, "b": 1, "c": 0}, {"a": 4, "b": 2, "c": 0},
    ]  # fmt: skip
    assert alike({"a": 0}, 0) == {"a": 0}

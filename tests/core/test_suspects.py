"""Which nodes are avoided for what happened on them, and for how long."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queuectl.core.suspects import DAY, TOGETHER, avoided, key, most, repeats, suspicions
from queuectl.model.reasons import Reason, Why, why
from queuectl.model.suspects import Offence, Suspicion

FIRST = 600.0
GONE = why(Reason.NODE_LOST, node="n")
FAILED = why(Reason.POD_FAILED, pod="p", code=1)
EVICTED = why(Reason.POD_DISRUPTED, pod="p", problem="The node was low on resource: memory.")
LATE = why(Reason.PODS_READY_TIMEOUT, ready=1, pods=2, seconds=300, waits="")
STUCK = why(Reason.POD_STUCK, pod="p", seconds=300)
SOFT = (FAILED, EVICTED, LATE, STUCK)


def offence(at: float, because: Why = GONE, *, node: str = "n", uid: str = "job", attempt: int = 1) -> Offence:
    return Offence(node, at, because, uid, attempt)


def until(*known: Offence, node: str = "n") -> float | None:
    """Return until when a node is suspect, or was."""
    found = suspicions(known, FIRST).get(node)
    return found.until if found else None


def test_a_node_is_avoided_for_ten_minutes_and_then_trusted() -> None:
    assert suspicions([offence(50)], FIRST) == {"n": Suspicion("n", 50, 650, GONE, 1)}


def test_each_time_in_a_row_doubles_it_and_a_day_is_the_most() -> None:
    known, now = [], 0.0
    for i in range(12):
        known.append(offence(now, uid=f"job-{i}"))
        last = suspicions(known, FIRST)["n"]
        assert last.times == i + 1
        assert last.until - now == min(DAY, FIRST * 2**i)
        now = last.until + 1


def test_after_a_clean_day_it_begins_anew() -> None:
    assert until(offence(0), offence(600 + DAY - 1)) == 600 + DAY - 1 + 1200
    assert until(offence(0), offence(600 + DAY)) == 600 + DAY + 600


def test_what_befalls_several_gangs_at_once_is_one_time() -> None:
    known = [offence(at, uid=f"job-{at}") for at in (0, 0, 5, 590)]
    assert suspicions(known, FIRST)["n"] == Suspicion("n", 0, 1190, GONE, 1)


@pytest.mark.parametrize(("known", "suspect"), [
    ([offence(0, FAILED)], False),
    ([offence(0, FAILED), offence(60, FAILED, attempt=2)], True),
    ([offence(0, FAILED), offence(60, FAILED, uid="other")], True),
    ([offence(0, FAILED), offence(3600, FAILED, uid="other")], False),
    ([offence(0, FAILED), offence(60, FAILED, node="m", uid="other")], False),
    # A job that fails here and there does so by itself, also if it fails here twice or another does.
    ([offence(0, FAILED), offence(60, FAILED, attempt=2), offence(120, FAILED, node="m", attempt=3)], False),
    ([offence(0, FAILED), offence(60, FAILED, uid="other"), offence(120, FAILED, node="m", attempt=2)], False),
    ([offence(0, EVICTED)], True),
    ([offence(0, LATE)], True),
    ([offence(0, STUCK)], True),
    ([offence(0, EVICTED), offence(DAY - 1, EVICTED, node="m", attempt=2)], False),
    ([offence(0, EVICTED), offence(60, EVICTED, node="m", uid="other")], True),
    # Losing one node after the other is no job's fault.
    ([offence(0), offence(60, node="m", attempt=2)], True),
])  # fmt: skip
def test_what_speaks_against_a_node(known: list[Offence], *, suspect: bool) -> None:
    assert ("n" in suspicions(known, FIRST)) == suspect


def test_the_same_seen_again_is_known_by_node_attempt_and_reason() -> None:
    # By the next controller, before the attempt has ended.
    assert key(offence(30)) == key(offence(0))
    assert repeats(offence(30), offence(0))
    assert not repeats(offence(TOGETHER), offence(0))
    assert not repeats(offence(30), None)
    for other in (offence(30, attempt=2), offence(30, uid="other"), offence(30, node="m"), offence(30, EVICTED)):
        assert key(other) != key(offence(0))


@pytest.mark.parametrize(("nodes", "limit"), [(0, 0), (1, 0), (2, 1), (3, 1), (19, 1), (20, 2), (1000, 100)])
def test_a_tenth_of_a_flavor_is_avoided_at_most_and_never_its_only_node(nodes: int, limit: int) -> None:
    assert most(nodes) == limit


def test_those_are_avoided_that_were_suspect_most_often() -> None:
    known = [offence(0, node="often"), offence(601, node="often"), *(offence(700, node=f"n{i}") for i in range(3))]
    nodes = {"often", *(f"n{i}" for i in range(19))}
    assert set(avoided(suspicions(known, FIRST), known, [nodes])) == {"often", "n0"}


def test_when_pods_speak_against_too_many_nodes_it_is_not_the_nodes() -> None:
    """A broken image, a storage that is down: it would only make the rest of the nodes crowded."""
    known = [offence(0, LATE, node=f"n{i}", uid=f"job-{i}") for i in range(3)]
    nodes = {f"n{i}" for i in range(20)}
    assert avoided(suspicions(known, FIRST), known, [nodes]) == {}
    assert set(avoided(suspicions(known[:2], FIRST), known[:2], [nodes])) == {"n0", "n1"}
    lost = [*known, offence(0, node="n9")]
    assert set(avoided(suspicions(lost, FIRST), lost, [nodes])) == {"n9"}


def test_a_node_of_two_flavors_counts_in_both() -> None:
    known = [offence(i, node=f"n{i}") for i in range(3)]
    found = avoided(suspicions(known, FIRST), known, [{"n0", "n1", "a"}, {"n1", "n2", "b"}])
    assert set(found) == {"n0", "n2"}


OFFENCES = st.lists(
    st.builds(
        offence,
        st.floats(0, 3 * DAY),
        st.sampled_from([GONE, *SOFT]),
        node=st.integers(0, 29).map("n{}".format),
        uid=st.sampled_from("abcdef"),
        attempt=st.integers(1, 9),
    ),
    max_size=60,
)


@given(OFFENCES, st.integers(1, 30))
def test_suspicion_always_ends_and_never_takes_more_than_its_share(known: list[Offence], count: int) -> None:
    found = suspicions(known, FIRST)
    for one in found.values():
        last = max(other.at for other in known if other.node == one.node)
        assert one.since <= last
        assert one.until <= last + DAY
    nodes = {f"n{i}" for i in range(count)}
    chosen = avoided(found, known, [nodes])
    assert len(chosen.keys() & nodes) <= most(count)
    assert chosen.items() <= found.items()
    if len(found.keys() & nodes) <= most(count):
        assert chosen == found


@given(
    st.lists(st.tuples(st.floats(0, DAY / 4), st.integers(0, 29), st.sampled_from(SOFT)), min_size=2, max_size=40),
    OFFENCES,
)
def test_a_job_that_crashes_wherever_it_is_makes_nobody_suspect(
    crashes: Sequence[tuple[float, int, Why]], others: list[Offence]
) -> None:
    """As soon as it has done so on a second node, nothing is changed by anything that it does."""
    known = [offence(at, because, node=f"n{node}", uid="buggy") for at, node, because in crashes]
    rest = [one for one in others if one.why is GONE]
    if len({one.node for one in known}) > 1:
        assert suspicions([*rest, *known], FIRST) == suspicions(rest, FIRST)
    else:
        assert suspicions(known, FIRST).keys() <= {known[0].node}


@given(OFFENCES)
def test_the_order_in_which_offences_are_known_is_no_matter(known: list[Offence]) -> None:
    distinct = list({(one.at, one.node, one.uid, one.attempt): one for one in known}.values())
    assert suspicions(distinct, FIRST) == suspicions(distinct[::-1], FIRST)

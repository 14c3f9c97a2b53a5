"""What queues have used before, against the integral that it stands for; and whose turn it is by shares."""

from dataclasses import replace
from fractions import Fraction
from math import log
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queuectl.core.cycle import plan
from queuectl.core.snapshot import Policy, Snapshot
from queuectl.core.usage import STEPS, History, Past
from queuectl.model.objects import Queue
from queuectl.model.policy import FairRule, Quota
from tests.support.builders import GPU, gang, node, role, snapshot

CELL = ("any", GPU)
DAY = 86_400.0
Span = tuple[str, int, float, float | None]  # queue, amount, begin, length
times = st.floats(0, 40 * DAY)
spans = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(1, 64), times, st.one_of(st.none(), times)))


def integral(amount: int, begin: float, end: float, now: float, half_life: float) -> float:
    """Add up many short moments, each with its weight."""
    moments = 4000
    step = (end - begin) / moments
    ages = ((now - begin - (i + 0.5) * step) / half_life for i in range(moments))
    weight = sum(float(2.0**-age) for age in ages)
    return amount * weight * step * log(2) / half_life


@pytest.mark.parametrize(("begin", "end"), [(0, 40), (10, 20), (39, 40), (0, 1)])
def test_each_moment_counts_by_its_age(begin: int, end: int) -> None:
    history = History(7 * DAY)
    history.begin("q", {CELL: 8}, begin * DAY)
    history.end("q", {CELL: 8}, end * DAY)
    found = history.past(50 * DAY)["q"][CELL]
    assert float(found) == pytest.approx(integral(8, begin * DAY, end * DAY, 50 * DAY, 7 * DAY), abs=1 / STEPS)


def test_who_holds_it_for_ever_has_used_as_much_and_who_stops_half_of_it_a_half_life_later() -> None:
    history = History(100)
    history.begin("q", {CELL: 8}, 0.0)
    assert history.past(100) == {"q": {CELL: 4}}
    assert history.past(10_000_000) == {"q": {CELL: 8}}
    history.end("q", {CELL: 8}, 10_000_000)
    assert history.past(10_000_100) == {"q": {CELL: 4}}
    assert history.past(10_010_000) == {}


def test_without_a_half_life_nothing_is_kept() -> None:
    history = History()
    history.begin("q", {CELL: 8}, 0.0)
    history.recall("q", {CELL: 8.0}, 0.0)
    assert history.past(100) == {}


@given(spans, st.randoms(use_true_random=False))
def test_the_order_in_which_it_is_told_does_not_matter(spans: list[Span], dice: Random) -> None:
    def told(order: list[Span]) -> dict[str, dict[tuple[str, str], Fraction]]:
        history = History(3 * DAY)
        for queue, amount, begin, length in order:
            history.begin(queue, {CELL: amount}, begin)
            if length is not None:
                history.end(queue, {CELL: amount}, begin + length)
        return history.past(90 * DAY)

    one = told(spans)
    dice.shuffle(spans)
    other = told(spans)
    for queue in one.keys() | other.keys():
        amounts = [float(some.get(queue, {}).get(CELL, 0)) for some in (one, other)]
        assert amounts[0] == pytest.approx(amounts[1], abs=1.1 / STEPS)


def cohort(past: Past, *, own: int = 0, fair: bool = True, weight: int = 1) -> Snapshot:
    """Two queues in a cohort of 8 GPUs; each has a job of 8, that of a came first."""
    queues = [
        Queue("team", quotas={CELL: Quota(8 - own)}),
        Queue("a", parent="team", quotas={CELL: Quota(own)}, weight=Fraction(weight)),
        Queue("b", parent="team", quotas={CELL: Quota(0)}),
    ]
    waiting = [
        gang("j-a", role(gpu=8), queue="a", submitted_at=1.0),
        gang("j-b", role(gpu=8), queue="b", submitted_at=2.0),
    ]
    view = snapshot(waiting, nodes=[node("n", gpu=8)], queues=queues)
    return replace(view, past=past, policy=Policy(fair_sharing=(FairRule.FINAL,) if fair else ()))


def winner(view: Snapshot) -> str:
    [admission] = plan(view, 0.0).admissions
    return admission.uid


def used(**gpus: Fraction | int) -> Past:
    return {queue: {CELL: Fraction(amount)} for queue, amount in gpus.items()}


def test_of_two_that_ask_for_the_same_the_one_goes_first_that_has_borrowed_less() -> None:
    assert winner(cohort({})) == "j-a"
    assert winner(cohort(used(a=2, b=1))) == "j-b"
    assert winner(cohort(used(a=Fraction(1, 1000)))) == "j-b"
    assert winner(cohort(used(a=1, b=2))) == "j-a"


def test_a_weight_counts_for_the_past_too() -> None:
    assert winner(cohort(used(a=4, b=3), weight=2)) == "j-a"


def test_what_a_queue_used_of_its_own_is_not_held_against_it() -> None:
    assert winner(cohort(used(a=4, b=0), own=4)) == "j-a"


def test_without_fair_sharing_the_past_does_not_matter() -> None:
    assert winner(cohort(used(a=8), fair=False)) == "j-a"


def test_the_past_of_queues_below_counts_above() -> None:
    queues = [
        Queue("top", quotas={CELL: Quota(8)}),
        Queue("left", parent="top"),
        Queue("right", parent="top"),
        Queue("a", parent="left"),
        Queue("idle", parent="left"),
        Queue("b", parent="right"),
    ]
    for one in ("a", "idle", "b"):
        queues.append(replace(queues.pop([q.name for q in queues].index(one)), quotas={CELL: Quota(0)}))
    waiting = [
        gang("j-a", role(gpu=8), queue="a", submitted_at=1.0),
        gang("j-b", role(gpu=8), queue="b", submitted_at=2.0),
    ]
    view = snapshot(waiting, nodes=[node("n", gpu=8)], queues=queues)
    view = replace(view, policy=Policy(fair_sharing=(FairRule.FINAL,)))
    assert winner(view) == "j-a"
    assert winner(replace(view, past=used(idle=3))) == "j-b"
    assert winner(replace(view, past=used(gone=3))) == "j-a"


@pytest.mark.parametrize(("priority", "first"), [(0, "late"), (1, "early")])
def test_where_nodes_are_fewer_than_quotas_promise_who_uses_the_smaller_part_of_its_own_goes_first(
    priority: int, first: str
) -> None:
    """With fair sharing, priorities alike: else who submits first has all that is left of a cluster that shrank."""
    owned = {CELL: Quota(16)}
    queues = [Queue("all"), Queue("much", "all", quotas=owned), Queue("little", "all", quotas=owned)]
    waiting = [
        gang("early", role(gpu=8), queue="much", priority=priority, submitted_at=1.0),
        gang("late", role(gpu=8), queue="little", submitted_at=2.0),
    ]
    view = snapshot(waiting, nodes=[node("n", gpu=8)], queues=queues, usage={("much", *CELL): 8})
    assert winner(view) == "early"
    assert winner(replace(view, policy=Policy(fair_sharing=(FairRule.FINAL,)))) == first

"""Elastic gangs that give way: their spare pods first, no more of them than needed, and nobody whole without need."""

import random
from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from queuectl.core.elastic import last
from queuectl.core.preemption import Running
from queuectl.model.plan import Portion
from queuectl.model.policy import VictimChoice
from queuectl.model.work import Work
from tests.support.victims import NOW, Case, draw, fair, total

LEAST, PEERS = VictimChoice
seeds = st.integers(0, 10**9)


def elastic(case: Case, dice: random.Random) -> Case:
    """Return the case with gangs that may run with one pod."""
    running = {
        queue: [
            replace(one, elastic=spare(one, one.pods - 1) if one.ready_at and dice.random() < 0.8 else None)
            for one in gangs
        ]
        for queue, gangs in case.snapshot.running.items()
    }
    return replace(case, snapshot=replace(case.snapshot, running=running))


def spare(one: Running, pods: int) -> Portion | None:
    return last(Portion(one.placements, one.usage), {"worker": pods}) if pods else None


def fewer(one: Running, pods: int) -> list[Running]:
    """Return what a victim gives up with only so many pods."""
    part = spare(one, pods)
    return [replace(one, usage=part.quota, placements=part.placements)] if part else []


def lost(victims: list[Running]) -> Work:
    return total(one.lost(NOW) for one in victims)


@given(seeds, st.booleans())
@example(seed=41197, by_shares=False)  # two that go whole leave so much that a third need not go
def test_no_more_is_taken_than_needed_and_no_more_work_is_lost(seed: int, by_shares: bool) -> None:  # noqa: FBT001
    dice = random.Random(seed)
    case = elastic(draw(dice), dice)
    case = fair(case) if by_shares else case
    ours, peers = case.victims(LEAST), case.victims(PEERS)
    assert not any(one.gives_up for one in peers)
    assert ours or not peers
    assert not peers or lost(ours) <= lost(peers)
    assert len({one.uid for one in ours}) == len(ours)
    if by_shares or not ours:
        return
    assert case.makes_room(ours)
    for one in ours:
        others = [other for other in ours if other is not one]
        assert not case.makes_room(others)
        if one.gives_up:
            pods = sum(p.pods for p in one.placements)
            assert not case.makes_room(others + fewer(one, pods - 1)), "a pod is taken in vain"
        elif one.elastic is not None:
            assert not case.makes_room(others + fewer(one, one.pods - 1)), "it could have run on"


@given(seeds)
def test_nobody_goes_whole_when_spare_pods_suffice(seed: int) -> None:
    dice = random.Random(seed)
    case = elastic(draw(dice, alike=True), dice)
    mine = case.snapshot.running["a"]
    parts = [part for one in mine if one.elastic for part in fewer(one, one.pods - 1)]
    if case.victims(PEERS) and not case.at_home and case.makes_room(parts):
        assert all(one.gives_up for one in case.victims(LEAST))


def test_the_cases_are_worth_something() -> None:
    cases = [elastic(draw(dice, alike=True), dice) for seed in range(200) for dice in [random.Random(seed)]]
    victims = [one for case in cases for one in case.victims(LEAST)]
    assert sum(one.gives_up for one in victims) > 20
    assert sum(not one.gives_up for one in victims) > 20

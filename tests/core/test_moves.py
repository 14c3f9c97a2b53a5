"""Moves that somebody asks for: all at once or none, and nobody else gets the room of those who are on their way."""

import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest

from queuectl.core.cycle import plan
from queuectl.core.defrag import make_room
from queuectl.core.fleet import Base
from queuectl.core.moves import KEPT_SECONDS, kept_for, moved
from queuectl.core.snapshot import MoveOrder, Moving
from queuectl.model.lifecycle import End, Outcome
from queuectl.model.objects import MoveRequest
from queuectl.model.plan import Eviction, Placement, Portion
from queuectl.model.policy import Cause
from queuectl.model.reasons import Reason, why
from queuectl.simulate.clockwork import PREEMPTED, REFUSED, Clockwork, Run
from queuectl.simulate.form import GPU, read
from queuectl.store.rows import end_from_json, end_to_json
from tests.core.test_defrag import NOW, draw
from tests.support.builders import gang, role, snapshot


def clockwork(
    *events: dict[str, Any],
    jobs: list[dict[str, Any]] | None = None,
    grace: float = 30,
    moves: dict[str, Any] = {},  # noqa: B006
) -> Clockwork:
    """Two nodes of 8, half of each in use: `stays` is on the one, `moves` on the other. `whole` waits for a node."""
    small: list[dict[str, Any]] = [{"name": n, "saves": 0} for n in ("stays", "gone-0", "moves", "gone-1")]
    small[2] |= {"checkpoints": 1, "grace": grace, **moves}
    given = [
        *({"gpus": 4, **one} for one in small), {"name": "whole", "gpus": 8, "at": 10}, {"name": "waits", "hold": True},
    ]  # fmt: skip
    happens = [{"at": 5, "delete": name} for name in ("gone-0", "gone-1")]
    spec = {
        "nodes": [{"name": "n", "count": 2, "gpus": 8}],
        "queues": [{"name": "q", "quotas": [{"flavor": "default", "resource": GPU, "nominal": 100}]}],
        "jobs": [{"queue": "q", **job} for job in (*given, *(jobs or ()))],
        "events": [*happens, *events],
        "until": 10_000,
    }
    return Clockwork(read(spec))


def told(result: Run, what: str) -> list[tuple[float, str, str]]:
    assert result.faults == []
    return [(entry.at, entry.job, entry.code) for entry in result.of(what)]


def nodes(clock: Clockwork) -> dict[str, str]:
    return {uid: one.placements[0].node for uid, one in clock.world.attempts.items()}


THIEVES = [
    {"name": "thief", "gpus": 4, "at": 25},
    {"name": "urgent-thief", "gpus": 4, "priority": 9, "at": 45},
    {"name": "small-thief", "gpus": 1, "at": 45},
]


@pytest.mark.parametrize(
    "events", [[], [{"at": 30, "controllerRestart": True}], [{"at": 50, "controllerRestart": True}]]
)
def test_one_moves_the_other_starts_and_nobody_gets_the_room_in_between(events: list[dict[str, Any]]) -> None:
    clock = clockwork({"at": 20, "defrag": "whole"}, *events, jobs=THIEVES)
    clock.at(21, lambda: places.update(nodes(clock)))
    places: dict[str, str] = {}
    result = clock.run()
    assert told(result, PREEMPTED) == [(20, "moves", "Moved")]
    [gone] = result.of(PREEMPTED)
    home = places["stays"]
    assert gone.why.startswith(
        "Moves to make room for default/whole of queue q, as an admin asked: its room is kept on"
    )
    assert f"kept on {home}. Not saved yet: " in gone.why
    running = {entry.job: entry.at for entry in result.of("Running")}
    assert (running["whole"], running["moves"]) == (50, 50)
    assert nodes(clock) == {"stays": home, "moves": home, "whole": places["moves"]}
    workload = clock.world.workloads["moves"]
    assert (workload.failures, workload.preemptions, workload.attempt) == (0, 1, 2)


def test_room_is_kept_for_whoever_moves_only_for_a_time() -> None:
    clock = clockwork({"at": 20, "defrag": "whole"}, jobs=THIEVES[:1], grace=2 * KEPT_SECONDS)
    result = clock.run()
    assert told(result, PREEMPTED) == [(20, "moves", "Moved")]
    assert {e.job: e.at for e in result.of("Running")}["thief"] == 20 + 120 + KEPT_SECONDS
    assert clock.states()["moves"].phase == "Pending"


def test_room_is_kept_for_as_long_as_whoever_moves_may_save_its_work() -> None:
    saves = {"saves": None, "saveGrace": 2 * int(KEPT_SECONDS)}
    clock = clockwork({"at": 20, "defrag": "whole"}, jobs=THIEVES[:1], moves=saves)
    running = {e.job: e.at for e in clock.run().of("Running")}
    assert (running["whole"], running["moves"]) == (20 + 2 * KEPT_SECONDS + 30, 20 + 2 * KEPT_SECONDS + 30)
    assert "thief" not in running


def test_no_room_is_kept_for_whoever_does_not_want_it_any_more() -> None:
    for verb in ("delete", "hold"):
        clock = clockwork({"at": 20, "defrag": "whole"}, {"at": 40, verb: "moves"}, jobs=THIEVES[:1])
        running = {e.job: e.at for e in clock.run().of("Running")}
        assert (running["whole"], running["thief"]) == (50, 50), verb


STALE: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "no room elsewhere": ([{"name": "other", "gpus": 4, "at": 15}], {}, "make no room for it any more"),
    "another attempt": ([], {"moves": {"moves": 2}}, "not all who are to move still run as they did"),
    "too dear": ([], {"within": 1}, "only after 30"),
    "too late": ([], {"until": 19}, "it was not carried out in time"),
    "others first": ([{"name": "before", "gpus": 8, "priority": 1, "at": 15}], {}, "it is not its turn in queue q"),
    "nobody waits": ([], {"uid": "small", "job": "default/small"}, "it does not wait"),
    "asked wrongly": ([], {"problem": "it can't be read"}, "it can't be read"),
}


@pytest.mark.parametrize(("jobs", "asked", "problem"), STALE.values(), ids=STALE.keys())
def test_what_does_not_hold_any_more_is_refused_and_nobody_moves(
    jobs: list[dict[str, Any]], asked: dict[str, Any], problem: str
) -> None:
    clock = clockwork(jobs=jobs)
    given: dict[str, Any] = {
        "uid": "whole",
        "job": "default/whole",
        "within": 3600,
        "until": 30,
        "by": "ann",
        "moves": {"moves": 1},
    }
    given |= asked
    request = MoveRequest(**given | {"moves": tuple(given["moves"].items())})
    clock.at(20, lambda: clock.cluster.ask(request))
    result = clock.run()
    assert told(result, PREEMPTED) == []
    [refused] = result.of(REFUSED)
    assert (refused.at, refused.code) == (20, "MovesRefused")
    assert refused.why.startswith(f"Nobody moves to make room for {request.job}, as ann asked: ")
    assert problem in refused.why
    assert {job.move for job in clock.cluster.jobs.values()} == {None}


def test_a_request_waits_for_all_whom_it_is_about_and_then_for_no_longer_than_it_says() -> None:
    clock = clockwork()
    request = MoveRequest("whole", "default/whole", (("moves", 1), ("stays", 1)), math.inf, until=30)
    clock.at(20, lambda: clock.cluster.ask(request, of=["moves"]))
    result = clock.run()
    assert told(result, PREEMPTED) == []
    assert told(result, REFUSED) == [(30, "whole", "MovesRefused")]
    assert "not all who are to move were marked in time" in result.of(REFUSED)[0].why

    clock = clockwork()
    clock.at(20, lambda: clock.cluster.ask(request, of=["moves"]))
    clock.at(25, lambda: clock.cluster.ask(request, of=["stays"]))
    assert told(clock.run(), PREEMPTED) == [(25, "moves", "Moved")]


def test_whatever_else_waits_all_that_a_cycle_gives_away_fits_beside_those_who_move() -> None:
    found = 0
    for seed in range(200):
        rng = random.Random(seed)
        view, gangs, waiting = draw(rng)
        proposal = make_room(view, waiting, gangs, NOW)
        if proposal is None or not proposal.moves:
            continue
        found += 1
        others = [gang(f"t{i}", role(pods=rng.randint(1, 3), gpu=rng.choice([1, 2]))) for i in range(3)]
        moves = tuple((move.gang.uid, 0) for move in proposal.moves)
        order = MoveOrder(MoveRequest("w", "team/w", moves, math.inf, NOW + 1), {uid: gangs[uid] for uid, _ in moves})
        decided = plan(replace(view, orders=[order], waiting=snapshot([waiting, *others]).waiting), NOW)
        [preempt] = decided.preemptions
        assert preempt.admission.uid == "w"
        assert {victim.uid for victim in preempt.victims} == {uid for uid, _ in moves}
        after = view.copy()
        assert after.fleet is not None
        leaving = [p for move in proposal.moves for p in move.gang.placements]
        staying = [p for admission in decided.admissions for p in admission.placements]
        coming = [p for victim in preempt.victims for p in victim.to]
        for sign, places in ((-1, leaving), (1, [*preempt.admission.placements, *staying, *coming])):
            for p in places:
                after.fleet.reserve(p.node, p.requests, sign * p.pods)
        assert (after.fleet.matrix(Base.FREE) >= 0).all()
    assert found > 25


def test_what_is_kept_for_whoever_moves_is_in_the_ledger() -> None:
    to = (Placement("worker", "any", "n1", 2, (("cpu", 500), (GPU, 4)), cards=4, first=1),)
    told = moved(
        Eviction("j", Cause.DEFRAGMENTATION, to=to), {("any", GPU): 8}, NOW, job="w", queue="q", lost="", since=""
    )
    read_back = end_from_json(json.loads(json.dumps(end_to_json(End(told, Outcome.REQUEUE)))))
    assert read_back is not None
    assert kept_for("q", read_back.why) == Moving("q", Portion(to, {("any", GPU): 8}), NOW + KEPT_SECONDS)
    assert kept_for("q", why(Reason.SPEC_CHANGED)) is None


def test_of_two_requests_for_the_same_room_one_is_carried_out() -> None:
    """Each of them could be: the other's mover has a place beside this one's."""
    clock = clockwork(jobs=[{"name": "too", "gpus": 8, "at": 11, "minPods": 1}])
    first = MoveRequest("whole", "default/whole", (("moves", 1),), math.inf, until=60)
    second = MoveRequest("too", "default/too", (("stays", 1),), math.inf, until=60)
    clock.at(20, lambda: clock.cluster.ask(second))
    clock.at(20, lambda: clock.cluster.ask(first))
    result = clock.run()
    assert told(result, PREEMPTED) == [(20, "stays", "Moved")]
    assert [(at, job) for at, job, _ in told(result, REFUSED)] == [(20, "whole")]
    assert {job for job, state in clock.states().items() if state.phase == "Running"} == {"stays", "moves", "too"}

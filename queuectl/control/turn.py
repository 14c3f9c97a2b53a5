"""What a round of the leader decides, without any I/O: which moves are due, and what a cycle asks of the ledger.

The engine carries it out against Postgres and the API server, the simulator in virtual time.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from queuectl.control.world import World
from queuectl.core.checkpoint import give_up, leave
from queuectl.core.cycle import plan
from queuectl.core.grace import allowed
from queuectl.core.lifecycle import loss, next_move
from queuectl.core.moves import moved
from queuectl.core.nominate import clock
from queuectl.core.snapshot import Snapshot
from queuectl.core.suspects import offences
from queuectl.model.lifecycle import Attempt, AttemptState, End, Leave, Move, Outcome, Workload
from queuectl.model.plan import Admission, Eviction, Placement, Plan, Portion, Preempt, Repair, TakeBack
from queuectl.model.policy import Amounts, Cell, Quota
from queuectl.model.reasons import CAUSES, Reason, why
from queuectl.model.resources import is_unannounced


@dataclass(frozen=True, slots=True)
class Cycle:
    """What the next cycle is about: what the ledger has not been told yet, and the view that is planned upon."""

    snapshot: Snapshot
    submissions: Sequence[Workload]
    nodes: Mapping[str, Mapping[str, int]]
    nodes_gone: Collection[str]
    quotas: Mapping[str, Mapping[Cell, Quota]]
    queues_gone: Collection[str]
    changed_by: Mapping[str, str]
    change_why: Mapping[str, str]
    limits: Mapping[str, Amounts]


@dataclass(frozen=True, slots=True)
class Decided:
    """A plan as the ledger takes it: with generations planned for, what becomes of victims, and who is charged too.

    ``evictions`` go first: who then claims the room of one of them finds it on its way out.
    """

    plan: Plan
    evictions: Sequence[Move]
    admissions: Sequence[tuple[Admission, int]]
    preemptions: Sequence[tuple[Preempt, int, Mapping[str, Leave]]]
    ancestors: Mapping[str, Sequence[str]]  # of the queues in which something starts
    growths: Mapping[tuple[str, int], Portion]  # by uid and number of the attempt
    repairs: Mapping[tuple[str, int], Repair]  # likewise
    nodes: Mapping[str, Mapping[str, int]]  # as in the cycle, and where a host port, a device or the like is taken


def due(world: World, reported: Mapping[str, Move], now: float) -> tuple[list[Move], dict[str, End]]:
    """Return the moves that are due, and the ends of those who wait in vain; forget who is over and gone.

    ``reported`` is what the executor says that its steps came to, by workload.
    """
    touched, world.touched = world.touched, set()
    moves: list[Move] = []
    leaving: dict[str, End] = {}
    for uid in sorted(touched | reported.keys()):
        view = world.view(uid, now)
        if view is None:
            world.lost(uid, None)
            if world.waits_in_vain(uid):
                leaving[uid] = End(why(Reason.DELETED), Outcome.DELETED)
            elif uid not in world.jobs:
                world.forget(uid)
            continue
        # What is observed goes before what a step reports: a gang whose pod is gone is not ungated any more.
        move = next_move(view) or reported.get(uid)
        lost = None if move else loss(view)
        world.lost(uid, lost)
        ends = move.end.why if move is not None and move.end is not None else None
        world.nodes.offend(offences(view, move, lost.why if lost else ends))
        if move is not None:
            moves.append(move)
    return moves, leaving


def prepare(world: World, now: float) -> Cycle:
    """Take the world's changes into a cycle; they count as told from now on."""
    changes = world.take_changes()
    submissions = world.submissions(changes.submissions)
    world.restated |= changes.submissions  # those that the plan leaves out have a status too
    snapshot = world.snapshot(now)
    nodes = {name: world.fleet.room(name) for name in changes.nodes}
    queues = {name: world.queues.get(name) for name in changes.queues}
    return Cycle(
        snapshot=snapshot,
        submissions=submissions,
        nodes={name: room for name, room in nodes.items() if room},
        nodes_gone=[name for name, room in nodes.items() if not room],
        quotas={name: queue.quotas for name, queue in queues.items() if queue},
        queues_gone=[name for name, queue in queues.items() if not queue],
        changed_by={name: queue.changed_by for name, queue in queues.items() if queue},
        change_why={name: queue.change_why for name, queue in queues.items() if queue},
        limits=world.holdings.limits(queues),
    )


def decide(world: World, cycle: Cycle, now: float) -> Decided:
    """Plan the cycle."""
    decided = plan(cycle.snapshot, now)
    starting = [*decided.admissions, *(preempt.admission for preempt in decided.preemptions)]
    placed = [p for admission in starting for p in admission.placements]
    placed += [p for part in decided.growths.values() for p in part.placements]
    placed += [p for repair in decided.repairs.values() for p in repair.found]
    return Decided(
        plan=decided,
        evictions=[_taken_back(world, uid, back, now) for uid, back in decided.evictions],
        admissions=[(admission, world.jobs[admission.uid].generation) for admission in decided.admissions],
        preemptions=[
            (preempt, world.jobs[preempt.admission.uid].generation, _leaves(world, preempt, now))
            for preempt in decided.preemptions
        ],
        ancestors=world.holdings.ancestors({world.workloads[admission.uid].queue for admission in starting}),
        growths={(uid, world.attempts[uid].number): part for uid, part in decided.growths.items()},
        repairs={(uid, world.attempts[uid].number): repair for uid, repair in decided.repairs.items()},
        nodes={**cycle.nodes, **_taken_alone(cycle, placed)},
    )


def _taken_alone(cycle: Cycle, placements: Sequence[Placement]) -> dict[str, Mapping[str, int]]:
    """Return the rooms of nodes with what nobody used there before, and so was no part of them: host ports, devices."""
    fleet, taken = cycle.snapshot.fleet, [p for p in placements if any(is_unannounced(name) for name, _ in p.requests)]
    if fleet is None:
        return {}
    for p in taken:
        fleet.reserve(p.node, p.requests, p.pods)
    return {p.node: fleet.room(p.node) for p in taken}


def claims(decided: Decided, claimed: Sequence[Attempt]) -> list[tuple[Attempt, Preempt, Mapping[str, Leave]]]:
    """Return those to whom the ledger has promised room, each with its decision and what becomes of its victims."""
    promised = {attempt.uid: attempt for attempt in claimed}
    return [
        (promised[preempt.admission.uid], preempt, leaves)
        for preempt, _, leaves in decided.preemptions
        if preempt.admission.uid in promised
    ]


def plan_again(world: World, decided: Plan, refused: Collection[str]) -> bool:
    """Tell whether another cycle is due at once; the ledger is told anew what it seems not to know.

    It is also due when somebody started while others wait: shares have changed, and with them who may take from
    whom and what is lacking.
    """
    admissions = (*decided.admissions, *(preempt.admission for preempt in decided.preemptions))
    wanted = {admission.uid: admission.placements for admission in admissions}
    wanted |= {uid: part.placements for uid, part in decided.growths.items()}
    wanted |= {uid: repair.found for uid, repair in decided.repairs.items()}
    for uid in wanted.keys() & set(refused):
        world.changes.nodes |= {placement.node for placement in wanted[uid]}
        world.changes.queues.add(world.workloads[uid].queue)
    left = world.losses.keys() - decided.irreparable  # more than one cycle replaces
    return bool(refused or left) or bool(admissions and decided.waits)


def _taken_back(world: World, uid: str, back: TakeBack, now: float) -> Move:
    attempt, job = world.attempts[uid], world.jobs.get(uid)
    if back.part is None:
        end = leave(attempt, job, back.why, now)
        return Move(uid, attempt.number, end.first, end)
    return Move(uid, attempt.number, AttemptState.SHRINKING, shrink=give_up(attempt, job, back.why, back.part, now))


def _leaves(world: World, preempt: Preempt, now: float) -> dict[str, Leave]:
    winner = world.workloads[preempt.admission.uid]
    facts = {"job": f"{winner.namespace}/{winner.name}", "queue": winner.queue, "priority": winner.priority}
    return {victim.uid: _leave(world, victim, facts, now) for victim in preempt.victims}


def _leave(world: World, victim: Eviction, by: Mapping[str, object], now: float) -> Leave:
    attempt, job = world.attempts[victim.uid], world.jobs.get(victim.uid)
    if victim.part is None:
        facts = {**by, **_lost(victim)}
        saving = allowed(job, job.saving.grace_seconds) if job and job.saving else 0
        cause = (
            moved(victim, attempt.quota, now + saving, **facts)
            if victim.to
            else why(Reason.PREEMPTED, **facts, cause=CAUSES[victim.cause])
        )
        return leave(attempt, job, cause, now)
    before, gone = attempt.whole.pods, victim.part.pods
    pods = {"gone": gone, "before": before, "after": before - gone}
    return give_up(attempt, job, why(Reason.SHRUNK, **pods, **by, cause=CAUSES[victim.cause]), victim.part, now)


def _lost(victim: Eviction) -> dict[str, object]:
    since = f" of work, done since {clock(victim.since)}" if victim.since is not None and any(victim.lost) else ""
    return {
        "lost": str(victim.lost), "since": since, "gpu_seconds": victim.lost.gpu_seconds,
        "pod_seconds": victim.lost.pod_seconds, "saved_at": victim.since,
    }  # fmt: skip

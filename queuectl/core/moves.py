"""Moves that somebody has asked for, decided anew at the moment in which they are carried out.

What was proposed then may be wrong by now, so only who is to move for whom is taken from the request, and all of it or
nothing is done: the waiting gang claims its room, those in it are told to leave as victims of a preemption are, and room
for each of them is kept, in every cycle, until it has started again or ``KEPT_SECONDS`` are over since it had to have saved its work.
"""

from collections.abc import Iterator, Mapping
from dataclasses import astuple
from typing import Any

from queuectl.core.defrag import Proposal, first_in_line, lacks_nodes, make_room
from queuectl.core.snapshot import MoveOrder, Moving, Snapshot
from queuectl.model.objects import Gang
from queuectl.model.plan import Eviction, Placement, Portion
from queuectl.model.policy import Amounts
from queuectl.model.reasons import Reason, Why, listed, why

KEPT_SECONDS = 3600.0  # for a gang on its way; its pods may take long to stop
MAX_MOVES = 20  # requests that are looked at in a cycle
_SOMEBODY = "somebody"  # whose name the API server did not write down


def proposal_for(snapshot: Snapshot, order: MoveOrder, now: float) -> Proposal | Why:
    """Return what is to be done, or why nothing is. ``now``: Unix seconds."""
    request, gang = order.request, snapshot.waiting.get(order.request.uid)
    problem = next(_problems(snapshot, order, gang, now), "")
    if gang is not None and not problem:
        proposal = make_room(snapshot, gang, order.gangs, now)
        if proposal is None or not proposal.moves:
            problem = "moves of these jobs make no room for it any more"
        elif proposal.pays_after > request.within:
            after, within = f"{proposal.pays_after:.0f} s", f"{request.within:.0f} s"
            problem = f"it would make up for the work lost only after {after}, not within {within}"
        else:
            return proposal
    return why(Reason.MOVES_REFUSED, job=request.job, by=request.by or _SOMEBODY, problem=problem)


def _problems(snapshot: Snapshot, order: MoveOrder, gang: Gang | None, now: float) -> Iterator[str]:
    """Yield why nothing is to be looked for; only the first counts."""
    request = order.request
    if request.problem:
        yield request.problem
    if now >= request.until:
        yield "it was not carried out in time" if order.whole else "not all who are to move were marked in time"
    if gang is None:
        yield "it does not wait"
        return
    if order.gangs.keys() != dict(request.moves).keys():
        yield "not all who are to move still run as they did"
    if gang not in first_in_line(snapshot, gang.queue):
        yield f"it is not its turn in queue {gang.queue}, or the queue starts nobody"
    if lacks_nodes(snapshot, gang, now) is None:
        yield "it can start without that, or more than nodes keeps it waiting"


def moved(eviction: Eviction, quota: Amounts, saved_by: float, **facts: object) -> Why:
    """Return why a gang ends that moves, with what is kept for it.

    ``quota``: what it is charged. ``saved_by``: Unix seconds at which it stops at the latest, its work saved or not.
    """
    nodes = listed(sorted({p.node for p in eviction.to}))
    return why(
        Reason.MOVED, **facts, by=eviction.asked_by or _SOMEBODY, nodes=nodes, to=[astuple(p) for p in eviction.to],
        quota=[[*cell, amount] for cell, amount in quota.items()], until=saved_by + KEPT_SECONDS,
    )  # fmt: skip


def kept_for(queue: str, end: Why | None) -> Moving | None:
    """Return what is kept for a gang whose last attempt ended, or ends, for that reason; None for any but a move."""
    if end is None or end.reason is not Reason.MOVED:
        return None
    facts: Mapping[str, Any] = end.facts
    placements = tuple(
        Placement(role, flavor, node, pods, tuple((name, amount) for name, amount in requests), cards, first)
        for role, flavor, node, pods, requests, cards, first in facts["to"]
    )
    quota = {(flavor, resource): amount for flavor, resource, amount in facts["quota"]}
    return Moving(queue, Portion(placements, quota), facts["until"])

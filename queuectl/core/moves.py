"""Moves that somebody has asked for, decided anew at the moment in which they are carried out.

What was proposed then may be wrong by now, so only who is to move for whom is taken from the request, and all of it or
nothing is done: the waiting gang claims its room, those in it are told to leave as victims of a preemption are, and room
for each of them is kept, in every cycle, until it has started again or ``KEPT_SECONDS`` are over.
"""

from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

from queuectl.core.defrag import Proposal, first_in_line, keep, lacks_nodes, make_room
from queuectl.core.snapshot import MoveOrder, Moving, Snapshot
from queuectl.model.plan import Eviction, Placement, Portion
from queuectl.model.policy import Amounts
from queuectl.model.reasons import Reason, Why, listed, why

__all__ = ["KEPT_SECONDS", "MAX_MOVES", "keep", "kept_for", "moved", "proposal_for"]

KEPT_SECONDS = 3600.0  # for a gang on its way; its pods may take long to stop
MAX_MOVES = 20  # requests that are looked at in a cycle


def proposal_for(snapshot: Snapshot, order: MoveOrder, now: float) -> Proposal | Why:
    """Return what is to be done, or why nothing is. ``now``: Unix seconds."""
    request = order.request
    gang = snapshot.waiting.get(request.uid)
    proposal: Proposal | None = None
    problem = request.problem
    if problem:
        pass
    elif now >= request.until:
        problem = (
            "it was not carried out in time" if order.whole else "not all jobs that are to move were marked in time"
        )
    elif gang is None:
        problem = "it does not wait"
    elif order.gangs.keys() != dict(request.moves).keys():
        problem = "not all jobs that are to move still run as they did"
    elif gang not in first_in_line(snapshot, gang.queue):
        problem = f"it is not its turn in queue {gang.queue}, or the queue starts nobody"
    elif lacks_nodes(snapshot, gang, now) is None:
        problem = "it can start without that, or more than nodes keeps it waiting"
    else:
        proposal = make_room(snapshot, gang, order.gangs, now)
        if proposal is None or not proposal.moves:
            problem = "moves of these jobs make no room for it any more"
        elif proposal.pays_after > request.within:
            after, within = round(proposal.pays_after), round(request.within)
            problem = f"it would make up for the work lost only after {after} s, not within {within} s"
    if problem or proposal is None:
        return why(Reason.MOVES_REFUSED, job=request.job, by=request.by or "somebody", problem=problem)
    return proposal


def moved(eviction: Eviction, quota: Amounts, now: float, **facts: object) -> Why:
    """Return why a gang ends that moves, with what is kept for it. ``quota``: what it is charged."""
    nodes = listed(sorted({p.node for p in eviction.to}))
    return why(
        Reason.MOVED, **facts, by=eviction.asked_by or "somebody", nodes=nodes, to=[astuple(p) for p in eviction.to],
        quota=[[*cell, amount] for cell, amount in quota.items()], until=now + KEPT_SECONDS,
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

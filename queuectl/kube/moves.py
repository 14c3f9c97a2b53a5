"""Requests that running jobs move, as annotations of these jobs: whoever may patch a job may ask it to.

``MOVE`` is written by ``queuectl defrag --apply``, the same on all jobs that are to move together; ``MOVE_BY``, who did,
by the API server; ``MOVE_REFUSED`` by the controller, when nobody moves. A request names attempts, so that one which was
carried out is over by itself.
"""

from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

from queuectl.kube.names import MOVE, MOVE_BY, MOVE_REFUSED
from queuectl.model.objects import MoveRequest


class _Move(msgspec.Struct, forbid_unknown_fields=True):
    job: str = msgspec.field(name="for")
    uid: str
    moves: dict[str, int]
    within: float  # seconds
    until: datetime


class _Refused(msgspec.Struct):
    until: datetime
    why: str = ""


def annotation(request: MoveRequest) -> str:
    """Return a request as ``MOVE`` has it."""
    until = datetime.fromtimestamp(request.until, UTC)
    return _text(_Move(request.job, request.uid, dict(request.moves), request.within, until))


def read(annotations: Mapping[str, str]) -> MoveRequest | None:
    """Return the request that a job bears, if it has not been refused."""
    text, by = annotations.get(MOVE), annotations.get(MOVE_BY, "")
    if not text:
        return None
    try:
        seen = msgspec.json.decode(text, type=_Move)
        until = seen.until.timestamp()
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        problem = f"annotation {MOVE} is not as queuectl defrag --apply writes it: {error}"
        request = MoveRequest(job="another job", by=by, problem=problem)
    else:
        moves = tuple(sorted(seen.moves.items()))
        request = MoveRequest(seen.uid, seen.job, moves, seen.within, until, by)
    return None if refusal(annotations, request.until) is not None else request


def refused(request: MoveRequest, why: str) -> str:
    """Return the answer to a request as ``MOVE_REFUSED`` has it."""
    return _text(_Refused(datetime.fromtimestamp(request.until, UTC), why))


def refusal(annotations: Mapping[str, str], until: float) -> str | None:
    """Return why the request that ends at ``until`` (Unix seconds) was refused; None if it was not."""
    try:
        seen = msgspec.json.decode(annotations.get(MOVE_REFUSED, ""), type=_Refused)
        return seen.why if seen.until.timestamp() == until else None
    except (msgspec.DecodeError, ValueError, OverflowError):
        return None


def _text(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()

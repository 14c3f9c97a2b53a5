"""Moves that somebody has asked for, and the room that is kept for those who make them."""

from collections.abc import Callable, Container

from queuectl.core.moves import kept_for
from queuectl.core.snapshot import MoveOrder, Moving
from queuectl.model.lifecycle import End
from queuectl.model.objects import Gang, MoveRequest


class Moves:
    """Who is to move, and who is on the way."""

    def __init__(self) -> None:
        """Start with none."""
        self._asked: dict[str, MoveRequest] = {}  # by uid of who is to move
        self._kept: dict[str, Moving] = {}  # what is kept for those who make room, by uid
        self.version = 0  # of what is kept

    def ask(self, uid: str, request: MoveRequest | None) -> None:
        """Take in whether a workload is to move, and for whom."""
        if request is None:
            self._asked.pop(uid, None)
        else:
            self._asked[uid] = request

    def refuse(self, request: MoveRequest) -> list[str]:
        """Take in that moves are not made that were asked for; return the workloads that bear the request."""
        uids = [uid for uid, asked in self._asked.items() if asked == request]
        for uid in uids:
            del self._asked[uid]
        return uids

    def orders(self, admitted: Container[str], to_move: Callable[[str, int], Gang | None]) -> list[MoveOrder]:
        """Return the moves that are asked for; of those for somebody who has room by now, nothing is left to do.

        ``admitted``: who has room. ``to_move``: the gang of an attempt, which is given by workload uid and number, if it
        runs and may move.
        """
        requests = dict.fromkeys(self._asked.values())
        for request in requests:
            if request.uid in admitted:
                self.refuse(request)
        return [
            MoveOrder(
                request,
                {uid: gang for uid, number in request.moves if (gang := to_move(uid, number)) is not None},
                whole=all(self._asked.get(uid) == request for uid, _ in request.moves),
            )
            for request in requests
            if request.uid not in admitted
        ]

    def keep(self, uid: str, queue: str, end: End) -> None:
        """Keep room for a workload if it ends to move."""
        moving = kept_for(queue, end.why)
        if moving is not None:
            self._kept[uid] = moving
            self.version += 1

    def drop(self, uid: str) -> None:
        """Keep nothing any more for a workload."""
        if self._kept.pop(uid, None) is not None:
            self.version += 1

    def changed(self, uid: str) -> None:
        """Take in a changed job: it may be that it can't start again now where room is kept for it, or can."""
        self.version += uid in self._kept

    def kept(self, now: float, comes: Callable[[str], bool]) -> dict[str, Moving]:
        """Return the room that is kept for those who leave to move, and for those who wait to start again.

        ``comes``: whether a workload is one of these.
        """
        for uid in [uid for uid, moving in self._kept.items() if moving.until <= now]:
            self.drop(uid)
        return {uid: one for uid, one in self._kept.items() if comes(uid)}

"""The ledger's last line, kept apart from what is planned upon: nobody gets room that is not there."""

from collections import Counter
from collections.abc import Iterable, Mapping

from queuectl.control.turn import Cycle
from queuectl.model.lifecycle import Attempt, AttemptState
from queuectl.model.plan import Portion, Repair
from queuectl.model.resources import total

Key = tuple[str, ...]  # "node", node, resource; or "queue", queue, flavor, resource


class OverbookedError(Exception):
    """The core has decided what the ledger would refuse. A defect, never the user's fault."""


class Accounts:
    """Room of nodes and queues; what is reserved of it now, and what is promised of it, as it will be."""

    def __init__(self) -> None:
        """Start with nothing observed."""
        self._room: dict[Key, int] = {}
        self._reserved: Counter[Key] = Counter()
        self._promised: Counter[Key] = Counter()
        self._parts: dict[str, Counter[Key]] = {}  # of active attempts, by workload uid
        self._leaving: dict[str, Counter[Key]] = {}  # what of it they give up
        self._charged: dict[str, tuple[str, ...]] = {}  # the queues that it counts in, by workload uid

    def observe(self, cycle: Cycle, nodes: Mapping[str, Mapping[str, int]]) -> None:
        """Take in what nodes have and queues may use; either may be less than what is reserved."""
        on_nodes = {**nodes, **{name: {} for name in cycle.nodes_gone}}
        nominal = {name: {cell: quota.nominal for cell, quota in own.items()} for name, own in cycle.quotas.items()}
        in_queues = {**nominal, **cycle.limits}
        seen = {("node", name) for name in on_nodes} | {("queue", name) for name in in_queues}
        self._room = {key: room for key, room in self._room.items() if key[:2] not in seen}
        self._room |= {("node", node, name): amount for node, room in on_nodes.items() for name, amount in room.items()}
        self._room |= {
            ("queue", name, *cell): amount for name, room in in_queues.items() for cell, amount in room.items()
        }

    def begin(
        self, attempt: Attempt, charged: Iterable[str], victims: Iterable[tuple[Attempt, Portion | None]] = ()
    ) -> None:
        """Give an attempt its room: at once, or that of its victims or parts of them once they are gone.

        ``charged``: its queue and those above. Raises OverbookedError.
        """
        self._charged[attempt.uid] = tuple(charged)
        parts = self._parts[attempt.uid] = self._sums(attempt.uid, attempt.whole)
        taken = list(victims)
        inherited = {key for claim, _ in taken if claim.state is AttemptState.CLAIMED for key in claim.victims}
        for victim, part in taken:
            if not victim.claimed and not victim.leaving and (victim.holds or victim.state is AttemptState.CLAIMED):
                if part is None:
                    self._promised.subtract(self._parts[victim.uid])
                else:
                    self.give_up(victim.uid, part)
            elif (victim.uid, victim.number) not in inherited:
                raise OverbookedError(f"{attempt.uid} is promised room of {victim.uid}, which is not to be had")
        self._promised.update(parts)
        self._check(attempt.uid, self._promised, "promised", parts)
        if attempt.holds:
            self._reserved.update(parts)
            self._check(attempt.uid, self._reserved, "reserved", parts)

    def grow(self, uid: str, part: Portion) -> None:
        """Give an attempt a part in addition. Raises OverbookedError."""
        more = self._sums(uid, part)
        for sums, word in ((self._reserved, "reserved"), (self._promised, "promised")):
            sums.update(more)
            self._check(uid, sums, word, more)
        self._parts[uid].update(more)

    def repair(self, uid: str, repair: Repair) -> None:
        """Give an attempt places in the stead of lost ones, which it has until ``shrink``. Raises OverbookedError."""
        self.grow(uid, Portion(repair.found))
        self.give_up(uid, Portion(repair.left))

    def arrive(self, attempt: Attempt) -> bool:
        """Turn a promise into a reservation; False when room has shrunk meanwhile, and nothing has happened."""
        parts = self._parts[attempt.uid]
        if any(amount and self._reserved[key] + amount > self._room.get(key, 0) for key, amount in parts.items()):
            return False
        self._reserved.update(parts)
        return True

    def give_up(self, uid: str, part: Portion) -> None:
        """Promise a part of an attempt to it no more; it has that until ``shrink``."""
        self._leaving[uid] = self._sums(uid, part)
        self._promised.subtract(self._leaving[uid])

    def shrink(self, uid: str) -> None:
        """Take back what an attempt has given up."""
        leaving = self._leaving.pop(uid)
        self._parts[uid].subtract(leaving)
        self._reserved.subtract(leaving)

    def give_back(self, uid: str, part: Portion) -> None:
        """Take back what pods of an attempt held that are done."""
        gone = self._sums(uid, part)
        for sums in (self._parts[uid], self._reserved, self._promised):
            sums.subtract(gone)

    def end(self, attempt: Attempt, left: Iterable[tuple[str, Iterable[tuple[str, int]]]] = ()) -> None:
        """Take an attempt's room back, but what pods hold that are ``left`` on nodes: that is others' now."""
        if attempt.leaving:
            self.shrink(attempt.uid)
        parts = self._parts.pop(attempt.uid)
        if attempt.holds:
            self._reserved.subtract(parts)
        if not attempt.claimed:
            self._promised.subtract(parts)
        for node, requests in left:
            for name, amount in requests:
                key = ("node", node, name)
                self._room[key] = max(0, self._room.get(key, 0) - amount)

    def _sums(self, uid: str, part: Portion) -> Counter[Key]:
        sums: Counter[Key] = Counter(
            total({("node", p.node, name): amount * p.pods for name, amount in p.requests} for p in part.placements)
        )
        for name in self._charged[uid]:
            sums.update({("queue", name, *cell): amount for cell, amount in part.quota.items()})
        return sums

    def _check(self, uid: str, sums: Counter[Key], word: str, taken: Counter[Key]) -> None:
        for key, amount in taken.items():
            if amount and sums[key] > self._room.get(key, 0):
                raise OverbookedError(f"{' '.join(key)}: {sums[key]} {word} of {self._room.get(key, 0)}, with {uid}")

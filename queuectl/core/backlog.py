"""The waiting gangs in order, kept incrementally, so that a cycle costs what differs among them and not how many wait.

Gangs of one shape fit or fail alike, so a cycle looks at the first of each shape and leaves the rest of it alone.
"""

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from queuectl.core.fit import Short
from queuectl.core.fragmentation import Mix
from queuectl.model.objects import Gang
from queuectl.model.reasons import Reason, Why, why

_MANY = 64  # gangs at once: sorting a line anew is then cheaper than to insert one by one

PendingKey = tuple[int, float, int, str]
Key = TypeVar("Key", PendingKey, tuple[float, str])
Value_co = TypeVar("Value_co", covariant=True)


def pending_key(gang: Gang) -> PendingKey:
    """Order of a queue's line: 1. higher priority 2. earlier first submission 3. earlier arrival 4. uid."""
    return (-gang.priority, gang.submitted_at, gang.seq, gang.uid)


@dataclass(frozen=True, eq=False, slots=True)
class Tried:
    """Why a gang could not be had, which holds in one state of things."""

    uid: str
    state: object
    wait: Why
    short: Short | None = None  # there are too few places, which is for nodes to say again


@dataclass(eq=False, slots=True)
class Group:
    """Gangs of one queue and one shape, in order; also of one user and namespace, where these matter to the queue."""

    gangs: list[Gang] = field(default_factory=list)
    tried: Tried | None = None  # the last of them that was, if that may hold longer than a cycle

    def known(self, gang: Gang, state: object) -> Tried | None:
        """Return what is known of one of its gangs in a state of things; None: one that no other is like."""
        one = self.tried
        return one if one and state is not None and (one.uid, one.state) == (gang.uid, state) else None


@dataclass(frozen=True, eq=False, slots=True)
class Quiet:
    """Why all gangs of a line could not be had, which holds in one state of things. None of them is patient."""

    state: object
    waits: dict[Group, Why]


@dataclass(eq=False, slots=True)
class Line:
    """The gangs of one queue: all of them, and by shape those that may be tried."""

    everyone: list[Gang] = field(default_factory=list)
    groups: dict[object, Group] = field(default_factory=dict)
    asleep: list[Gang] = field(default_factory=list)  # that back off, by the end of it
    known: Quiet | None = None  # None also when anything has changed in it

    def walk(self) -> "Walk":
        """Return its gangs in order."""
        return Walk(self.groups.values())


class Walk:
    """Gangs in order; a group can be left out from any moment on."""

    def __init__(self, groups: Iterable[Group]) -> None:
        """Start at the first gang."""
        self._heads = [(pending_key(group.gangs[0]), 0, group) for group in groups]
        heapq.heapify(self._heads)
        self._dropped: set[Group] = set()

    def drop(self, group: Group) -> None:
        """Leave out what is left of a group."""
        self._dropped.add(group)

    def __iter__(self) -> Iterator[tuple[Gang, Group]]:
        """Yield each gang with its group; what was yielded is not yielded again."""
        while self._heads:
            _, index, group = self._heads[0]
            if group in self._dropped:
                heapq.heappop(self._heads)
                continue
            if index + 1 < len(group.gangs):
                heapq.heapreplace(self._heads, (pending_key(group.gangs[index + 1]), index + 1, group))
            else:
                heapq.heappop(self._heads)
            yield group.gangs[index], group


class Backlog:
    """All waiting gangs."""

    def __init__(self, gangs: Iterable[Gang] = (), mix: Mix | None = None) -> None:
        """Start with some gangs. ``mix``: where those that may be tried are counted."""
        self._mix = Mix() if mix is None else mix
        self.lines: dict[str, Line] = {}
        self._gangs: dict[str, Gang] = {}
        self._apart: set[str] = set()
        self._by_lifetime = False
        self.update(gangs)

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._gangs)

    def __iter__(self) -> Iterator[Gang]:
        """Yield the gangs in the order of their keys."""
        return heapq.merge(*(line.everyone for line in self.lines.values()), key=pending_key)

    def uids(self) -> list[str]:
        """Return who waits, in no order."""
        return list(self._gangs)

    def get(self, uid: str) -> Gang | None:
        """Return a waiting gang."""
        return self._gangs.get(uid)

    def update(self, gangs: Iterable[Gang], gone: Iterable[str] = ()) -> None:
        """Add gangs, or what has become of them, and take away those that wait no more."""
        added: dict[str, list[Gang]] = {}
        for uid in gone:
            if uid in self._gangs:
                self._discard(uid)
        for gang in gangs:
            if gang.uid in self._gangs:
                self._discard(gang.uid)
            self._gangs[gang.uid] = gang
            added.setdefault(gang.queue, []).append(gang)
        for queue, some in added.items():
            line = self.lines.setdefault(queue, Line())
            _add(line.everyone, some, pending_key)
            # Whether a back-off has ended is for wake() to say; one that is held is not tried at all.
            _add(line.asleep, [gang for gang in some if gang.not_before and not gang.hold], _end_of_sleep)
            self._group(line, [gang for gang in some if not gang.not_before and not gang.hold])

    def tell_apart(self, queues: Collection[str], *, by_lifetime: bool = False) -> None:
        """Keep gangs of different users, or namespaces, of these queues in groups of their own.

        ``by_lifetime``: also those of any queue that may hold their places for different times.
        """
        changed, self._apart = self._apart ^ set(queues), set(queues)
        if by_lifetime is not self._by_lifetime:
            changed = set(self.lines)
        self._by_lifetime = by_lifetime
        for name in changed & self.lines.keys():
            line = self.lines[name]
            gangs = [gang for group in line.groups.values() for gang in group.gangs]
            for group in line.groups.values():
                self._mix.add(group.gangs[0], -len(group.gangs))
            line.groups.clear()
            self._group(line, gangs)

    def group(self, gang: Gang) -> Group | None:
        """Return the gang's group; None for one that is not to be tried."""
        return self.lines[gang.queue].groups.get(self._kind(gang))

    def wake(self, now: float) -> None:
        """Let those be tried whose back-off has ended by ``now``, in Unix seconds."""
        for line in self.lines.values():
            count = bisect_right(line.asleep, now, key=lambda gang: gang.not_before)
            if count:
                awake, line.asleep = line.asleep[:count], line.asleep[count:]
                self._group(line, awake)

    def wake_at(self) -> float | None:
        """Return when the first back-off ends, in Unix seconds; None when nobody backs off."""
        return min((line.asleep[0].not_before for line in self.lines.values() if line.asleep), default=None)

    def place(self, gang: Gang) -> int:
        """Return a waiting gang's place in its queue, from 1."""
        return bisect_left(self.lines[gang.queue].everyone, pending_key(gang), key=pending_key) + 1

    def _discard(self, uid: str) -> None:
        gang = self._gangs.pop(uid)
        line = self.lines[gang.queue]
        line.known = None
        _remove(line.everyone, gang, pending_key)
        group = self.group(gang)
        if not _remove(line.asleep, gang, _end_of_sleep) and group is not None:
            self._mix.add(gang, -_remove(group.gangs, gang, pending_key))
            if not group.gangs:
                del line.groups[self._kind(gang)]
        if not line.everyone:
            del self.lines[gang.queue]

    def _kind(self, gang: Gang) -> object:
        kind = (gang.shape, gang.namespace, gang.user) if gang.queue in self._apart else gang.shape
        return (kind, gang.lifetime) if self._by_lifetime else kind

    def _group(self, line: Line, gangs: Iterable[Gang]) -> None:
        line.known = None
        kinds: dict[object, list[Gang]] = {}
        for gang in gangs:
            kinds.setdefault(self._kind(gang), []).append(gang)
        for kind, some in kinds.items():
            _add(line.groups.setdefault(kind, Group()).gangs, some, pending_key)
            self._mix.add(some[0], len(some))


@dataclass(frozen=True, eq=False)
class _Looked(Mapping[str, Value_co]):
    """Something about each gang that did not start, looked up when asked for."""

    backlog: Backlog
    started: Collection[str]

    def __iter__(self) -> Iterator[str]:
        """Yield the uids of those that wait, in order."""
        return (gang.uid for gang in self.backlog if gang.uid not in self.started)

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self.backlog) - sum(self.backlog.get(uid) is not None for uid in self.started)


@dataclass(frozen=True, eq=False)
class Waits(_Looked[Why]):
    """Why each gang waits that did not start: what holds for a shape is kept once."""

    not_yet: Callable[[Gang], Why | None]  # what keeps a gang out of the cycle
    told: Mapping[str, Why]  # by uid
    behind: Mapping[str, tuple[PendingKey, Why]]  # by StrictFIFO queue: its head and what that means for others
    failed: Callable[[Gang, Group], Why | None]  # why those of a shape do

    def __getitem__(self, uid: str) -> Why:
        """Return why a gang waits. Raises KeyError for one that doesn't."""
        gang = self.backlog.get(uid)
        if gang is None or uid in self.started:
            raise KeyError(uid)
        wait = self.told.get(uid) or self.not_yet(gang)
        if wait is not None:
            return wait
        head = self.behind.get(gang.queue)
        if head is not None and pending_key(gang) > head[0]:
            return head[1]
        group = self.backlog.group(gang)
        return (group and self.failed(gang, group)) or _PENDING

    def codes(self) -> Counter[str]:
        """Return how many wait for each reason, by its code; gangs of one shape are looked at once if they agree."""
        codes: Counter[str] = Counter()
        for queue, line in self.backlog.lines.items():
            others = {gang.uid: gang for gang in line.everyone if gang.uid not in self.started}
            head = self.behind.get(queue)
            for group in line.groups.values():
                alike = [gang for gang in group.gangs if gang.uid in others and gang.uid not in self.told]
                ahead = bisect_right(alike, head[0], key=pending_key) if head else len(alike)
                for part in (alike[:ahead], alike[ahead:]):
                    if part and self[part[0].uid].code == self[part[-1].uid].code:
                        codes[self[part[0].uid].code] += len(part)
                        for gang in part:
                            del others[gang.uid]
            codes.update(self[uid].code for uid in others)
        return codes


@dataclass(frozen=True, eq=False)
class Positions(_Looked[int]):
    """The place in its queue, from 1, of each gang that did not start."""

    def __getitem__(self, uid: str) -> int:
        """Return a gang's place. Raises KeyError for one that doesn't wait."""
        gang = self.backlog.get(uid)
        if gang is None or uid in self.started:
            raise KeyError(uid)
        others = (self.backlog.get(other) for other in self.started)
        ahead = sum(o is not None and o.queue == gang.queue and pending_key(o) < pending_key(gang) for o in others)
        return self.backlog.place(gang) - ahead


_PENDING = why(Reason.PENDING)


def _end_of_sleep(gang: Gang) -> tuple[float, str]:
    return gang.not_before, gang.uid


def _add(gangs: list[Gang], new: list[Gang], key: Callable[[Gang], Key]) -> None:
    if len(new) >= _MANY:
        gangs.extend(new)
        gangs.sort(key=key)
        return
    for gang in new:
        insort(gangs, gang, key=key)


def _remove(gangs: list[Gang], gang: Gang, key: Callable[[Gang], Key]) -> bool:
    index = bisect_left(gangs, key(gang), key=key)
    if index == len(gangs) or gangs[index].uid != gang.uid:
        return False
    del gangs[index]
    return True

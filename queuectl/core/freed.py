"""What gangs would leave if they went: room on nodes, and quota beside those who are on their way out for others."""

import heapq
from collections.abc import Callable, Mapping, Sequence

from queuectl.core import fit
from queuectl.core.fleet import MANY, Mask, Matrix, Part
from queuectl.core.preemption import Running, there
from queuectl.core.snapshot import Snapshot
from queuectl.model.objects import Flavor, Role, Together
from queuectl.model.policy import Amounts
from queuectl.model.work import NO_WORK, Work


class Freed:
    """Tells whether a gang's roles fit once others are gone; each that goes or comes back costs its own size."""

    def __init__(
        self,
        snapshot: Snapshot,
        queue: str,
        usage: Amounts,
        roles: Sequence[Role],
        *,
        flavors: Mapping[str, Flavor],
        together: Together,
    ) -> None:
        """Look at a snapshot, which must not change meanwhile. ``flavors``: by role, the one it goes to."""
        self._tree = snapshot.tree
        self._fleet = snapshot.fleet
        self._queue = queue
        self._usage = usage
        self._roles = roles
        self._flavors = flavors
        self._together = together
        self._parts: dict[str, list[Part]] = {}
        if snapshot.fleet is None:
            return
        # Places for pods of the largest role, counted anew only where something changes.
        self._role = min(roles, key=fit.largest_first)
        flavor = flavors[self._role.name]
        kind = (flavor, fit.closely(self._role, flavor), self._role.requests)
        self._room = snapshot.fleet.free()
        self._may = snapshot.fleet.mask(*kind[:2])
        self._wanted = snapshot.fleet.columns(self._role.requests)
        self._counted = self._room.pods(*kind)
        self._counts: dict[int, int] = {}  # of rows that are others by now
        self._total = self._room.total(*kind)
        self._only_counts = fit.only_counts(snapshot.fleet, roles, flavors, together)

    def take(self, gang: Running) -> None:
        """Take a gang away."""
        for one in there([gang]):
            self._tree.remove(one.queue, one.usage)
        self._change(gang, -1)

    def put_back(self, gang: Running) -> None:
        """Have it there again."""
        for one in reversed(there([gang])):
            self._tree.add(one.queue, one.usage)
        self._change(gang, +1)

    def fits(self) -> bool:
        """Tell whether quota and nodes hold the roles."""
        if not self._tree.fits(self._queue, self._usage):
            return False
        if self._fleet is None:
            return True
        if self._total < self._role.pods:
            return False
        return self._only_counts or fit.holds(self._fleet, self._room, self._roles, self._flavors, self._together)

    def cheapest(self, gangs: Sequence[Running], price: Callable[[Running], Work]) -> list[Running]:
        """Return those who leave the missing places for pods, one place after the other at the lowest price each.

        A place is one of the largest role. What a gang leaves on other nodes, and that it costs nothing there any
        more, counts from then on.
        """
        if self._fleet is None or self._wanted is None:
            return []
        parts = {gang.uid: self._parts_of(gang) for gang in gangs}
        free = {row: self._room.of(row).copy() for some in parts.values() for row, _, _ in some}
        places = _Places(free, self._may, self._wanted, gangs, parts=parts, price=price)
        return places.cheapest(self._role.pods - self._total)

    def _change(self, gang: Running, sign: int) -> None:
        for row, columns, amounts in self._parts_of(gang):
            self._room.use(row, columns, sign * amounts)
            if self._may[row] and self._wanted is not None:
                now = pods_in(self._room.of(row), self._wanted)
                self._total += now - self._counts.get(row, int(self._counted[row]))
                self._counts[row] = now

    def _parts_of(self, gang: Running) -> list[Part]:
        parts = self._parts.get(gang.uid)
        if parts is None:
            parts = self._parts[gang.uid] = self._fleet.parts(gang.placements) if self._fleet else []
        return parts


def pods_in(room: Matrix, wanted: tuple[list[int], Matrix]) -> int:
    """Return how many pods a node's room by column holds."""
    columns, amounts = wanted
    return max(0, int((room[columns] // amounts).min(initial=MANY)))


class _Places:
    """Makes places for pods of one role, each time the cheapest per pod."""

    def __init__(
        self,
        free: Mapping[int, Matrix],  # row → room, of all rows where the gangs are
        may: Mask,
        wanted: tuple[list[int], Matrix],
        gangs: Sequence[Running],
        *,
        parts: Mapping[str, list[Part]],
        price: Callable[[Running], Work],
    ) -> None:
        self._free = dict(free)
        self._wanted = wanted
        self._parts = parts
        self._price = price
        self._gone: dict[str, Running] = {}
        self._on: dict[int, list[Running]] = {}  # by row
        for gang in gangs:
            for row in sorted({row for row, _, _ in parts[gang.uid] if may[row]}):
                self._on.setdefault(row, []).append(gang)

    def cheapest(self, missing: int) -> list[Running]:
        """Return who leaves so many places for pods, in order; fewer if there are not so many."""
        offers = {row: offer for row in self._on for offer in [self._offer(row)] if offer}
        heap = [(offer[0], row) for row, offer in offers.items()]
        heapq.heapify(heap)
        while heap and missing > 0:
            cost, row = heapq.heappop(heap)
            if row not in offers or offers[row][0] != cost:
                continue  # there has been another offer since
            some = offers[row][2]
            touched = self._touched(some)
            before = sum(map(self._pods, touched))
            self._remove(some)
            missing -= sum(map(self._pods, touched)) - before
            for at in touched:
                offer = self._offer(at)
                offers.pop(at, None)
                if offer is not None:
                    offers[at] = offer
                    heapq.heappush(heap, (offer[0], at))
        return list(self._gone.values())

    def _offer(self, row: int) -> tuple[Work, int, list[Running]] | None:
        """Return the price per pod of further pods on the node, how many, and who has to go for them."""
        before, kept, cost = self._pods(row), self._free[row].copy(), NO_WORK
        some: list[Running] = []
        gained = 0
        for gang in self._on[row]:
            if gang.uid in self._gone:
                continue
            some.append(gang)
            cost = cost.plus(self._price(gang))
            for at, columns, amounts in self._parts[gang.uid]:
                if at == row:
                    self._free[row][columns] += amounts
            gained = self._pods(row) - before
            if gained > 0:
                break
        self._free[row] = kept
        return (Work(*(part // gained for part in cost)), gained, some) if gained > 0 else None

    def _touched(self, gangs: Sequence[Running]) -> list[int]:
        """Return the rows of interest where these gangs are."""
        return sorted({row for gang in gangs for row, _, _ in self._parts[gang.uid]} & self._on.keys())

    def _remove(self, gangs: Sequence[Running]) -> None:
        for gang in gangs:
            self._gone[gang.uid] = gang
            for row, columns, amounts in self._parts[gang.uid]:
                self._free[row][columns] += amounts

    def _pods(self, row: int) -> int:
        return pods_in(self._free[row], self._wanted)

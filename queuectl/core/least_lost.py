"""The least work lost: looks among the allowed sets of victims for the one that costs least.

Tries several orders of taking and keeps what costs least, never more than the peers' order loses (greedy weighted set
cover with reverse deletion: Chvatal 1979, Williamson and Shmoys 2011, 1.2 and 7.1).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from itertools import chain, islice

from queuectl.core.elastic import fewest
from queuectl.core.preemption import Ask, Field, Running, Trial, Victim, giving_up, may_take, victim_order
from queuectl.model.plan import Portion
from queuectl.model.policy import Amounts, Cause, VictimChoice, Within
from queuectl.model.work import NO_WORK, Work

SWAPS = 3  # of the dearest victims, whom it is tried to do without
ROUNDS = 4  # of such tries, at most
LARGEST = 8  # gangs of other queues that are tried as the last to be taken
ENOUGH = 5_000  # candidates looked at in all searches; after that only the first orders are tried

Search = Callable[[Sequence[Running]], list[Victim]]


def cheapest(
    world: Field, ask: Ask, gangs: Sequence[Running], *, peers: Search, search: Search, borrowing: bool
) -> list[Victim]:
    """Return the victims out of ``gangs`` that the rules of the newcomer's queue choose.

    ``peers`` searches in the peers' order, ``search`` takes gangs in the order that it is given.
    """
    if not gangs:
        return []
    found = peers(gangs)
    if world.rules[ask.queue].victims is VictimChoice.LOWEST_PRIORITY:
        return found
    parts = [piece for gang in gangs for piece in pieces(gang)]
    if not found and len(parts) > len(gangs):
        found = peers(parts)
    if world.quick:
        return found
    found = found or _in_other_orders(world, ask, parts, search, borrowing=borrowing)
    if not found:
        return []
    return _joined(world, ask, _least_lost(world, ask, _in_pieces(found), parts, search), borrowing=borrowing)


def _in_other_orders(
    world: Field, ask: Ask, gangs: Sequence[Running], search: Search, *, borrowing: bool
) -> list[Victim]:
    """Return what is found where the usual order finds nothing.

    It may have taken some on nodes where that is of no use, until nobody more of their queue might be taken.
    """
    if not gangs or len(gangs) > ENOUGH or not _fits_without(world, ask, gangs, borrowing=borrowing):
        return []
    few = max(1, ENOUGH // len(gangs))
    orders = chain(_orders(world, ask, gangs), islice(_frugal(world, ask, gangs), few))
    return next((found for order in orders if (found := search(order))), [])


def _fits_without(world: Field, ask: Ask, gangs: Sequence[Running], *, borrowing: bool) -> bool:
    """Tell whether it would fit if all of these might go."""
    trial = Trial(world, ask, borrowing=borrowing)
    try:
        for gang in gangs:
            trial.take(Victim(gang, Cause.QUEUE))
        return trial.fits()
    finally:
        trial.close()


def _frugal(world: Field, ask: Ask, gangs: Sequence[Running]) -> Iterator[list[Running]]:
    """Yield orders that spare what may be used up: what other queues borrow, and disruption budgets.

    Those come first who leave the missing places. Of these who uses up the most comes last: it may be more than its
    queue borrows. So it is tried to have one of the largest go whatever it uses up.
    """

    def borrowed(gang: Running) -> float:
        return 0.0 if gang.queue == ask.queue else _portion(gang, ask)

    def covered(gang: Running) -> float:
        return sum(pods / max(1, world.budgets.get(key, 0)) for key, pods in gang.covered)

    def both(gang: Running) -> float:
        return borrowed(gang) + covered(gang)

    uses = (borrowed, both, covered) if any(gang.covered for gang in gangs) else (borrowed,)
    by_size = sorted(gangs, key=lambda gang: (-borrowed(gang), gang.uid))
    for end in (None, *(gang for gang in by_size[:LARGEST] if borrowed(gang) > 0)):
        for used in uses:
            yield _frugally(world, gangs, used, end)


def _frugally(
    world: Field, gangs: Sequence[Running], used: Callable[[Running], float], end: Running | None
) -> list[Running]:
    def price(gang: Running) -> Work:
        return NO_WORK if gang is end else Work(round(1_000_000 * used(gang)))

    cheap = sorted(gangs, key=lambda gang: (gang is not end, price(gang), gang.uid))
    needed = world.beside.cheapest(cheap, price)
    return _first(sorted(needed, key=lambda gang: (gang is end, price(gang), gang.uid)), cheap)


def _first(some: Sequence[Running], everybody: Sequence[Running]) -> list[Running]:
    uids = {gang.uid for gang in some}
    return [*some, *(gang for gang in everybody if gang.uid not in uids)]


def _portion(gang: Running, ask: Ask) -> float:
    """Return how much of what is contested the gang would leave."""
    return sum(min(1.0, gang.usage.get(cell, 0) / amount) for cell, amount in ask.usage.items() if amount > 0)


def _least_lost(
    world: Field,
    ask: Ask,
    peers: list[Victim],
    everybody: Sequence[Running],
    search: Search,
) -> list[Victim]:
    """Return the cheapest set that searches find, at most as dear in real work as that of the peers' order.

    ``search`` takes gangs in the order that it is given.
    """
    most = world.lost(peers)
    best, best_key = peers, _cost(world, ask, peers, everybody)
    looked_at = 0

    def improved(order: Sequence[Running]) -> bool:
        nonlocal best, best_key
        nonlocal looked_at
        found, looked = _affordable(world, order, search, most, best_key[0])
        looked_at += looked
        if not found:
            return False
        key = _cost(world, ask, found, everybody)
        if key >= best_key:
            return False
        best, best_key = found, key
        return True

    orders = _orders(world, ask, everybody)
    for order in orders:
        improved(order)
    for _ in range(ROUNDS):
        dearest = world.dearest_first(best)[:SWAPS]
        if not any(
            improved([gang for gang in order if gang.uid != victim.gang.uid])
            for victim in dearest
            if world.price(victim.gang) > NO_WORK
            for order in orders
            if looked_at < ENOUGH
        ):
            break
    return best


def _affordable(
    world: Field, order: Sequence[Running], search: Search, most: Work, best: Work
) -> tuple[list[Victim], int]:
    """Search, and again without who loses most, until the victims lose at most as much; none if they count for more.

    Return how many candidates were looked at, too.
    """
    looked_at = 0
    for _ in range(1 + SWAPS):
        looked_at += len(order)
        found = search(order)
        if not found or reduce(Work.plus, (world.price(victim.gang) for victim in found), NO_WORK) > best:
            break
        if world.lost(found) <= most:
            return found, looked_at
        loses_most = max(found, key=lambda victim: (victim.gang.lost(world.now), victim.gang.uid)).gang.uid
        order = [gang for gang in order if gang.uid != loses_most]
    return [], looked_at


def _orders(world: Field, ask: Ask, gangs: Sequence[Running]) -> list[list[Running]]:
    """Return orders in which gangs may be taken: cheapest, cheapest for what they leave, and so by nodes."""

    def price(gang: Running) -> tuple[bool, Work, bool, str]:
        return (not gang.evicting, world.price(gang), not gang.gives_up, gang.uid)

    def rate(gang: Running) -> tuple[bool, float, float, bool, float, str]:
        cost, part = world.price(gang), max(_portion(gang, ask), 1e-9)
        work = (cost.gpu_seconds / part, cost.pod_seconds / part)
        return (not gang.evicting, *work, not gang.gives_up, -part, gang.uid)

    by_rate = sorted(gangs, key=rate)
    return [by_rate, _first(world.beside.cheapest(by_rate, world.price), by_rate), sorted(gangs, key=price)]


def _cost(world: Field, ask: Ask, victims: Sequence[Victim], everybody: Sequence[Running]) -> tuple[Work, int, int]:
    """Return what a set of victims counts for, with those whom they take in turn when they come back.

    Then the number of all these gangs, and of those that go at once; who only gives up a piece is in neither.

    Else a victim of high priority that loses little would be taken instead of one of low priority, and then take
    that one too. Looked at roughly: by the amounts that spared gangs of the victim's queue hold which rank lower, and
    what its quota has left then.
    """
    gone = {victim.gang.uid: victim.gang for victim in victims}
    with world.without(gone.values()):
        world.tree.add(ask.queue, ask.usage)
        left = {
            queue: {cell: world.tree.nodes[queue].available(cell) for cell in ask.contested}
            for queue in {gang.queue for gang in gone.values()}
        }
        world.tree.remove(ask.queue, ask.usage)
    spared: dict[str, list[Running]] = {}
    for gang in everybody:
        if gang.uid not in gone and not gang.evicting:
            spared.setdefault(gang.queue, []).append(gang)
    for gangs in spared.values():
        gangs.sort(key=lambda gang: victim_order(gang, ask.queue), reverse=True)  # the lowest are popped first
    counted = list(gone.values())
    for again in sorted(gone.values(), key=lambda gang: (-gang.priority, gang.submitted_at, gang.uid)):
        if not (again.evicting or again.gives_up):
            counted += _taken_in_turn(world, ask, again, left[again.queue], spared.get(again.queue, []))
    price = reduce(Work.plus, map(world.price, counted), NO_WORK)
    return price, sum(not gang.gives_up for gang in counted), sum(not gang.gives_up for gang in gone.values())


def _taken_in_turn(world: Field, ask: Ask, again: Running, left: Amounts, spared: list[Running]) -> list[Running]:
    """Take out of ``spared``, the last first, those whom a victim takes when it comes back, if they suffice.

    ``left``: what its queue may still use. If that is all that it needs, it is nodes that it lacks.
    """
    rules = world.rules.get(again.queue)
    if rules is None or rules.within_queue is Within.NEVER or not spared:
        return []
    back = Ask(again.queue, again.priority, again.submitted_at, again.usage, ask.contested)
    needed = {cell: amount for cell, amount in again.usage.items() if amount > 0 and cell in ask.contested}
    missing = {cell: amount - left[cell] for cell, amount in needed.items() if amount > left[cell]} or needed
    lower: list[int] = []
    for index in range(len(spared) - 1, -1, -1):
        if not missing or spared[index].priority > again.priority:
            break
        if may_take(rules.within_queue, spared[index], back):
            lower.append(index)
            usage = spared[index].usage
            missing = {cell: amount - usage.get(cell, 0) for cell, amount in missing.items()}
            missing = {cell: amount for cell, amount in missing.items() if amount > 0}
        elif rules.within_queue is Within.LOWER_PRIORITY:
            break
    return [] if missing else [spared.pop(index) for index in lower]


# Gangs that give up some of their pods


def pieces(gang: Running) -> list[Running]:
    """Return an elastic gang in two: the pods that it can give up, and those that it can't run without."""
    part = gang.elastic
    if part is None:
        return [gang]
    stays = Portion(gang.placements, gang.usage).without(part)
    covered = dict(gang.elastic_covered)
    left = tuple((key, pods - covered.get(key, 0)) for key, pods in gang.covered)
    rest = replace(
        gang,
        uid=f"{gang.uid}/rest",
        of=gang,
        usage=stays.quota,
        placements=stays.placements,
        covered=left,
        elastic=None,
    )
    return [giving_up(gang, part), rest]


def _in_pieces(victims: Iterable[Victim]) -> list[Victim]:
    return [
        victim if victim.gang.of else Victim(piece, victim.cause)
        for victim in victims
        for piece in ([victim.gang] if victim.gang.of else pieces(victim.gang))
    ]


def _joined(world: Field, ask: Ask, parts: Sequence[Victim], *, borrowing: bool) -> list[Victim]:
    """Return victims under their own uids. Who can't keep what it needs goes whole, and no pod is taken in vain."""
    whole = {v.gang.of.uid for v in parts if v.gang.of and not v.gang.gives_up}
    trial = Trial(world, ask, borrowing=borrowing)
    try:
        for victim in parts:
            if victim.gang.of is None or victim.gang.of.uid not in whole:
                trial.take(victim)
            elif not victim.gang.gives_up:
                trial.take(Victim(victim.gang.of, victim.cause))
        if whole:  # they leave more than was asked of them
            trial.give_back(world.dearest_first(trial.taken.values()))
        for victim in world.dearest_first(v for uid, v in trial.taken.items() if uid in whole):
            _take_piece(trial, victim)
        for victim in [victim for victim in trial.taken.values() if victim.gang.gives_up]:
            _take_less(trial, victim)
        return [
            Victim(replace(v.gang, uid=v.gang.of.uid), v.cause) if v.gang.of else v
            for v in trial.taken.values()
            if v.gang.placements or not v.gang.gives_up
        ]
    finally:
        trial.close()


def _take_piece(trial: Trial, victim: Victim) -> None:
    """Have a gang that goes whole give up no more than it can do without, if that is enough."""
    piece = Victim(pieces(victim.gang)[0], victim.cause)
    trial.put_back(victim)
    trial.take(piece)
    if not trial.fits():
        trial.put_back(piece)
        trial.take(victim)


def _take_less(trial: Trial, victim: Victim) -> None:
    """Take the fewest pods of a gang with which it still fits, of each of its roles as it can spare them."""
    gang = victim.gang.of or victim.gang

    def fits(part: Portion) -> bool:
        less = Victim(giving_up(gang, part), victim.cause)
        trial.take(less)
        fits = trial.fits()
        trial.put_back(less)
        return fits

    trial.put_back(victim)
    part = fewest(Portion(victim.gang.placements, victim.gang.usage), fits)
    trial.take(Victim(giving_up(gang, part), victim.cause))

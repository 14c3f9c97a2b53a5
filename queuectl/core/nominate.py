"""What one gang would get now: flavors, a place on nodes, and whose room it would need."""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from queuectl.core import fit
from queuectl.core.backlog import pending_key
from queuectl.core.cards import cards, charge, weigh
from queuectl.core.explain import largest, short_of_quota, waiting_for_others
from queuectl.core.flavors import Assignment, Group, Mode, Wanted, Way, assign, groups_of
from queuectl.core.freed import Freed
from queuectl.core.limits import limited, requested
from queuectl.core.preemption import Ask, Beside, Field, Running, Victim
from queuectl.core.snapshot import Snapshot
from queuectl.core.tree import height_that_fits
from queuectl.core.victims import find_victims
from queuectl.core.windows import bounded
from queuectl.model.objects import NODE_LEVEL, Flavor, Gang, Queue, Role
from queuectl.model.plan import Admission, Placement
from queuectl.model.policy import Cell, Reclaim, Within
from queuectl.model.reasons import Reason, Why, listed, why
from queuectl.model.resources import CARDS, format_quantity, is_extended, is_gpu, total

_MINUTE = 60  # seconds


@dataclass(frozen=True)
class Entry:
    """A gang with what it would get. It can be had if it fits, or if there are victims."""

    gang: Gang
    roles: tuple[Role, ...]  # with the pods that it would start with
    assignment: Assignment
    placements: tuple[Placement, ...] = ()
    victims: tuple[Victim, ...] = ()
    wait: Why | None = None  # set when it can't be had
    wake_at: float | None = None  # Unix seconds at which a time limit ends that keeps it waiting
    by_quota: bool = False  # it waits, and as long as nothing changes in its tree of queues or of nodes' sizes
    short: fit.Short | None = None  # it waits, and as long as neither that changes nor there are more places

    @property
    def fits(self) -> bool:
        """Tell whether nobody has to give way."""
        return self.wait is None and not self.victims

    def admission(self) -> Admission:
        """Return the entry as a decision."""
        pods = {role.name: role.pods for role in self.roles}
        return Admission(self.gang.uid, self.placements, self.assignment.usage, self.assignment.flavors, pods)


def entry_key(entry: Entry) -> tuple[int, int, float, int, str]:
    """Order of heads: 1. borrows from less far away 2. as in a queue's line."""
    return (entry.assignment.way.height, *pending_key(entry.gang))


def nominate(snapshot: Snapshot, taken: Collection[str], gang: Gang, now: float) -> Entry:
    """Return the best that the gang could get, with all of its pods or, if it is elastic, with as many as can be had.

    Of its alternatives the first that fits, or else the first for which there are victims. ``taken``: workloads that
    are on their way out for somebody else. ``now``: Unix seconds. On nodes that no maintenance window takes before it is
    over; a gang that is movable goes onto others too, if it has the time to start there and does not fit on these.
    """
    kept, able = (bounded(snapshot.fleet, gang, end) for end in (gang.lifetime.end(now), now + gang.lifetime.start))
    entry = _of_alternatives(snapshot, taken, kept, now)
    if kept is gang:
        return entry
    if not entry.fits and not entry.by_quota and kept.roles != able.roles:
        anyway = _of_alternatives(snapshot, taken, able, now)
        if gang.lifetime.movable and (anyway.fits or entry.wait is not None):
            entry = anyway
        elif entry.wait is not None and anyway.fits:
            entry = replace(entry, wait=_maintenance_ahead(snapshot, taken, gang, anyway, now))
    return replace(entry, gang=gang)


def _maintenance_ahead(snapshot: Snapshot, taken: Collection[str], gang: Gang, anyway: Entry, now: float) -> Why:
    """Say which nodes a gang would start on but for their maintenance, and for how long it could."""
    fleet, life = snapshot.fleet, gang.lifetime
    end = life.end(now)
    nodes = {p.node: at for p in anyway.placements if fleet and (at := fleet.taken_at(p.node)) < end}

    def fits(window: float) -> bool:
        return _of_alternatives(snapshot, taken, bounded(fleet, gang, window), now).fits

    windows = [at for at in fleet.windows if at < end] if fleet else []
    last = bisect_left(windows, True, key=lambda window: not fits(window)) - 1  # noqa: FBT003 - what is looked for
    seconds = int(windows[last] - now) - life.start if last >= 0 else 0
    seconds -= seconds % 60 if seconds > _MINUTE else 0  # else it would be told anew each second
    changes = [f"maxRunSeconds of at most {seconds}"] if seconds > 0 else []
    changes += ["spec.checkpoint"] if life.run is None else []
    lasts = f"it may take until {_moment(end)}" if life.run is not None else "it has no maxRunSeconds"
    return why(
        Reason.MAINTENANCE_AHEAD, nodes=listed(sorted(nodes)), at=_moment(min(nodes.values(), default=now)), lasts=lasts,
        change=" or ".join(changes) or "their maintenance over",
    )  # fmt: skip


def _moment(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _of_alternatives(snapshot: Snapshot, taken: Collection[str], gang: Gang, now: float) -> Entry:
    first = _nominate(snapshot, taken, gang, now)
    if first.fits or not gang.alternatives:
        return first
    tried = [first]
    for other in gang.alternatives:
        pods = dict(other.pods)
        roles = tuple(replace(role, pods=pods.get(role.name, role.pods)) for role in gang.roles)
        entry = _nominate(snapshot, taken, replace(gang, gpu_models=other.models, roles=roles), now)
        tried.append(replace(entry, gang=gang))
        if entry.fits:
            return tried[-1]
    wakes = [entry.wake_at for entry in tried if entry.wake_at is not None]
    best = next((entry for entry in tried if entry.victims), first)
    by_quota = all(entry.by_quota for entry in tried)
    return replace(best, by_quota=by_quota, short=None, wake_at=min(wakes, default=None))


def _nominate(snapshot: Snapshot, taken: Collection[str], gang: Gang, now: float) -> Entry:
    spare = [role.pods - min(role.pods, role.pods if role.least is None else role.least) for role in gang.roles]
    most = sum(spare)

    def roles(cut: int) -> tuple[Role, ...]:
        if not cut:
            return gang.roles
        return tuple(_of_size(r, r.pods - s * cut // most) for r, s in zip(gang.roles, spare, strict=True))

    def over(cut: int) -> Why | None:
        queue, asked = snapshot.queues[gang.queue], roles(cut)
        if not limited(queue):
            return None
        everywhere = [cards(requested(asked).items(), flavor) for flavor in known_flavors(snapshot, queue)]
        return snapshot.held.over(queue, gang, asked, min(everywhere, default=0))

    # The fewer pods, the easier: find the largest size that can be had by bisection, all roles shrinking alike.
    least = bisect_left(range(most + 1), True, key=lambda cut: over(cut) is None)  # noqa: FBT003 - what is looked for
    if least > most:
        return Entry(gang, gang.roles, Assignment(), wait=over(most))
    search = _Search(snapshot, taken, gang, now)
    full = search.entry(roles(least))
    if full.wait is None or not most:
        return full
    low, high, best, wakes = least + 1, most, full, [full.wake_at]
    while low <= high:
        cut = (low + high) // 2
        entry = search.entry(roles(cut))
        wakes.append(entry.wake_at)
        if entry.wait is None:
            best, high = entry, cut - 1
        else:
            low = cut + 1
            best = best if best.wait is None else entry  # the smallest size has the last word on why it waits
    wake_at = min((at for at in wakes if at is not None), default=None)
    return replace(best, by_quota=False, short=None, wake_at=wake_at)


def _of_size(role: Role, pods: int) -> Role:
    """Return the role with so many pods, or as many more as make its slices whole."""
    size = role.topology.slice_size
    return replace(role, pods=min(role.pods, -(-pods // size) * size))


def flavors_of(snapshot: Snapshot, entry: Entry) -> dict[str, Flavor]:
    """Return for each role the flavor whose nodes it goes to."""
    return _Search(snapshot, (), entry.gang, 0.0)._flavors(entry.roles, entry.assignment)  # noqa: SLF001 - of here


def known_flavors(snapshot: Snapshot, queue: Queue) -> list[Flavor]:
    """Return the flavors of a queue that exist."""
    names = dict.fromkeys(name for name, _ in queue.quotas)
    return [snapshot.flavors[name] for name in names if name in snapshot.flavors]


def patient_until(gang: Gang, queue: Queue) -> float:
    """Return the Unix seconds from which on a gang of the queue may take from others."""
    since = gang.submitted_at if gang.waits_since is None else gang.waits_since
    return since + queue.preemption.wait_seconds if queue.preemption.wait_seconds else 0.0


def be_patient(gang: Gang, queue: Queue) -> Why:
    """Say until when the gang has to wait before it may take from others."""
    seconds, until = queue.preemption.wait_seconds, clock(patient_until(gang, queue))
    return why(Reason.WAITING_BEFORE_PREEMPTION, queue=queue.name, seconds=seconds, until=until)


@dataclass(frozen=True, slots=True)
class _Hindrance:
    """Why a choice of flavors can't be had now, and the roles and flavors that are to blame."""

    wait: Why
    spent: set[tuple[str, str]]
    short: fit.Short | None = None


class _Search:
    def __init__(self, snapshot: Snapshot, taken: Collection[str], gang: Gang, now: float) -> None:
        self.snapshot = snapshot
        self.now = now
        self.gang = gang
        self.queue: Queue = snapshot.queues[gang.queue]
        self.node = snapshot.later.nodes[gang.queue]
        self.flavors = known_flavors(snapshot, self.queue)
        self.shared_groups = groups_of(self.queue.quotas)
        self.wanted: list[Wanted] = []  # of the roles that are being tried
        self.taken = taken
        self.anybody: dict[tuple[frozenset[Cell], bool, bool], bool] = {}  # whether others could give way
        self.wakes: set[float] = set()  # when time limits end that keep others from giving way
        self.shielded = False  # whether anything does that time or a budget can end
        if snapshot.fleet is not None:
            snapshot.fleet.meet(asked for role in gang.roles for asked in role.requests)

    def entry(self, roles: tuple[Role, ...]) -> Entry:
        """Try flavors until quota and nodes both hold; else look for victims where it came closest."""
        self.wanted = _wanted(self.queue, roles, self.flavors)
        if not self.flavors:
            return Entry(self.gang, roles, Assignment(), wait=self._no_flavor(self.wanted[0], "", {}))
        excluded = self._over_a_limit(roles)  # role and flavor that can't be had now
        shorts: list[tuple[Assignment, Why]] = []  # that quota allows in the end, and not now
        last: fit.Short | None = None
        assignment = self._assign(roles, excluded)
        while assignment.mode is Mode.FIT:
            found = self._now(roles, assignment)
            if not isinstance(found, _Hindrance):
                return Entry(self.gang, roles, assignment, found)
            shorts.append((assignment, found.wait))
            last = found.short
            if found.spent <= excluded:
                break
            excluded |= found.spent
            if self._none_left(excluded):
                assignment = Assignment(way=Way(Mode.NEVER))
                break
            assignment = self._assign(roles, excluded)
        preempting = self._preempting(roles, self._worth_a_search(roles, assignment, shorts, excluded))
        if preempting is not None:
            return preempting
        wake_at = min(self.wakes, default=None)
        short = min(
            shorts, key=lambda one: _HOPE.index(one[1].reason), default=None
        )  # the soonest; of equals the first
        if short is not None and (assignment.mode in {Mode.FIT, Mode.NEVER} or _is_coming(short[1])):
            by_nodes = len(shorts) == 1 and short[1].reason is Reason.WAITING_FOR_NODES and self._by_rules
            return Entry(
                self.gang, roles, short[0], wait=short[1], wake_at=wake_at, short=last if by_nodes else None
            )  # fmt: skip
        wait = self._quota_why(assignment)
        if assignment.mode is not Mode.NEVER:
            exceeds = self._exceeds(roles, assignment)
            if exceeds is not None and short is not None:
                # Another flavor's nodes are merely in use.
                return Entry(self.gang, roles, short[0], wait=short[1], wake_at=wake_at)
            wait = exceeds or wait
        by_quota = short is None and not self.shielded and assignment.mode in {Mode.NEVER, Mode.NOBODY}
        return Entry(self.gang, roles, assignment, wait=wait, wake_at=wake_at, by_quota=by_quota)

    def _none_left(self, excluded: Collection[tuple[str, str]]) -> bool:
        """Tell whether a role that counts has been tried with every flavor."""
        counted = [role for wanted in self.wanted if any(wanted.amounts.values()) for role in wanted.roles]
        return any(all((role, flavor.name) in excluded for flavor in self.flavors) for role in counted)

    def _worth_a_search(
        self,
        roles: Sequence[Role],
        assignment: Assignment,
        shorts: Sequence[tuple[Assignment, Why]],
        excluded: Collection[tuple[str, str]],
    ) -> Iterator[Assignment]:
        """Yield the choices for which others could give way: of quota, in the order of the queue's rules; on nodes."""
        if any(_is_coming(wait) for _, wait in shorts):
            return
        spent = set(excluded)
        others = bool(self.snapshot.going or self.snapshot.policy.fair_sharing)
        while assignment.mode not in {Mode.FIT, Mode.NEVER}:
            # That nobody gives way for one cell was found out by looking; time or those who go could change that.
            if assignment.mode is not Mode.NOBODY or self.shielded or others:
                yield assignment
            chosen = {(role, flavor) for role, flavors in assignment.flavors.items() for flavor in flavors.values()}
            if chosen <= spent or self.snapshot.policy.one_head:  # Kueue's cycle looks at one choice only
                break
            spent |= chosen
            if self._none_left(spent):
                break
            assignment = self._assign(roles, spent)
        yield from (one for one, wait in shorts if wait.reason is Reason.WAITING_FOR_NODES)

    def _preempting(self, roles: tuple[Role, ...], tried: Iterable[Assignment]) -> Entry | None:
        """Return the first that can be had by preemption, now or, if only time keeps it from that, later.

        Nobody gives way where the room of those who go anyway suffices, whatever the flavor.
        """
        if self.snapshot.going:
            tried = list(tried)
            for one in tried:
                entry = self._with_victims(roles, one, self._victims(roles, one, preempts=False)[0])
                if entry is not None:
                    return entry
                if self._fits_when_all_are_gone(roles, one):
                    return Entry(self.gang, roles, one, wait=waiting_for_others(self._departing()))
        later: Entry | None = None
        for one in tried:
            victims, shielded = self._victims(roles, one)
            entry = self._with_victims(roles, one, victims)
            if entry is not None:
                return entry
            kept = self._shielded_why(roles, one, shielded) if later is None else None
            if kept is not None:
                self.wakes |= {kept[1]} if kept[1] is not None else set()
                later = Entry(self.gang, roles, one, wait=kept[0])
        return later and replace(later, wake_at=min(self.wakes, default=None))

    def _fits_when_all_are_gone(self, roles: Sequence[Role], one: Assignment) -> bool:
        """Tell whether it fits once those are gone who go anyway, and those who make room for others."""
        fleet = self.snapshot.fleet
        room = fleet.free_later() if fleet else None
        if fleet is None or room is None:
            return False
        field = self._field()
        going = [victim.gang for victim in field.waited_for(self._ask(one.usage, frozenset(one.usage)))]
        for row, columns, amounts in fleet.parts(p for gang in going for p in gang.placements):
            room.use(row, columns, -amounts)
        with field.without(going):
            fits = self.snapshot.fits_later(self.gang, one.usage)
        return fits and fit.holds(fleet, room, roles, self._flavors(roles, one), self.gang.together)

    def _with_victims(self, roles: tuple[Role, ...], one: Assignment, victims: Sequence[Victim]) -> Entry | None:
        placed = self._place(roles, one, [victim.gang for victim in victims]) if victims else None
        if placed is None or isinstance(placed, fit.Short):
            return None
        return Entry(self.gang, roles, one, placed, tuple(victims))

    def _assign(self, roles: Sequence[Role], excluded: Collection[tuple[str, str]]) -> Assignment:
        rules = self.queue.preemption
        fair = bool(self.snapshot.policy.fair_sharing)
        result = assign(
            self.node,
            self._groups,
            self.queue.choice,
            self.wanted,
            suits=lambda wanted, flavor: (
                not any((r, flavor) in excluded for r in wanted.roles) and self._suits(wanted, flavor)
            ),
            charge=self._charge,
            try_preemption=self._try_preemption,
            may_preempt_and_borrow=rules.borrow or fair,
            may_borrow=self.gang.preemptible,
        )
        for role in roles:
            if result.missing is None and not result.flavors.get(role.name):
                result.uncounted |= self._uncounted(role, result, excluded)
        return result

    def _uncounted(self, role: Role, assignment: Assignment, excluded: Collection[tuple[str, str]]) -> dict[str, str]:
        """Return the flavor of a role that nothing is counted of: that of the others, else the queue's first that does."""
        chosen = [name for flavors in assignment.flavors.values() for name in flavors.values()]
        names = (*chosen, *(flavor.name for flavor in self.flavors))
        wanted = Wanted((role.name,), {})
        for name in dict.fromkeys(names):
            if (role.name, name) not in excluded and self._suits(wanted, name):
                return {role.name: name}
        return {}

    def _groups(self, wanted: Wanted) -> Sequence[Group]:
        """Return the flavors to try: for all that is wanted one flavor, that has a quota for each extended resource."""
        if self.snapshot.policy.resource_groups:
            return self.shared_groups
        asked = [resource for resource in wanted.amounts if is_extended(resource)]
        flavors = dict.fromkeys(flavor for flavor, _ in self.queue.quotas)
        offering = tuple(f for f in flavors if all(self._offers(f, resource) for resource in asked))
        return [Group(frozenset(wanted.amounts), offering)] if offering else []

    def _offers(self, flavor: str, resource: str) -> bool:
        """Tell whether the queue has a quota for an extended resource, by its name or by the cards that it counts."""
        by_card = self.snapshot.flavors.get(flavor) if (flavor, CARDS) in self.queue.quotas else None
        return (flavor, resource) in self.queue.quotas or (by_card is not None and weigh(resource, by_card) > 0)

    def _charge(self, amounts: Mapping[str, int], flavor: str) -> dict[str, int]:
        return charge(amounts, self.snapshot.flavors[flavor])

    def _over_a_limit(self, roles: Sequence[Role]) -> set[tuple[str, str]]:
        """Return the roles with GPUs, with the flavors in which these count as more cards than a limit leaves."""
        if not limited(self.queue):
            return set()
        asked = requested(roles).items()
        return {
            (role.name, flavor.name)
            for flavor in self.flavors
            if self.snapshot.held.over(self.queue, self.gang, roles, cards(asked, flavor))
            for role in roles
            if cards(role.requests, flavor)
        }

    def _suits(self, wanted: Wanted, flavor: str) -> bool:
        known = self.snapshot.flavors.get(flavor)
        if known is None:
            return False
        with_gpu = cards(wanted.amounts.items(), known) > 0
        of_model = not (with_gpu and self.gang.gpu_models) or known.gpu_model in self.gang.gpu_models
        return of_model and not unpromised(self.gang, wanted.roles, known)

    def _try_preemption(self, cell: Cell, amount: int, may: bool) -> Way:  # noqa: FBT001
        """Tell how an amount could be had if others were gone, nodes aside; ``may``: not only those who go anyway."""
        if not may and not self.snapshot.going:
            return Way(Mode.NOBODY)
        field, ask = self._field(), self._ask({cell: amount}, frozenset({cell}), preempts=may)
        victims = find_victims(field, ask) if self._anybody(ask) else []
        self._mind(field)
        if not victims:
            return Way(Mode.NOBODY, height_that_fits(self.node, cell, amount)[0])
        with field.without([victim.gang for victim in victims]):
            height = height_that_fits(self.node, cell, amount)[0]
        if all(victim.gang.goes for victim in victims):
            return Way(Mode.WAIT, height)
        at_home = any(victim.gang.queue == self.gang.queue for victim in victims)
        return Way(Mode.PREEMPT if at_home else Mode.RECLAIM, height)

    def _victims(
        self, roles: Sequence[Role], assignment: Assignment, *, blind: bool = False, preempts: bool = True
    ) -> tuple[list[Victim], dict[str, Running]]:
        """Return victims, and who was passed over for a shield."""
        if not self.snapshot.going and not self._may_take:
            return [], {}
        everywhere = self._ask(assignment.usage, frozenset(assignment.usage), preempts=preempts)
        if not self._anybody(everywhere, blind=blind):
            self._mind(self._field())
            return [], {}
        # Where quota lacks one resource, nodes may lack another.
        on_nodes = not assignment.contested or isinstance(self._place(roles, assignment, ()), fit.Short)
        contested = frozenset(assignment.usage if on_nodes else assignment.contested)
        flavors, together = self._flavors(roles, assignment), self.gang.together
        beside = Freed(self.snapshot, self.gang.queue, assignment.usage, roles, flavors=flavors, together=together)
        field = self._field(beside, blind=blind)
        victims = find_victims(field, self._ask(assignment.usage, contested, preempts=preempts))
        self._mind(field)
        return victims, field.shielded

    def _anybody(self, ask: Ask, *, blind: bool = False) -> bool:
        """Tell whether anybody is there who uses what is contested and goes, may be taken or is shielded."""
        key = (ask.contested, ask.preempts, blind)
        if key not in self.anybody:
            self.anybody[key] = bool(self.snapshot.going) or self._field(blind=blind).has_candidates(ask)
        return self.anybody[key]

    @property
    def _by_rules(self) -> bool:
        """Tell whether nobody could have given way, at any time and wherever there is room."""
        return not self._may_take and not self.snapshot.going and not self.shielded

    @property
    def _may_take(self) -> bool:
        """Tell whether the queue's rules let it take from anybody."""
        rules = self.queue.preemption
        reclaims = rules.reclaim is not Reclaim.NEVER and self.node.parent is not None
        return reclaims or rules.within_queue is not Within.NEVER

    def _mind(self, field: Field) -> None:
        """Remember when those may give way who were passed over, or when the gang may ask."""
        until = patient_until(self.gang, self.queue)
        ends = [until] if until > self.now else []
        ends += [end for gang in field.shielded.values() if (end := field.protected_until(gang)) is not None]
        self.wakes |= set(ends)
        self.shielded = self.shielded or bool(ends or field.shielded)

    def _shielded_why(
        self, roles: Sequence[Role], assignment: Assignment, shielded: Mapping[str, Running]
    ) -> tuple[Why, float | None] | None:
        """Say what keeps the gang from taking room that it could have at another time, and until when."""
        until = patient_until(self.gang, self.queue)
        patient = until > self.now and self.gang.preempts
        if not shielded and not patient:
            return None
        victims = [victim.gang for victim in self._victims(roles, assignment, blind=True)[0]]
        if not victims:
            return None
        if patient:
            return be_patient(self.gang, self.queue), until
        field = self._field()
        ends = {uid: end for uid, gang in shielded.items() if (end := field.protected_until(gang)) is not None}
        last = max((gang for gang in victims if gang.uid in ends), key=lambda gang: ends[gang.uid], default=None)
        wait = _budget_why(victims, field.budgets)
        if wait is None and last is not None:
            wait = why(
                Reason.VICTIMS_PROTECTED, job=last.name, queue=last.queue, until=clock(ends[last.uid]),
                seconds=self.snapshot.rules[last.queue].min_run_seconds,
            )  # fmt: skip
        return (wait, min(ends.values(), default=None)) if wait else None

    def _field(self, beside: Beside | None = None, *, blind: bool = False) -> Field:
        field = Field(
            tree=self.snapshot.later,
            running=self.snapshot.running,
            rules=self.snapshot.rules,
            fair=self.snapshot.policy.fair_sharing,
            going=self.snapshot.going,
            taken=self.taken,
            now=self.now,
            budgets=self.snapshot.budgets,
            quick=blind or beside is None,
            blind=blind,
        )
        return field if beside is None else replace(field, beside=beside)

    def _ask(self, usage: Mapping[Cell, int], contested: frozenset[Cell], *, preempts: bool = True) -> Ask:
        gang = self.gang
        return Ask(
            gang.queue, gang.priority, gang.submitted_at, usage, contested, borrows=gang.preemptible,
            preempts=preempts and gang.preempts and patient_until(gang, self.queue) <= self.now,
        )  # fmt: skip

    def _now(self, roles: Sequence[Role], assignment: Assignment) -> "tuple[Placement, ...] | _Hindrance":
        """Return the places for flavors of which there is quota in the end, or why they can't be had now."""
        placed = self._place(roles, assignment, ())
        if isinstance(placed, fit.Short):
            name = placed.role.name
            flavors = assignment.flavors.get(name, {}).values() or [assignment.uncounted.get(name, "")]
            spent = {(name, flavor) for flavor in flavors if flavor}
            return _Hindrance(self._short_why(roles, assignment, placed), spent, placed)
        if self.snapshot.tree.fits(self.gang.queue, assignment.usage):
            return placed
        node = self.snapshot.tree.nodes[self.gang.queue]
        short = {cell for cell, amount in assignment.usage.items() if amount > node.available(cell)}
        chosen = assignment.flavors.items()
        spent = {
            (role, f)
            for role, flavors in chosen
            for resource, f in flavors.items()
            if (f, resource) in short or ((f, CARDS) in short and weigh(resource, self.snapshot.flavors[f]))
        }
        return _Hindrance(waiting_for_others(self._departing(short)), spent)

    def _departing(self, cells: Collection[Cell] | None = None) -> list[Running]:
        """Return those on their way out for others; only who uses any of the cells in the queue's tree, if given."""
        gangs = list(self.snapshot.departing)
        if self.taken:
            gangs += (gang for some in self.snapshot.running.values() for gang in some if gang.uid in self.taken)
        if cells is None:
            return gangs
        nodes = self.snapshot.tree.nodes
        root = nodes[self.gang.queue].root
        return [g for g in gangs if nodes[g.queue].root is root and any(g.usage.get(cell) for cell in cells)]

    def _place(
        self, roles: Sequence[Role], assignment: Assignment, gone: Sequence[Running]
    ) -> tuple[Placement, ...] | fit.Short:
        if self.snapshot.fleet is None:
            return ()
        freed = [placement for gang in gone for placement in gang.placements]
        flavors = self._flavors(roles, assignment)
        return fit.place(self.snapshot.fleet, roles, flavors, self.gang.together, freed, others=self.snapshot.others)

    def _short_why(self, roles: Sequence[Role], assignment: Assignment, short: fit.Short) -> Why:
        """Say why nodes do not hold roles for which there is quota."""
        exceeds, fleet = self._exceeds(roles, assignment), self.snapshot.fleet
        flavors, together = self._flavors(roles, assignment), self.gang.together
        if exceeds is None and fleet is not None and fit.fits_later(fleet, roles, flavors, together):
            may = fleet.mask(short.flavor, fit.closely(short.role, short.flavor))
            leaving = [g for g in self._departing() if any(may[row] for row, *_ in fleet.parts(g.placements))]
            return waiting_for_others(leaving)  # nobody else has to give way
        return exceeds or short.because(Reason.WAITING_FOR_NODES)

    def _exceeds(self, roles: Sequence[Role], assignment: Assignment) -> Why | None:
        if self.snapshot.fleet is None:
            return None
        return fit.exceeds_cluster(self.snapshot.fleet, roles, self._flavors(roles, assignment), self.gang.together)

    def _flavors(self, roles: Sequence[Role], assignment: Assignment) -> dict[str, Flavor]:
        """Return for each role the flavor its nodes must be of; where it takes several, all of them in one."""
        chosen = [name for flavors in assignment.flavors.values() for name in flavors.values()]
        first = next(iter((*chosen, *(flavor.name for flavor in self.flavors))), "")
        result = {}
        for role in roles:
            names = dict.fromkeys(assignment.flavors.get(role.name, {}).values())
            names = names or {assignment.uncounted.get(role.name, first): None}
            result[role.name] = _combined([self.snapshot.flavors[name] for name in names])
        return result

    def _quota_why(self, assignment: Assignment) -> Why:
        """Say what of the quota is missing."""
        if assignment.missing is not None:
            wanted, resource = assignment.missing
            return self._no_flavor(wanted, resource, assignment.usage)
        for cell in sorted(assignment.contested or assignment.usage):
            amount = assignment.usage.get(cell, 0)
            if not self.gang.preemptible and self.node.exceeds_own(cell, amount):
                flavor, resource = cell
                return why(
                    Reason.WAITING_FOR_OWN_QUOTA, queue=self.gang.queue, flavor=flavor, resource=resource,
                    wanted=format_quantity(resource, amount),
                    used=format_quantity(resource, self.node.own_used(cell)),
                    nominal=format_quantity(resource, self.node.quota(cell).nominal),
                    jobs=largest(self.snapshot.later, self.gang.queue, cell, self.snapshot.running.get(self.gang.queue, ())),
                )  # fmt: skip
            if amount > self.node.available(cell):
                return self._short_of_quota(cell, amount)
        return waiting_for_others(self._departing())

    def _short_of_quota(self, cell: Cell, amount: int) -> Why:
        rule, running = self.queue.preemption.within_queue, self.snapshot.running.get(self.gang.queue, ())
        lower = [g for g in running if g.priority < self.gang.priority] if rule is not Within.NEVER else []
        fixed = [g for g in lower if not g.preemptible and not g.evicting and g.usage.get(cell)]
        return short_of_quota(self.snapshot.later, self.gang.queue, cell, amount, running=running, fixed=fixed)

    def _unoffered(self, wanted: Wanted) -> str:
        asked = sorted(resource for resource in wanted.amounts if is_extended(resource))
        flavors = dict.fromkeys(flavor for flavor, _ in self.queue.quotas)
        nowhere = [resource for resource in asked if not any(self._offers(f, resource) for f in flavors)]
        if not nowhere:
            return f"none has quotas for all of {', '.join(asked)}"
        gpus = {r for f in self.flavors for name, r in self.queue.quotas if name == f.name and weigh(r, f)}
        others = f"; for GPUs there is {', '.join(sorted(gpus))}" if gpus and any(map(is_gpu, nowhere)) else ""
        return f"none has a quota for {', '.join(nowhere)}{others}"

    def _no_flavor(self, wanted: Wanted, resource: str, used: Mapping[Cell, int]) -> Why:
        group = next((group for group in self._groups(wanted) if resource in group.resources), None)
        role = ", ".join(wanted.roles)
        problem = ""
        if not self.queue.quotas:
            problem = "it has no quota; add spec.quotas"
        elif not any(flavor in self.snapshot.flavors for flavor, _ in self.queue.quotas):
            problem = f"ResourceFlavor {', '.join(dict.fromkeys(f for f, _ in self.queue.quotas))} does not exist"
        elif group is None:
            problem = self._unoffered(wanted)
        elif not any(self._suits(wanted, flavor) for flavor in group.flavors):
            known = [self.snapshot.flavors[name] for name in group.flavors if name in self.snapshot.flavors]
            promises = [unpromised(self.gang, wanted.roles, flavor) for flavor in known]
            problem = next(filter(None, promises), f"none is of GPU model {' or '.join(self.gang.gpu_models)}")
        if problem or group is None:
            return why(Reason.NO_MATCHING_FLAVOR, queue=self.gang.queue, role=role, problem=problem)
        return self._too_much(wanted, [f for f in group.flavors if self._suits(wanted, f)], used)

    def _too_much(self, wanted: Wanted, flavors: Sequence[str], used: Mapping[Cell, int]) -> Why:
        """Say what is missing in the flavor that comes closest, ``used`` being asked for by other roles."""
        asks = {
            flavor: [
                ((flavor, resource), used.get((flavor, resource), 0) + amount)
                for resource, amount in sorted(self._charge(wanted.amounts, flavor).items())
                if (flavor, resource) in self.node.quotas
            ]
            for flavor in flavors
        }
        most = self.node.capacity if self.gang.preemptible else lambda cell: self.node.quota(cell).nominal
        beyond = {f: [(cell, amount) for cell, amount in asks[f] if amount > most(cell)] for f in flavors}
        flavor = min(flavors, key=lambda f: (len(beyond[f]), [-most(cell) for cell, _ in beyond[f]]))
        for cell, amount in beyond[flavor]:
            own = not self.gang.preemptible and amount <= self.node.capacity(cell)
            return why(
                Reason.EXCEEDS_OWN_QUOTA if own else Reason.EXCEEDS_MAX_QUOTA, queue=self.gang.queue, flavor=flavor,
                resource=cell[1], wanted=format_quantity(cell[1], amount),
                nominal=format_quantity(cell[1], most(cell) if own else self.node.capacity(cell)),
            )  # fmt: skip
        for cell, amount in asks[flavor]:
            if amount > self.node.available(cell):
                return self._short_of_quota(cell, amount)
        return waiting_for_others(self._departing())


def _budget_why(victims: Sequence[Running], allowed: Mapping[str, int]) -> Why | None:
    """Say which disruption budget forbids to take them all."""
    needed: dict[str, int] = {}
    for gang in victims:
        for key, pods in gang.covered if not gang.evicting else ():
            needed[key] = needed.get(key, 0) + pods
            if needed[key] > allowed.get(key, 0):
                return why(Reason.DISRUPTION_FORBIDDEN, budget=key, job=gang.name)
    return None


def clock(unix: float) -> str:
    """Return a time of day for people."""
    return datetime.fromtimestamp(unix, UTC).strftime("%H:%M:%S UTC")


def _is_coming(wait: Why) -> bool:
    """Tell whether nobody has to give way, for waiting is enough."""
    return wait.reason is Reason.WAITING_FOR_VICTIMS_OF_OTHERS


_HOPE = (Reason.WAITING_FOR_VICTIMS_OF_OTHERS, Reason.WAITING_FOR_NODES, Reason.EXCEEDS_CLUSTER)


def _wanted(queue: Queue, roles: Sequence[Role], flavors: Collection[Flavor]) -> list[Wanted]:
    """Return what counts against the queue's quotas: roles with GPUs together, so that they take one flavor.

    What a GPU is, its flavors tell. Extended resources always count; cpu, memory and the like only where the queue has a quota for them.
    """
    listed = {resource for _, resource in queue.quotas}

    def counted(role: Role) -> dict[str, int]:
        return {r: n * role.pods for r, n in role.requests if n and (is_extended(r) or r in listed)}

    with_gpu = [role for role in roles if any(cards(role.requests, flavor) for flavor in flavors)]
    parts = (
        [Wanted(tuple(role.name for role in with_gpu), total(counted(role) for role in with_gpu))] if with_gpu else []
    )
    return parts + [Wanted((role.name,), counted(role)) for role in roles if role not in with_gpu]


def unpromised(gang: Gang, names: Collection[str], flavor: Flavor) -> str:
    """Say which level of topology that the gang requires can't be promised on nodes of the flavor; empty: none."""
    roles = [role for role in gang.roles if role.name in names]
    asked = [(level, role) for role in roles for level in (role.topology.required, role.topology.slice_level)]
    levels = {level.name for level in flavor.levels} | {NODE_LEVEL, ""}
    inside = {level.name for level in flavor.inside}
    named = {role.name for role in roles if fit.named_devices(role, flavor)}
    for level, role in (*asked, (gang.together.required, roles[0])):
        if level in inside:
            if role.name in named and {role.topology.required, role.topology.slice_level} <= inside:
                return (
                    f"only one level of flavor {flavor.name} that is inside a node can be promised to role {role.name}"
                )
            if level == gang.together.required:
                return f"{level} of flavor {flavor.name} is inside a node, so a role has to ask for it, in its topology"
        if level not in levels | inside:
            return f"flavor {flavor.name} has no level {level} of topology; it has {', '.join(sorted(levels - {''}))}"
    return ""


def _combined(flavors: Sequence[Flavor]) -> Flavor:
    if len(flavors) == 1:
        return flavors[0]
    labels = tuple(sorted({label for flavor in flavors for label in flavor.node_labels}))
    tolerations = tuple(toleration for flavor in flavors for toleration in flavor.tolerations)
    levels = max((flavor.levels for flavor in flavors), key=len)
    gpus = tuple(gpu for flavor in flavors for gpu in flavor.gpus)
    return Flavor("+".join(flavor.name for flavor in flavors), labels, tolerations, levels=levels, gpus=gpus)

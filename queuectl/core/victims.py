"""Who gives way: the victims that make room for a gang which does not fit.

Take candidates in order until the gang fits, then give back every one without whom it still fits. The searches are of
one gang against one tree, and leave it as they found it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from queuectl.core import fair
from queuectl.core.least_lost import cheapest
from queuectl.core.preemption import Ask, Field, Running, Trial, Victim, victim_order
from queuectl.core.tree import Node
from queuectl.model.policy import Amounts, Cause, Cell, Preemption, Reclaim


def find_victims(world: Field, ask: Ask) -> list[Victim]:
    """Return a set of victims none of whom is needless, or none when no allowed set makes the gang fit.

    Who goes anyway counts first, whatever the rules; if their room suffices, nobody else is taken.
    """
    going = Trial(world, ask, borrowing=True)
    try:
        for victim in world.waited_for(ask):
            going.take(victim)
        waited_for = list(reversed(going.taken.values()))
        if not (waited_for and going.fits()):
            found = fair.by_share(world, ask) if world.fair else _by_priority(world, ask)
            if not found or not waited_for:
                return found
            for victim in found:
                going.take(victim)
        return going.give_back(waited_for)
    finally:
        going.close()


@dataclass(frozen=True, slots=True)
class _Candidate:
    gang: Running
    cause: Cause
    only_at_home: bool = False  # may be taken only if the newcomer ends within its own quota
    meet: Node | None = None  # the lowest subtree that holds both queues


def _by_priority(world: Field, ask: Ask) -> list[Victim]:
    node, rules = world.tree.nodes[ask.queue], world.rules[ask.queue]
    mine = [_Candidate(gang, Cause.QUEUE) for gang in world.candidates(ask.queue, ask, rules.within_queue)]
    advantage, others = _others(world, ask)
    groups = [sorted(group, key=lambda c: victim_order(c.gang, ask.queue)) for group in (advantage, others, mine)]
    candidates = [c for group in groups for c in group if c.gang.evicting]
    candidates += [c for group in groups for c in group if not c.gang.evicting]
    under = all(node.usage.get(cell, 0) < node.quota(cell).nominal for cell in ask.contested)
    if not ask.borrows:
        searches = [False]
    elif (not advantage and not others) or (not rules.borrow and not under):
        searches = [True]
    elif not rules.borrow and not advantage:
        searches = [False, True]
    else:
        searches = [True, False]
    by_uid = {c.gang.uid: c for c in candidates}
    for borrowing in searches:
        one = _Search(world, ask, by_uid, borrowing)
        gangs = [c.gang for c in candidates]
        victims = cheapest(world, ask, gangs, peers=one.last_back, search=one.dearest_back, borrowing=borrowing)
        if victims:
            return victims
    return []


@dataclass(frozen=True, slots=True)
class _Search:
    """Takes gangs, or pieces of them, in the given order until the newcomer fits, and gives back who is not needed.

    If disruption budgets were spent on some who are of no use, so that nothing is found, all are taken, and it is
    enough that budgets allow those who are needed.
    """

    world: Field
    ask: Ask
    candidates: Mapping[str, _Candidate]  # by uid
    borrowing: bool

    def last_back(self, order: Sequence[Running]) -> list[Victim]:
        """Return the victims, or none; the last are given back first."""
        return self._run(order, lambda taken: taken[-2::-1], most=1)

    def dearest_back(self, order: Sequence[Running]) -> list[Victim]:
        """Return the victims, or none; the dearest are given back first."""
        return self._run(order, self.world.dearest_first, most=len(order))

    def _run(
        self, order: Sequence[Running], back: Callable[[list[Victim]], list[Victim]], *, most: int
    ) -> list[Victim]:
        for heed in (True, False):
            trial = Trial(self.world, self.ask, borrowing=self.borrowing, heed=heed)
            try:
                if self._take(trial, order, most):
                    return trial.give_back(back(list(trial.taken.values())))
            finally:
                trial.close()
            if not trial.passed_over:
                break
        return []

    def _take(self, trial: Trial, order: Sequence[Running], most: int) -> bool:
        """Take gangs until it fits, and tell whether it does; ``most``: how many before that is looked at again."""
        untried, step = 0, 1
        for gang in order:
            candidate = self.candidates[(gang.of or gang).uid]
            if not self._still_allowed(candidate) or not trial.within_budgets(gang):
                continue
            trial.take(Victim(gang, candidate.cause))
            untried += 1
            if untried < step or not trial.fits_quota():
                continue
            if self.world.beside.fits():
                return True
            # Who is taken too many is given back, so that it need not be looked at after each of them.
            untried, step = 0, min(most, 2 * step)
        return untried > 0 and trial.fits()

    def _still_allowed(self, candidate: _Candidate) -> bool:
        """Tell whether the candidate may be taken now that others are gone."""
        if candidate.gang.queue == self.ask.queue:
            return True
        if self.borrowing and candidate.only_at_home:
            return False
        node: Node | None = self.world.tree.nodes[candidate.gang.queue]
        while node is not None and node is not candidate.meet:
            if node.within(self.ask.contested):
                return False
            node = node.parent
        return True


def _others(world: Field, ask: Ask) -> tuple[list[_Candidate], list[_Candidate]]:
    """Return candidates of other queues: those over whom the newcomer's subtree has the older right, and the rest."""
    advantage: list[_Candidate] = []
    rest: list[_Candidate] = []
    home, rules = world.tree.nodes[ask.queue], world.rules[ask.queue]
    if rules.reclaim is Reclaim.NEVER:
        return advantage, rest
    has_right, left = _holds(home, ask.usage)
    seen: Node = home
    for subtree in home.ancestors():
        for node in _borrowers(subtree, seen, ask.contested):
            for gang in world.candidates(node.name, ask, rules.reclaim):
                if has_right:
                    advantage.append(_Candidate(gang, Cause.RECLAIM, meet=subtree))
                elif not _may_borrow_over(rules, gang, ask):
                    rest.append(_Candidate(gang, Cause.RECLAIM, only_at_home=True, meet=subtree))
                else:
                    rest.append(_Candidate(gang, Cause.RECLAIM_WHILE_BORROWING, meet=subtree))
        holds, left = _holds(subtree, left)
        has_right = has_right or holds
        seen = subtree
    return advantage, rest


def _borrowers(top: Node, seen: Node, contested: frozenset[Cell]) -> Iterator[Node]:
    """Yield the nodes below ``top``, and not below ``seen``, that use more than their own, as do all above them."""
    for child in top.children:
        if child is not seen and not child.within(contested):
            yield child
            yield from _borrowers(child, seen, contested)


def _holds(node: Node, amounts: Amounts) -> tuple[bool, dict[Cell, int]]:
    """Tell whether the subtree's own quota holds that much more, and return what has to come from above."""
    fits = not any(node.borrows_with(cell, amount) for cell, amount in amounts.items())
    return fits, {cell: max(0, amount - node.kept_free(cell)) for cell, amount in amounts.items()}


def _may_borrow_over(rules: Preemption, gang: Running, ask: Ask) -> bool:
    limit = rules.borrow_max_priority
    return rules.borrow and gang.priority < ask.priority and (limit is None or gang.priority <= limit)

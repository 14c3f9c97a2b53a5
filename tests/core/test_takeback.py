"""Who goes back to its queue for nobody's sake, counted anew by hand."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from queuectl.core.cycle import plan
from queuectl.core.preemption import Running
from queuectl.core.snapshot import Snapshot
from queuectl.core.takeback import evictions, given_up
from queuectl.core.tree import Node, Tree
from queuectl.model.objects import Queue
from queuectl.model.plan import Placement, Portion, TakeBack
from queuectl.model.policy import OverQuota, Preemption, Quota, StopPolicy, VictimChoice, Within
from queuectl.model.reasons import Reason
from tests.support.builders import GPU, flavor, gang, node, role, snapshot

CELL = ("any", GPU)
CPU = ("any", "cpu")
NOW = 1000.0
LIMIT = st.one_of(st.none(), st.integers(0, 4))


def one(name: str, nominal: int, parent: str = "", **given: Any) -> Queue:
    """Return a queue that takes back."""
    return Queue(name, parent, quotas={CELL: Quota(nominal)}, **{"over_quota": OverQuota.TAKE_BACK, **given})


def runs(uid: str, uses: int, queue: str = "q", **given: Any) -> Running:
    settings: dict[str, Any] = {"priority": 0, "submitted_at": 0.0, "admitted_at": 0.0, "usage": {CELL: uses}} | given
    return Running(uid, queue, **settings)


def view(
    queues: list[Queue], running: list[Running], claims: list[Running] | None = None, broken: str = ""
) -> Snapshot:
    tree = Tree.of(queues)
    by_queue: dict[str, list[Running]] = {}
    for each in running:
        by_queue.setdefault(each.queue, []).append(each)
        tree.add(each.queue, each.usage)
    later = tree.copy()
    for claim in claims or ():
        later.add(claim.queue, claim.usage)
        by_queue.setdefault(claim.queue, []).append(replace(claim, evicting=True, instead=()))
    empty = snapshot([], queues=queues, broken={broken: "no parent"} if broken else {})
    return replace(empty, tree=tree, later=later, running=by_queue)


def elastic(uid: str, uses: int, spare: int, queue: str = "q", **given: Any) -> Running:
    """Return a gang of pods with one GPU each that can do without some of them."""
    gang = runs(uid, uses, queue, pods=uses, gpus=uses, placements=placed(uses), **given)
    return replace(gang, elastic=Portion(placed(spare), {CELL: spare})) if spare else gang


def placed(pods: int) -> tuple[Placement, ...]:
    return (Placement("worker", "any", "n", pods, ((GPU, 1),)),)


def given_back(queues: list[Queue], *running: Running, **given: Any) -> dict[str, int]:
    """Return how many pods each gives up, 0 for who goes whole."""
    found = evictions(view(queues, list(running), **given), NOW)
    return {uid: back.part.pods if back.part else 0 for uid, back in found.items()}


def gone(queues: list[Queue], *running: Running, **given: Any) -> set[str]:
    return set(evictions(view(queues, list(running), **given), NOW))


def test_the_reason_has_the_numbers() -> None:
    [(uid, cause)] = plan(view([one("q", 4)], [runs("a", 3), runs("b", 3, admitted_at=1.0)]), 0.0).evictions
    assert uid == "b"
    assert str(cause.why) == (
        "The quota no longer covers it: in queue q, 6 nvidia.com/gpu in flavor any were in use, and 4 may be."
    )


def test_nobody_goes_from_a_queue_that_keeps() -> None:
    assert gone([one("q", 0, over_quota=OverQuota.KEEP)], runs("a", 3)) == set()


def test_who_borrows_within_bounds_stays() -> None:
    assert gone([one("p", 4), one("q", 2, "p")], runs("a", 6)) == set()


def test_who_uses_its_own_stays_whoever_else_keeps_too_much() -> None:
    queues = [one("p", 0), one("q", 2, "p"), one("r", 2, "p", over_quota=OverQuota.KEEP)]
    assert gone(queues, runs("a", 2), runs("b", 9, "r")) == set()


def test_a_borrowing_limit_that_was_cut_takes_back_although_the_cohort_has_room() -> None:
    q = replace(one("q", 2, "p"), quotas={CELL: Quota(2, borrowing_limit=1)})
    assert gone([one("p", 9), q], runs("a", 3), runs("b", 1, admitted_at=1.0)) == {"b"}


def test_the_lowest_priority_goes_first() -> None:
    assert gone([one("q", 2)], runs("high", 2, priority=1, admitted_at=9.0), runs("low", 2)) == {"low"}


def test_who_could_take_the_room_back_does_not_go() -> None:
    """Where newer ones of equal priority are preempted, the newest goes, not the one that was admitted last."""
    newest = Preemption(within_queue=Within.LOWER_OR_NEWER_EQUAL_PRIORITY)
    gangs = runs("old", 2, submitted_at=1.0, admitted_at=9.0), runs("new", 2, submitted_at=2.0, admitted_at=3.0)
    assert gone([one("q", 2, preemption=newest)], *gangs) == {"new"}
    assert gone([one("q", 2)], *gangs) == {"old"}


def test_the_least_work_lost_goes_first_unless_the_queue_has_it_otherwise() -> None:
    dear = runs("dear", 2, admitted_at=9.0, gpus=2, ready_at=NOW - 900)
    saved = runs("saved", 2, gpus=2, ready_at=NOW - 5000, saved_at=NOW - 60)
    assert gone([one("q", 2)], dear, saved) == {"saved"}
    latest = Preemption(victims=VictimChoice.LOWEST_PRIORITY)
    assert gone([one("q", 2, preemption=latest)], dear, saved) == {"dear"}


def test_an_elastic_gang_gives_up_what_is_needed_and_no_more() -> None:
    assert given_back([one("q", 6)], elastic("e", 8, 5)) == {"e": 2}
    [(_, back)] = evictions(view([one("q", 6)], [elastic("e", 8, 5)]), NOW).items()
    assert str(back.why) == (
        "Gave up 2 of 8 pods, which the quota no longer covers: in queue q, 8 nvidia.com/gpu in flavor any were in use,"
        " and 6 may be. The other 6 run on."
    )


def test_nobody_goes_whole_for_what_others_can_spare() -> None:
    """Not even those of lower priority: of who gives up pods, no work is lost."""
    low, high = runs("low", 2), elastic("high", 4, 2, priority=5)
    assert given_back([one("q", 4)], low, high) == {"high": 2}
    assert given_back([one("q", 5)], elastic("low", 4, 3), high) == {"low": 3}
    assert given_back([one("q", 4)], elastic("low", 4, 3), high) == {"low": 3, "high": 1}


def test_an_elastic_gang_goes_whole_when_its_part_is_not_enough() -> None:
    assert given_back([one("q", 1)], elastic("e", 8, 5)) == {"e": 0}
    # Then others keep what they could have given up.
    assert given_back([one("q", 4)], elastic("e", 4, 1, priority=1), runs("other", 5)) == {"other": 0}


def test_in_the_order_of_the_peers_gangs_go_whole() -> None:
    latest = Preemption(victims=VictimChoice.LOWEST_PRIORITY)
    assert given_back([one("q", 6, preemption=latest)], elastic("e", 8, 5)) == {"e": 0}


def test_a_part_counts_against_disruption_budgets() -> None:
    e = replace(elastic("e", 8, 5), covered=(("budget", 8),), elastic_covered=(("budget", 5),))
    for allowed, want in ((4, {}), (5, {"e": 2}), (8, {"e": 2})):
        seen = replace(view([one("q", 6)], [e]), budgets={"budget": allowed})
        assert {uid: back.part.pods for uid, back in evictions(seen, NOW).items() if back.part} == want


def test_a_drained_queue_takes_elastic_gangs_whole() -> None:
    assert given_back([one("q", 6, stop=StopPolicy.HOLD_AND_DRAIN)], elastic("e", 8, 5)) == {"e": 0}


def test_who_is_not_preemptible_stays_and_is_drained_all_the_same() -> None:
    fixed, other = runs("fixed", 3, preemptible=False), runs("other", 1)
    assert gone([one("q", 1)], fixed, other) == {"other"}
    assert gone([one("q", 1, stop=StopPolicy.HOLD_AND_DRAIN)], fixed, other) == {"fixed", "other"}


def test_disruption_budgets_are_kept_to() -> None:
    gangs = [runs(uid, 1, covered=(("budget", 2),), admitted_at=float(at)) for at, uid in enumerate("abc")]
    free = runs("free", 1, admitted_at=-1.0)
    for stop in (StopPolicy.NONE, StopPolicy.HOLD_AND_DRAIN):
        seen = replace(view([one("q", 1, stop=stop)], [*gangs, free]), budgets={"budget": 3})
        told = evictions(seen, NOW)
        assert len(told.keys() & {"a", "b", "c"}) == 1
        assert "free" in told
        # What they spend is not there for preemptors either.
        assert seen.leaving(told).budgets == {"budget": 1}
        assert set(evictions(seen.leaving(told), NOW)) == set()


def test_the_queue_above_gives_back_what_is_not_its_own() -> None:
    """Two run in the parent itself, on what its child owns and does not use, until the child's quota is cut."""
    queues = [one("p", 2), one("q", 2, "p")]
    assert gone(queues, runs("p0", 2, "p"), runs("p1", 2, "p", admitted_at=1.0), runs("q0", 2)) == {"p1"}


def test_those_who_leave_count_as_gone() -> None:
    leaving = runs("leaving", 4, evicting=True)
    assert gone([one("q", 4)], leaving, runs("a", 4)) == set()


def test_a_promise_that_is_lost_goes_before_those_who_run() -> None:
    assert gone([one("q", 4)], runs("a", 4), claims=[runs("claim", 2)]) == set()


def test_nobody_goes_while_the_parents_are_broken() -> None:
    """A parent that is made anew is away for a moment."""
    assert gone([one("q", 0, "away")], runs("a", 4), broken="q") == set()


def test_a_drained_queue_sends_back_also_what_is_promised() -> None:
    queues = [one("p", 9, stop=StopPolicy.HOLD_AND_DRAIN), one("q", 0, "p", stop=StopPolicy.HOLD), one("other", 9)]
    gangs = runs("a", 1), runs("b", 1, "p"), runs("c", 1, "other"), runs("d", 1, evicting=True)
    assert gone(queues, *gangs, claims=[runs("claim", 1)]) == {"a", "b", "claim"}


def test_a_stopped_queue_admits_nothing_and_says_who_is_stopped() -> None:
    queues = [one("p", 9, stop=StopPolicy.HOLD), one("q", 9, "p")]
    decided = plan(snapshot([gang("a", role(gpu=1))], nodes=[node("n")], queues=queues, flavors=[flavor()]), 0.0)
    assert not decided.admissions
    assert decided.waits["a"].reason is Reason.QUEUE_STOPPED
    assert decided.waits["a"].facts == {"queue": "q", "stopped": "p", "policy": "Hold"}


@st.composite
def edits(draw: st.DrawFn) -> Snapshot:
    """Return a tree whose quotas may be less than what runs."""
    queues = []
    for name, parents in (("r", [""]), ("m", ["", "r"]), ("a", ["m"]), ("b", ["m", "r"]), ("c", ["r", ""])):
        quotas = {
            cell: Quota(draw(st.integers(0, 6)), draw(LIMIT), draw(LIMIT))
            for cell in draw(st.sampled_from([(), (CELL,), (CELL, CPU)]))
        }
        queues.append(
            Queue(
                name, draw(st.sampled_from(parents)), quotas=quotas,
                over_quota=draw(st.sampled_from([OverQuota.TAKE_BACK] * 3 + [OverQuota.KEEP])),
                stop=draw(st.sampled_from([StopPolicy.NONE] * 9 + [StopPolicy.HOLD_AND_DRAIN])),
            )
        )  # fmt: skip
    gangs = [
        runs(
            f"g{i}", 0, draw(st.sampled_from([queue.name for queue in queues])), priority=draw(st.integers(0, 1)),
            admitted_at=float(i), preemptible=draw(st.sampled_from([True] * 6 + [False])), evicting=draw(st.sampled_from([False] * 6 + [True])),
            usage={CELL: draw(st.integers(1, 4)), **draw(st.sampled_from([{}, {CPU: 2}]))},
        )
        for i in range(draw(st.integers(0, 12)))
    ]  # fmt: skip
    if draw(st.booleans()):
        gangs = [
            elastic(g.uid, g.usage[CELL], draw(st.integers(0, g.usage[CELL] - 1)), g.queue, priority=g.priority)
            for g in gangs
        ]
    return view(queues, gangs)


def staying(snapshot: Snapshot, back: Mapping[str, TakeBack]) -> list[Running]:
    """Return who stays, with what is left of it."""
    result = []
    for one in (one for many in snapshot.running.values() for one in many if not one.evicting):
        part = back[one.uid].part if one.uid in back else Portion(())
        if part is not None:
            result.append(replace(one, usage=Portion((), one.usage).without(part).quota))
    return result


def used(snapshot: Snapshot, back: Mapping[str, TakeBack]) -> Tree:
    """Count anew who stays."""
    tree = Tree.of(snapshot.queues.values())
    for one in staying(snapshot, back):
        tree.add(one.queue, one.usage)
    return tree


def excess(tree: Tree) -> Counter[tuple[str, tuple[str, str]]]:
    """Return by how much more is used in each queue than may be; the bounds in words of the concepts."""
    result: Counter[tuple[str, tuple[str, str]]] = Counter()
    for name, at in tree.nodes.items():
        for cell, amount in at.usage.items():
            limit, owned = at.quota(cell).borrowing_limit, at.subtree.get(cell, 0)
            if at.parent is None or limit is not None:
                result[name, cell] = max(0, amount - owned - (limit or 0 if at.parent else 0))
    return +result


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(edits())
def test_none_is_needless_and_nothing_more_can_be_done(snapshot: Snapshot) -> None:
    causes = evictions(snapshot, NOW)
    gangs = {one.uid: one for many in snapshot.running.values() for one in many}
    drained = {uid: back for uid, back in causes.items() if back.why.reason is Reason.QUEUE_DRAINED}
    assert not any(gangs[uid].evicting for uid in causes), "nobody is told to go twice"
    rest, before = excess(used(snapshot, causes)), used(snapshot, drained)
    for uid in causes.keys() - drained.keys():
        queue = snapshot.queues[gangs[uid].queue]
        assert queue.over_quota is OverQuota.TAKE_BACK
        assert gangs[uid].preemptible
        at = before.nodes[queue.name]
        assert any(at.direct(cell) > at.quota(cell).nominal for cell in gangs[uid].usage), f"{uid} uses only its own"
        for less in fewer(causes, uid):
            back = excess(used(snapshot, less))
            assert any(back[key] > rest[key] for key in back), f"{uid} went needlessly"
    # What is still exceeded is held by those who keep what they have, or use no more than their own.
    tree = used(snapshot, causes)
    for name, cell in rest:
        for one in staying(snapshot, causes):
            if one.usage.get(cell) and takes_back(snapshot, one):
                assert not is_charged(tree.nodes[one.queue], tree.nodes[name], cell), f"{one.uid} could go for {name}"


def fewer(causes: Mapping[str, TakeBack], uid: str) -> list[dict[str, TakeBack]]:
    """Return the decision without a gang, and with one pod less of it where it gives up several."""
    without = {other: back for other, back in causes.items() if other != uid}
    part = causes[uid].part
    if part is None or part.pods == 1:
        return [without]
    less = Portion(placed(part.pods - 1), {CELL: part.pods - 1})
    return [without, without | {uid: replace(causes[uid], part=less)}]


def takes_back(snapshot: Snapshot, one: Running) -> bool:
    return one.preemptible and snapshot.queues[one.queue].over_quota is OverQuota.TAKE_BACK


def is_charged(node: Node, top: Node, cell: tuple[str, str]) -> bool:
    """Tell whether the gangs of a queue use more than their own, all the way up to ``top``."""
    if node.direct(cell) <= node.quota(cell).nominal:
        return False
    while node is not top:
        if not node.borrows_with(cell) or node.parent is None:
            return False
        node = node.parent
    return True


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(edits())
def test_it_is_done_at_once(snapshot: Snapshot) -> None:
    """With those who were told to go on their way out, and also without them, nobody else goes."""
    told = evictions(snapshot, NOW)
    assert evictions(snapshot.leaving(told), NOW) == {}
    assert evictions(view(list(snapshot.queues.values()), staying(snapshot, told)), NOW) == {}


def test_of_promises_that_no_longer_fit_together_the_lowest_are_given_up() -> None:
    """What is left covers the largest as well, once the one of the lowest priority is out of its way."""
    claims = [runs("high", 2, priority=3), runs("middle", 5, priority=2), runs("low", 1, priority=1)]

    def lost(nominal: int) -> set[str]:
        return given_up(view([one("q", nominal)], [], claims).later, claims)

    assert [sorted(lost(nominal)) for nominal in (8, 7, 6, 3, 2, 0)] == [
        [], ["low"], ["middle"], ["middle"], ["low", "middle"], ["high", "low", "middle"],
    ]  # fmt: skip

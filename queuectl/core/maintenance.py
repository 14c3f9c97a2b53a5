"""Maintenance of nodes, step by step: from what is wanted and what is seen to how far each node has come. Pure.

    Pending ──its turn──▶ Draining ──no job is left──▶ Safe ──the work is done──▶ Verifying ──the test passes──▶ Released
                                                        └────────▶ Failed ◀────────┘

What is to be done follows from what the status says, so whoever reads it after a crash does the same.

The labels of the GPU Operator's driver upgrade are those of NVIDIA's k8s-operator-libs, pkg/upgrade/consts.go. A node
with the skip label stays in ``upgrade-required``; one that is cordoned goes on from there whatever limits the operator has.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from queuectl.core.nominate import clock
from queuectl.model.maintenance import (
    CLOSED,
    MAX_NODES,
    OVER,
    Drain,
    Maintenance,
    NodePhase,
    NodeState,
    NodeTest,
    NodeWork,
    Phase,
    Progress,
    TestPhase,
    There,
    Wanted,
)
from queuectl.model.objects import Node
from queuectl.model.reasons import Reason, Why, counted, listed, why

UPGRADE_STATE = "nvidia.com/gpu-driver-upgrade-state"
UPGRADE_SKIP = "nvidia.com/gpu-driver-upgrade.skip"
_UPGRADED = {"", "upgrade-done"}  # or nothing is known of it
_WAITS_FOR_JOBS = {"cordon-required", "wait-for-jobs-required", "node-maintenance-required"}
_BROKEN = "upgrade-failed"
_REQUIRED = "upgrade-required"
NAMED = 5  # jobs or pods in a message
_SAID = why(Reason.NODE_RELEASED, cause="its work was said to be done")
_SAID_BEFORE = why(Reason.NODE_SKIPPED, cause="its work was said to be done before its turn came")
_UPGRADE = why(Reason.NODE_RELEASED, cause="its driver was upgraded")
_LATE = why(Reason.NODE_RELEASED, cause="the window is over")


def upgrade_state(node: Node) -> str:
    """Return how far the GPU Operator's driver upgrade of a node has come, in its words; empty: it doesn't say."""
    return node.labels.get(UPGRADE_STATE, "")


def is_being_upgraded(node: Node) -> bool:
    """Tell whether a driver upgrade has come to a node and is not over."""
    return upgrade_state(node) not in _UPGRADED | {_REQUIRED}


def waits_for_jobs(node: Node) -> bool:
    """Tell whether a driver upgrade that has come to a node removes nobody yet."""
    return upgrade_state(node) in _WAITS_FOR_JOBS


def selected(maintenance: Maintenance, nodes: Mapping[str, Node]) -> list[str]:
    """Return the nodes that a maintenance names or selects by labels, in order, those that don't exist left out."""
    if maintenance.nodes:
        return [name for name in maintenance.nodes if name in nodes]
    return sorted(
        name
        for name, node in nodes.items()
        if maintenance.selector and all(node.labels.get(key) == value for key, value in maintenance.selector)
    )


def taken_at(maintenances: Iterable[Maintenance], nodes: Mapping[str, Node]) -> dict[str, float]:
    """Return when windows take which nodes, Unix seconds: nobody should be there then. Also those that have begun."""
    taken: dict[str, float] = {}
    for one in maintenances:
        if one.phase is Phase.FINISHED or one.start is None:
            continue
        over = {state.name for state in one.states if state.phase in OVER}
        for name in selected(one, nodes):
            if name not in over:
                taken[name] = min(one.start, taken.get(name, one.start))
    return taken


def owners(maintenances: Iterable[Maintenance], nodes: Mapping[str, Node], now: float) -> dict[str, str]:
    """Return whose each node is: of the maintenance that has begun with it, else of the oldest that is not done with it.

    One that waits for its window, or has halted, leaves nodes with which it has not begun to others; its turn comes again.
    Nobody else begins with a node while the word that the work there is done is still on it, which would be taken for theirs.
    """
    known = {one.name: one for one in maintenances}
    found = {
        name: node.mark.maintenance
        for name, node in nodes.items()
        if node.mark.done and _is_done_with(known.get(node.mark.maintenance), name)
    }
    open_ones = [one for one in known.values() if one.phase is not Phase.FINISHED]
    open_ones.sort(key=lambda one: (one.created_at, one.name))
    for one in open_ones:
        for state in one.states:
            if state.phase in CLOSED:
                found.setdefault(state.name, one.name)
    for one in sorted(open_ones, key=lambda one: one.phase is Phase.HALTED or (one.start or 0.0) > now):
        over = {state.name for state in one.states if state.phase in OVER}
        for name in selected(one, nodes):
            if name not in over:
                found.setdefault(name, one.name)
    return found


def _is_done_with(maintenance: Maintenance | None, node: str) -> bool:
    states = maintenance.states if maintenance else ()
    return any(state.name == node and state.phase in OVER for state in states)


def most(maintenance: Maintenance, nodes: int) -> int:
    """Return how many of its nodes may be under maintenance at a time, at least 1; percents are rounded up."""
    given = maintenance.max_unavailable
    share = math.ceil(nodes * int(given.removesuffix("%")) / 100) if isinstance(given, str) else given
    return max(1, share)


def progress(
    maintenance: Maintenance,
    there: Mapping[str, There],
    owner: Mapping[str, str],
    tests: Mapping[str, NodeTest],
    now: float,
) -> Progress:
    """Return how far a maintenance has come now. ``there``: all nodes by name; ``tests``: its test pods by node."""
    if maintenance.phase is Phase.FINISHED:
        return _summed_up(maintenance, list(maintenance.states), now)
    names = dict.fromkeys(selected(maintenance, {name: one.node for name, one in there.items()}))
    known = {state.name for state in maintenance.states}
    if not known and len(names) > MAX_NODES:
        problem = f"{len(names)} nodes have these labels, and at most {MAX_NODES} go into one; make several of it"
        return Progress(Phase.WAITING, (), why(Reason.MAINTENANCE_WAITS, problem=problem))
    chosen = names.keys() | set(maintenance.nodes)
    kept = [state for state in maintenance.states if state.phase is not NodePhase.PENDING or state.name in chosen]
    new = [NodeState(name, NodePhase.PENDING, now) for name in names if name not in known][: MAX_NODES - len(kept)]
    cause = why(Reason.NODE_SKIPPED, cause="there is no such node")
    missing = [name for name in maintenance.nodes if name not in names and name not in known]
    kept += [_to(NodeState(name, NodePhase.SKIPPED, now), NodePhase.SKIPPED, cause, now) for name in missing]
    states = [_moved_on(maintenance, state, there.get(state.name), tests.get(state.name), now) for state in kept + new]
    return _summed_up(maintenance, _begun(maintenance, states, there, owner, now), now)


def _moved_on(
    maintenance: Maintenance, state: NodeState, there: There | None, test: NodeTest | None, now: float
) -> NodeState:
    """Return a node's state after what has happened to it; that its turn comes is for others to say."""
    if state.phase in OVER:
        return state
    if there is None:
        return _to(state, NodePhase.SKIPPED, why(Reason.NODE_SKIPPED, cause="it has been deleted"), now)
    match state.phase:
        case NodePhase.PENDING:
            return _pending(maintenance, state, there, now)
        case NodePhase.VERIFYING:
            return _tested(maintenance, state, test, now)
        case NodePhase.FAILED:
            return _failed(maintenance, state, there, now)
    return _worked_on(maintenance, state, there, now) or _emptied(maintenance, state, there, now)


def _pending(maintenance: Maintenance, state: NodeState, there: There, now: float) -> NodeState:
    mark = there.node.mark
    if mark.done and mark.maintenance in {"", maintenance.name}:  # else it is said of the maintenance that has the node
        return _to(state, NodePhase.SKIPPED, _SAID_BEFORE, now)
    if _is_over(maintenance, now):
        return _to(state, NodePhase.SKIPPED, why(Reason.NODE_SKIPPED, cause="the window was over before"), now)
    return state


def _failed(maintenance: Maintenance, state: NodeState, there: There, now: float) -> NodeState:
    if there.node.mark.done:
        return _to(state, NodePhase.RELEASED, _SAID, now)
    if state.reason == Reason.NODE_UPGRADE_FAILED.code and upgrade_state(there.node) in _UPGRADED:
        return _verified(maintenance, state, _UPGRADE, now)
    return state


def _worked_on(maintenance: Maintenance, state: NodeState, there: There, now: float) -> NodeState | None:
    """Return the state of a node whose work is over, one way or the other; None while it is not."""
    drives, upgrade = maintenance.work is NodeWork.DRIVER_UPGRADE, upgrade_state(there.node)
    if there.node.mark.done:
        return _verified(maintenance, state, _SAID, now)
    if drives and upgrade == _BROKEN:
        return _to(state, NodePhase.FAILED, why(Reason.NODE_UPGRADE_FAILED, node=there.node.name), now)
    safe = state.phase is NodePhase.SAFE
    if drives and safe and upgrade in _UPGRADED:
        return _verified(maintenance, state, _UPGRADE, now)
    if _is_over(maintenance, now) and not (drives and is_being_upgraded(there.node)):
        if safe and not drives:
            return _verified(maintenance, state, _LATE, now)
        return _to(state, NodePhase.RELEASED, _LATE, now)
    return None


def _emptied(maintenance: Maintenance, state: NodeState, there: There, now: float) -> NodeState:
    if state.phase is NodePhase.SAFE or not there.jobs:
        return _to(state, NodePhase.SAFE, _safe(there), now)
    return _to(state, NodePhase.DRAINING, _draining(maintenance, there), now)


def _is_over(maintenance: Maintenance, now: float) -> bool:
    return maintenance.end is not None and now >= maintenance.end


def _verified(maintenance: Maintenance, state: NodeState, cause: Why, now: float) -> NodeState:
    if maintenance.test is None:
        return _to(state, NodePhase.RELEASED, cause, now)
    return _to(state, NodePhase.VERIFYING, why(Reason.NODE_VERIFYING, seconds=maintenance.test_seconds), now)


def _tested(maintenance: Maintenance, state: NodeState, test: NodeTest | None, now: float) -> NodeState:
    if test is not None and test.phase is TestPhase.SUCCEEDED:
        return _to(state, NodePhase.RELEASED, why(Reason.NODE_RELEASED, cause=f"test pod {test.name} succeeded"), now)
    problem = test.problem or "it failed" if test is not None and test.phase is TestPhase.FAILED else ""
    if not problem and now >= state.since + maintenance.test_seconds:
        known = f": {test.problem}" if test is not None and test.problem else ""
        problem = f"it had not succeeded within {maintenance.test_seconds} s{known}"
    if not problem:
        return state
    name = f"{test.namespace}/{test.name}" if test else "(none was created)"
    return _to(state, NodePhase.FAILED, why(Reason.NODE_TEST_FAILED, pod=name, problem=problem), now)


def _begun(
    maintenance: Maintenance,
    states: Sequence[NodeState],
    there: Mapping[str, There],
    owner: Mapping[str, str],
    now: float,
) -> list[NodeState]:
    """Have it be the turn of as many nodes as may be under maintenance at a time; say of the others why they wait."""
    allowed = _allowed(maintenance, states)
    waits: dict[str, str] = {}
    for state in states:
        if state.phase is NodePhase.PENDING:
            waits[state.name] = _why_it_waits(maintenance, there[state.name].node, owner, now)
    order = next_ones(states, there, {name for name, problem in waits.items() if problem})
    turn = set(order[:allowed])
    testing = _canaries(states) < maintenance.canary
    failed = [state.name for state in states if state.phase is NodePhase.FAILED]
    result = []
    for state in states:
        if state.phase is not NodePhase.PENDING:
            result.append(state)
        elif state.name in turn:
            cause = _draining(maintenance, there[state.name])
            result.append(replace(_to(state, NodePhase.DRAINING, cause, now), canary=testing))
        else:
            problem = waits[state.name] or _why_not_yet(maintenance, states, failed, turn)
            result.append(_to(state, NodePhase.PENDING, why(Reason.NODE_WAITS, problem=problem), now))
    return result


def _allowed(maintenance: Maintenance, states: Sequence[NodeState]) -> int:
    """Return how many further nodes may be begun: none after a failure, and of canaries no more than are wanted."""
    if any(state.phase is NodePhase.FAILED for state in states):
        return 0
    free = most(maintenance, len(states)) - sum(state.phase in CLOSED for state in states)
    missing = maintenance.canary - _canaries(states)
    if missing > 0:
        return min(free, missing)
    tested = all(state.phase in OVER for state in states if state.canary)
    return max(0, free) if tested else 0


def _canaries(states: Iterable[NodeState]) -> int:
    return sum(state.canary and state.phase is not NodePhase.SKIPPED for state in states)


def _why_it_waits(maintenance: Maintenance, node: Node, owner: Mapping[str, str], now: float) -> str:
    """Say what keeps a node's turn from coming, whatever the others do; empty: nothing."""
    if maintenance.start is not None and now < maintenance.start:
        return f"the window begins at {clock(maintenance.start)}"
    if owner.get(node.name, maintenance.name) != maintenance.name:
        return f"maintenance {owner[node.name]} is not done with it"
    if maintenance.work is NodeWork.DRIVER_UPGRADE and upgrade_state(node) in _UPGRADED:
        return "the GPU Operator does not ask for an upgrade of its driver"
    return ""


def _why_not_yet(maintenance: Maintenance, states: Sequence[NodeState], failed: Sequence[str], turn: set[str]) -> str:
    if failed:
        return f"it goes on once {listed(failed)}, which failed, is said to be done"
    canaries = [state.name for state in states if state.canary and state.phase not in OVER]
    if canaries or _canaries(states) < maintenance.canary:
        return f"{listed(canaries or sorted(turn)) or 'another'} goes first"
    return f"at most {counted(most(maintenance, len(states)), 'node')} at a time"


def next_ones(states: Iterable[NodeState], there: Mapping[str, There], but: Collection[str] = ()) -> list[str]:
    """Return the nodes whose turn has not come, in the order in which it does: so that few jobs have to go.

    First those that nobody has to leave any more, then job by job all of its nodes, the jobs with the fewest nodes first.
    """
    waiting = [state.name for state in states if state.phase is NodePhase.PENDING and state.name not in but]
    stay = {name: frozenset(there[name].jobs.keys() - there[name].leaving) for name in waiting}
    size = Counter(job for jobs in stay.values() for job in jobs)

    def cost(name: str) -> tuple[int, int, list[str]]:
        return len(stay[name]), sum(size[job] for job in stay[name]), sorted(stay[name])

    return sorted(waiting, key=cost)  # equal ones stay in the order of the spec


def closed(
    maintenance: Maintenance, there: Mapping[str, There], owner: Mapping[str, str], now: float
) -> dict[str, str]:
    """Return onto which nodes nobody new goes, and why: those under maintenance, and as many as follow them next."""
    if maintenance.phase is Phase.FINISHED:
        return {}
    words = f": {maintenance.why}" if maintenance.why else ""
    found = {
        state.name: f"it is under maintenance {maintenance.name}{words}"
        for state in maintenance.states
        if state.phase in CLOSED
    }
    if maintenance.phase is Phase.ACTIVE:
        pending = [state for state in maintenance.states if state.phase is NodePhase.PENDING and state.name in there]
        waits = {s.name for s in pending if _why_it_waits(maintenance, there[s.name].node, owner, now)}
        order = next_ones(pending, there, waits)[: most(maintenance, len(maintenance.states))]
        found |= dict.fromkeys(order, f"its turn in maintenance {maintenance.name} comes next{words}")
    return found


def has_to_leave(maintenance: Maintenance, there: There) -> Why | None:
    """Return why the jobs on a node under maintenance have to leave it; None: they may stay, or can't be told to."""
    if maintenance.drain is Drain.WAIT or there.stuck:
        return None
    problem = f"{maintenance.name}{f', {maintenance.why}' if maintenance.why else ''}"
    return why(Reason.NODE_MAINTENANCE, node=there.node.name, problem=problem)


def for_upgrade(there: There) -> Why | None:
    """Return why the jobs on a node have to leave it whose driver the GPU Operator upgrades by itself.

    Those that can't be told to run on until the operator removes them.
    """
    if there.stuck and waits_for_jobs(there.node):
        return None
    return why(Reason.NODE_MAINTENANCE, node=there.node.name, problem="the GPU Operator upgrades its driver")


def wanted(maintenance: Maintenance | None, state: NodeState | None) -> Wanted:
    """Return how a node is to be; of none, that nothing of what was noted on it is left.

    One that was left out stays held back from the GPU Operator until the maintenance is deleted: else it would be upgraded
    outside the window.
    """
    if maintenance is None or state is None:
        return Wanted()
    drives = maintenance.work is NodeWork.DRIVER_UPGRADE
    held = drives and state.phase in {NodePhase.PENDING, NodePhase.DRAINING, NodePhase.SKIPPED}
    taken = state.phase in OVER | {NodePhase.VERIFYING}
    over = state.phase in OVER
    return Wanted(maintenance.name, state.phase in CLOSED, held if drives or over else None, done_is_taken=taken)


def is_as_wanted(node: Node, want: Wanted) -> bool:
    """Tell whether nothing need be written to a node."""
    noted, skipped = node.mark, node.labels.get(UPGRADE_SKIP) == "true"
    if want.cordoned and (not node.unschedulable or noted.maintenance != want.maintenance):
        return False
    undone = noted.cordoned and not want.cordoned
    hold = want.held is not None and (not skipped if want.held else noted.held)
    idle = noted.maintenance and not want.cordoned and not noted.cordoned and not noted.held
    return not (undone or hold or idle or (want.done_is_taken and noted.done))


def to_test(maintenance: Maintenance, states: Iterable[NodeState], there: Mapping[str, There]) -> Iterator[str]:
    """Yield the nodes on which a test pod is to run: not while the word that the work is done could be taken for another."""
    for state in states:
        known = there.get(state.name) if state.phase is NodePhase.VERIFYING and maintenance.test is not None else None
        if known is not None and not known.node.mark.done:
            yield state.name


def _draining(maintenance: Maintenance, there: There) -> Why:
    jobs = listed(sorted(there.jobs.values()), NAMED)
    if there.stuck and maintenance.drain is Drain.CHECKPOINT:
        return why(Reason.NODE_DRAIN_BLOCKED, jobs=listed(there.stuck, NAMED))
    if maintenance.drain is Drain.WAIT and there.jobs:
        return why(Reason.NODE_DRAINING, problem=f"{jobs} may run to their end there")
    return why(Reason.NODE_DRAINING, problem=f"{jobs} leave it" if jobs else "nobody has to leave it")


def _safe(there: There) -> Why:
    others = f"; devices are held by pods of others: {listed(there.others, NAMED)}" if there.others else ""
    left = f"; pods that should have stopped may still run: {listed(there.left, NAMED)}" if there.left else ""
    return why(Reason.NODE_SAFE, left=others + left)


def _to(state: NodeState, phase: NodePhase, cause: Why, now: float) -> NodeState:
    since = state.since if phase is state.phase else now
    return replace(state, phase=phase, since=since, reason=cause.code, message=str(cause))


def _summed_up(maintenance: Maintenance, states: list[NodeState], now: float) -> Progress:
    count = Counter(state.phase for state in states)
    facts = {"nodes": len(states), "done": count[NodePhase.RELEASED], "skipped": count[NodePhase.SKIPPED]}
    failed = [state for state in states if state.phase is NodePhase.FAILED]
    if states and all(state.phase in OVER for state in states):
        return Progress(Phase.FINISHED, tuple(states), why(Reason.MAINTENANCE_FINISHED, **facts))
    if failed:
        cause = "; ".join(f"{state.name}: {state.message}" for state in failed[:NAMED])
        return Progress(Phase.HALTED, tuple(states), why(Reason.MAINTENANCE_HALTED, cause=cause))
    if not states:
        return Progress(Phase.WAITING, (), why(Reason.MAINTENANCE_WAITS, problem="there is no such node"))
    if maintenance.start is not None and now < maintenance.start:
        problem = f"its window begins at {clock(maintenance.start)}"
        return Progress(Phase.WAITING, tuple(states), why(Reason.MAINTENANCE_WAITS, problem=problem))
    under_way = sum(count[phase] for phase in CLOSED)
    return Progress(Phase.ACTIVE, tuple(states), why(Reason.MAINTENANCE_UNDER_WAY, now=under_way, **facts))

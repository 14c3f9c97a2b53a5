"""The closed list of reasons: the one source for conditions, events, the command line, metrics and docs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from string import Formatter

from queuectl.model.policy import Cause


class Reason(Enum):
    """Why a workload is in its state.

    The value is the sentence, its holes are the facts; ``{pods:pod}`` is "1 pod" or "8 pods".
    """

    # waiting
    PENDING = "Waiting for the next admission cycle."
    HELD = "Held by its user; 'queuectl release {job}' lets it start."
    BACK_OFF = "Backing off until {until} after: {cause}"
    BEHIND_HEAD = "Queue {queue} is StrictFIFO and {head} is first."
    QUEUE_NOT_FOUND = "Queue {queue} does not exist."
    QUEUE_STOPPED = "Queue {queue} admits nothing new: queue {stopped} has stopPolicy {policy}."
    NAMESPACE_NOT_ALLOWED = (
        "Queue {queue} takes only jobs of namespaces with {needs}, and namespace {namespace} has {found}."
    )
    EXCEEDS_LIMIT = (
        "Can never start: it asks for {wanted} {resource}, and queue {queue} lets jobs {whose} hold {limit} ({field})."
    )
    MAX_RUNNING_REACHED = "Queue {queue} lets {limit:job} {whose} hold room at a time ({field}); now it is {running}."
    MAX_RESOURCES_REACHED = (
        "Queue {queue} lets jobs {whose} hold {limit} {resource} at a time ({field}): they hold {used}, and it asks for"
        " {wanted}."
    )
    MISCONFIGURED = "{field}: {problem}"
    VOLUME_NOT_READY = "Its role {role} uses {volume}, and {problem}."
    NO_MATCHING_FLAVOR = "Queue {queue} has no flavor for role {role}: {problem}."
    EXCEEDS_MAX_QUOTA = (
        "Can never fit: it asks for {wanted} {resource} and queue {queue} has {nominal} in flavor {flavor}."
    )
    WAITING_FOR_QUOTA = (
        "It asks for {wanted} {resource} in flavor {flavor}, and queue {queue} is short of {missing}: it owns {nominal}"
        " and uses {used}{limit}.{holders}{jobs}"
    )
    EXCEEDS_CLUSTER = (
        "Can never fit on today's nodes: of {need:pod} of role {role}, {found} would fit on the {nodes:node} of flavor"
        " {flavor} that they may use if nothing else were there; short of {short}."
    )
    WAITING_FOR_NODES = (
        "Only {found} of {need:pod} of role {role} fit on the {nodes:node} of flavor {flavor} that they may use:"
        " short of {short}."
    )
    MAINTENANCE_AHEAD = "Maintenance takes {nodes} at {at}, and {lasts}; with {change} it would start now."
    WAITING_FOR_OWN_QUOTA = (
        "It is not preemptible and so does not borrow: it asks for {wanted} {resource} in flavor {flavor}, and of queue"
        " {queue}'s own {nominal}, {used} are in use.{jobs}"
    )
    EXCEEDS_OWN_QUOTA = (
        "Can never fit: it is not preemptible and so does not borrow; it asks for {wanted} {resource} and queue {queue}"
        " owns {nominal}."
    )
    WAITING_BEFORE_PREEMPTION = (
        "Others could give way to it; queue {queue} lets its jobs wait {seconds} s before that, this one until {until}."
    )
    VICTIMS_PROTECTED = (
        "{job} could give way to it; queue {queue} lets its jobs run at least {seconds} s, this one until {until}."
    )
    DISRUPTION_FORBIDDEN = "{job} could give way to it, but PodDisruptionBudget {budget} does not allow it now."
    WAITING_FOR_VICTIMS = "Room is promised to it; waiting for {count:preempted job} to leave it{victims}."
    WAITING_FOR_VICTIMS_OF_OTHERS = (
        "Nobody has to give way to it: jobs that already give way to others still use the room{victims}."
    )
    NOT_PROMISED = (
        "No reservation takes {fields} into account: kube-scheduler may keep pods from the nodes that are reserved for"
        " them, or a node not start them, and the whole gang then goes back to its queue at its start deadline."
    )
    GRACE_CUT = (
        "Queue {queue} lets its jobs take {allowed} s to leave, which is what counts instead of {field}, {wanted} s."
    )
    # starting and running
    ADMITTED = "Capacity for {pods:pod} is reserved on {nodes:node}; the whole gang is being created."
    RESERVED = "Room for {pods:pod} is reserved on {nodes:node}."
    STARTING = "The whole gang, {pods:pod}, was let go together; bound to nodes: {bound}, ready: {ready}.{waits}"
    RUNNING = "The whole gang is ready: {pods:pod}."
    PODS_NOT_READY = "Ready now: {ready} of {pods:pod}; {problem}."
    PARTLY_DONE = "{left} of {pods:pod} run on; {done} are done, and what they held is given back."
    SHRUNK = (
        "Gave up {gone} of {before:pod} for {job} of queue {queue}, priority {priority}: {cause}."
        " The other {after} run on."
    )
    SHRUNK_FOR_QUOTA = (
        "Gave up {gone} of {before} pods, which the quota no longer covers: in queue {queue}, {used} {resource} in flavor"
        " {flavor} were in use, and {allowed} may be. The other {after} run on."
    )
    GROWING = "The gang runs with {there} of {pods:pod}; the others are being started."
    REPLACING = "The gang runs with {there} of {pods:pod}; those that were on {nodes} are being replaced. {cause}"
    GROWTH_FAILED = "Gave {gone:pod} back by which it was to grow: {problem}. The other {after} run on."
    CHECKPOINTING = (
        "Its pods save their work first: {answered} of {pods:pod} have, and at {until} nobody waits any longer. {cause}"
    )
    # given back
    CHECKPOINTED = "All that were asked, {pods:pod}, saved their work within {seconds} s."
    CHECKPOINT_MISSED = "Of {pods:pod} asked to save work, {answered} did within {seconds} s."
    ASK_FAILED = "Pod {pod} could not be asked to save its work: {problem}. It is asked again until {until}."
    REPORT_UNREADABLE = "Pod {pod} reports a checkpoint that can't be read: {problem}."
    PREEMPTED = "Gave way to {job} of queue {queue}, priority {priority}: {cause}. Not saved yet: {lost}{since}."
    MOVED = "Moves to make room for {job} of queue {queue}, as {by} asked: its room is kept on {nodes}. Not saved yet: {lost}{since}."
    MOVES_REFUSED = "Nobody moves to make room for {job}, as {by} asked: {problem}."
    QUOTA_TAKEN_BACK = (
        "The quota no longer covers it: in queue {queue}, {used} {resource} in flavor {flavor} were in use, and"
        " {allowed} may be."
    )
    QUEUE_DRAINED = "Queue {queue} is being drained: its stopPolicy is HoldAndDrain."
    PODS_READY_TIMEOUT = "Only {ready} of {pods:pod} got ready within {seconds} s of the start.{waits}"
    PODS_REFUSED = "The API server refused pod {pod}: {problem}"
    PLACE_LOST = "The place on node {node} was lost before the gang was bound: {problem}."
    PROMISE_LOST = "The quota out of which room was promised to it has become less, and no longer holds it."
    NODE_LOST = "Node {node} is gone."
    NODE_REPLACED = "Node {node} was gone, and what ran there with it; another is there under its name."
    NODE_NOT_READY = "Node {node} has not been ready for {seconds} s: nobody knows what its pods do."
    NODE_FAULTY = "It leaves node {node}, which is at fault: {problem}."
    NODE_MAINTENANCE = "It leaves node {node} for maintenance: {problem}."
    GPU_ERROR = "On node {node}, {error}; the node is not blamed for it."
    REPAIR_FAILED = "The lost pods could not be replaced: {problem}."
    POD_LOST = "Pod {pod} was removed by others."
    POD_FAILED = "Pod {pod} failed with exit code {code}."
    FAILURE_IGNORED = (
        "Pod {pod} failed with {how}, which {rule} ignores: {times} of at most {limit} such failures in a row."
    )
    NODE_BLAMED = (
        "Pod {pod} failed with {how}, for which {rule} blames node {node}: it starts again on others. {times} of at most"
        " {limit} such failures in a row."
    )
    POD_DISRUPTED = "Pod {pod} was disrupted: {problem}"
    POD_STUCK = "Pod {pod} should have stopped {seconds} s ago and is still there."
    SPEC_CHANGED = "The spec was changed between the decision and the start."
    # of a node
    NODE_SUSPECT = "No new gang goes onto it until {until}, offence {times} in a row: {cause}"
    NODE_SUSPECT_ONLY = (
        "An offence, its {times:time} in a row; gangs go onto it all the same, for no more nodes of its flavor are"
        " avoided: {cause}"
    )
    NODE_TRUSTED = "Gangs go onto it again."
    # of a queue
    QUEUE_READY = "Jobs of this queue are admitted."
    DRAIN_BLOCKED = "Queue {queue} is being drained, and {count:job} can't be stopped: {jobs}."
    TAKE_BACK_BLOCKED = (
        "Of {resource} in flavor {flavor}, {used} are in use in queue {queue} and {allowed} may be; it can't take back"
        " the rest from {count:job}: {jobs}."
    )
    # of nodes under maintenance
    MAINTENANCE_WAITS = "Nothing is done yet: {problem}."
    MAINTENANCE_UNDER_WAY = "Of {nodes:node}: {done} done, {skipped} left out, {now} under maintenance."
    MAINTENANCE_HALTED = "No further node is begun. {cause}"
    MAINTENANCE_FINISHED = "Of {nodes:node}: {done} done, {skipped} left out."
    NODE_WAITS = "Its turn has not come: {problem}."
    NODE_DRAINING = "Nobody new goes there; {problem}."
    NODE_DRAIN_BLOCKED = "Jobs there can't be told to leave it: {jobs}."
    NODE_SAFE = "It can be worked on: no job of queuectl's has room there{left}."
    NODE_VERIFYING = "A test pod verifies it, within {seconds} s."
    NODE_RELEASED = "It is released: {cause}."
    NODE_SKIPPED = "It was left out: {cause}."
    NODE_UPGRADE_FAILED = "The GPU Operator says that the upgrade of its driver failed; see the driver pod on {node}."
    NODE_TEST_FAILED = "Test pod {pod}: {problem}."
    # the end
    SUCCEEDED = "All pods that must succeed did."
    BACKOFF_LIMIT_EXCEEDED = "Failed {failures:time}, backoffLimit is {limit}; last: {cause}"
    POD_FAILURE_POLICY = "Pod {pod} failed with {how}, for which {rule} fails the job."
    IGNORE_LIMIT_EXCEEDED = (
        "Failed {times:time} in a row without getting further, ignoreLimit is {limit}; last: {cause}"
    )
    MAX_RUN_SECONDS_EXCEEDED = "Ran longer than maxRunSeconds of {seconds}."
    DELETED = "Deleted by its user."

    @cached_property
    def code(self) -> str:
        """The CamelCase name that conditions, events and metrics carry."""
        return "".join(part.capitalize() for part in self.name.split("_"))


def counted(number: object, noun: str) -> str:
    """Return "1 pod" or "8 pods"."""
    return f"{number} {noun}{'' if str(number) == '1' else 's'}"


class _Fact:
    """A fact as its sentence shows it."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __format__(self, noun: str) -> str:
        return counted(self._value, noun) if noun else str(self._value)


class _Facts:
    def __init__(self, facts: Mapping[str, object]) -> None:
        self._facts = facts

    def __getitem__(self, name: str) -> _Fact:
        return _Fact(self._facts.get(name, "?"))


@dataclass(frozen=True)
class Why:
    """A reason with its facts."""

    reason: Reason
    facts: Mapping[str, object] = field(default_factory=dict)

    @property
    def code(self) -> str:
        """The reason's CamelCase name."""
        return self.reason.code

    def __str__(self) -> str:
        """Return the sentence, facts filled in; "?" for one that an earlier version did not record."""
        return self.reason.value.format_map(_Facts(self.facts))


CAUSES = {
    Cause.QUEUE: "it goes first in the same queue",
    Cause.RECLAIM: "its queue takes back quota that was lent",
    Cause.RECLAIM_WHILE_BORROWING: "it has the higher priority, and its queue may preempt while it borrows",
    Cause.FAIR_SHARE: "its queue has had the smaller share",
}
FOR_OTHERS = frozenset({Reason.PREEMPTED, Reason.MOVED})  # ends for somebody else's sake

GIVES_UP = frozenset({Reason.SHRUNK, Reason.SHRUNK_FOR_QUOTA})  # pods, and the gang runs on with the others

LEAVES_NODE = frozenset({Reason.NODE_FAULTY, Reason.NODE_MAINTENANCE})  # ends for the sake of a node

# Waits that only end when somebody changes something.
STUCK = frozenset({
    Reason.QUEUE_NOT_FOUND, Reason.NAMESPACE_NOT_ALLOWED, Reason.EXCEEDS_LIMIT, Reason.MISCONFIGURED,
    Reason.NO_MATCHING_FLAVOR, Reason.EXCEEDS_MAX_QUOTA, Reason.EXCEEDS_OWN_QUOTA, Reason.EXCEEDS_CLUSTER,
})  # fmt: skip

BY_CODE = {reason.code: reason for reason in Reason}
_HOLES = {reason: {name for _, name, _, _ in Formatter().parse(reason.value) if name} for reason in Reason}
NAMED = 3  # queues or jobs that a sentence names


def why(reason: Reason, **facts: object) -> Why:
    """Build a Why; raises KeyError at once when a fact of the sentence is missing."""
    if missing := _HOLES[reason] - facts.keys():
        raise KeyError(*missing)
    return Why(reason, facts)


def listed(names: Sequence[str], most: int = NAMED) -> str:
    """Return the first names as a list, and how many more there are."""
    more = len(names) - most
    return ", ".join((*names[:most], *([f"and {more} more"] if more > 0 else ())))

"""Maintenance of nodes: what somebody wants done, how far each node has come, and what is seen of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from queuectl.model.objects import Node
from queuectl.model.reasons import Why

MAX_NODES = 1000  # of one maintenance: its status has a line for each


class NodeWork(StrEnum):
    """Who works on the nodes, and who says when it is done."""

    MANUAL = "Manual"  # somebody, who says so
    DRIVER_UPGRADE = "DriverUpgrade"  # the GPU Operator, by a label of the node


class Drain(StrEnum):
    """What becomes of the jobs on a node whose turn has come."""

    CHECKPOINT = "Checkpoint"  # they are asked to save their work, and go back to their queues
    WAIT = "Wait"  # they run to their end


class NodePhase(StrEnum):
    """How far a node has come."""

    PENDING = "Pending"
    DRAINING = "Draining"
    SAFE = "Safe"  # it can be worked on
    VERIFYING = "Verifying"  # the work is done, and a test pod runs
    FAILED = "Failed"  # the work, or the test
    RELEASED = "Released"
    SKIPPED = "Skipped"  # its turn never came, or it is gone


CLOSED = frozenset({NodePhase.DRAINING, NodePhase.SAFE, NodePhase.VERIFYING, NodePhase.FAILED})
OVER = frozenset({NodePhase.RELEASED, NodePhase.SKIPPED})


class Phase(StrEnum):
    """Where a maintenance is as a whole."""

    WAITING = "Waiting"
    ACTIVE = "Active"
    HALTED = "Halted"
    FINISHED = "Finished"


@dataclass(frozen=True, slots=True)
class NodeState:
    """How far a node has come, as the status says it."""

    name: str
    phase: NodePhase
    since: float  # Unix seconds
    reason: str = ""  # its code
    message: str = ""
    canary: bool = False


@dataclass(frozen=True, slots=True)
class Maintenance:
    """A NodeMaintenance, with its status."""

    name: str
    uid: str = ""
    nodes: tuple[str, ...] = ()
    selector: tuple[tuple[str, str], ...] = ()  # labels, where no nodes are named
    work: NodeWork = NodeWork.MANUAL
    start: float | None = None  # Unix seconds; None: at once
    end: float | None = None  # Unix seconds; None: never
    max_unavailable: int | str = 1  # "25%" of its nodes
    canary: int = 1
    test: Mapping[str, Any] | None = field(default=None, hash=False)  # as spec.test
    test_seconds: int = 900
    drain: Drain = Drain.CHECKPOINT
    why: str = ""  # in the words of who wants it
    created_at: float = 0.0  # Unix seconds
    generation: int = 0
    resource_version: str = field(default="", compare=False)
    phase: Phase = Phase.WAITING
    states: tuple[NodeState, ...] = ()
    status: Mapping[str, Any] = field(default_factory=dict, compare=False)  # as it stands in the API server


class TestPhase(StrEnum):
    """How far a test pod has come."""

    __test__ = False  # it is no test of ours

    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class NodeTest:
    """A test pod, as it is seen."""

    maintenance: str  # its uid
    node: str
    namespace: str
    name: str
    phase: TestPhase
    created_at: float  # Unix seconds
    problem: str = ""
    uid: str = ""
    resource_version: str = ""


@dataclass(frozen=True, slots=True)
class There:
    """A node, and who is there."""

    node: Node
    jobs: Mapping[str, str] = field(default_factory=dict)  # of queuectl's with room there: uid → namespace and name
    leaving: frozenset[str] = frozenset()  # those of them that have been told to go
    stuck: tuple[str, ...] = ()  # those of them that can't be told to, each with why
    others: tuple[str, ...] = ()  # other pods that hold devices there
    left: tuple[str, ...] = ()  # pods that are there yet of attempts that have ended without them


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a maintenance is to be told to have come."""

    phase: Phase
    states: tuple[NodeState, ...]
    why: Why


@dataclass(frozen=True, slots=True)
class Wanted:
    """How a node is to be."""

    maintenance: str = ""
    cordoned: bool = False
    held: bool | None = False  # back from the GPU Operator; None: as it is
    done_is_taken: bool = True  # the word that the work is done has had its effect

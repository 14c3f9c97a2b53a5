"""What is at fault on nodes: conditions that others set, and what their GPUs report."""

from collections.abc import Mapping
from dataclasses import dataclass, field

# Conditions of nodes by which others say that something is broken for good: node-problem-detector (its permanent
# problems, and what AKS has it check on GPU nodes), the EKS node monitoring agent, and Nebius' health checks.
# Not here: what the kubelet says itself, of which kube-scheduler and the node lifecycle controller know.
CONDITIONS = (
    "KernelDeadlock=True",
    "ReadonlyFilesystem=True",
    "XfsShutdown=True",
    "CperHardwareErrorFatal=True",
    "FilesystemCorruptionProblem=True",
    "GPUMissing=True",
    "NVLinkStatusInactive=True",
    "XIDErrors=True",
    "IBLinkFlapping=True",
    "AcceleratedHardwareReady=False",
    "KernelReady=False",
    "NetworkingReady=False",
    "StorageReady=False",
    "NebiusGPUError=True",
)

# XIDs that mean the GPU, its memory or its links, by NVIDIA's catalogue of XIDs: those for which it says at once to reset
# the GPU, to restart the machine or to look at its mechanics, and 154, by which drivers since R565 say that the GPU needs
# one of these, right after the XID that tells why. Of NVLink 5 (144 to 150) those that mostly mean a reset. 109 is not
# here: NVIDIA's device plugin takes it for the application's, like 13, 31, 43, 45 and 68.
# https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html
HARDWARE_XIDS = {
    46: "it stopped processing",
    48: "double-bit ECC error",
    54: "its auxiliary power is not connected",
    62: "its micro-controller halted",
    64: "faulty memory could not be remapped",
    74: "NVLink error",
    79: "it has fallen off the bus",
    95: "uncontained memory error",
    110: "security fault",
    119: "its system processor does not answer",
    120: "error of its system processor",
    136: "a link could not be trained",
    140: "unrecoverable ECC error",
    143: "it could not be initialised",
    149: "NVLink error",
    150: "NVLink error",
    151: "error at the rotation of keys",
    154: "it needs to be reset",
}
# What the GPU is not to blame for, in a few words for those who are.
OTHER_XIDS = {
    13: "exception of the graphics engine, often an illegal access of the program",
    31: "memory page fault, often an illegal access of the program",
    32: "invalid or corrupted push buffer",
    43: "the program's channel was reset after an error of its own",
    45: "the program was ended, mostly after another error or by a kill",
    63: "faulty memory was remapped",
    68: "exception of the video decoder",
    69: "error of the graphics engine",
    92: "many single-bit ECC errors",
    94: "contained memory error: the program has to start again",
    109: "a context switch took too long",
}


def condition(text: str) -> tuple[str, str]:
    """Return type and status of ``TYPE=STATUS``. Raises ValueError."""
    kind, _, status = text.partition("=")
    if not kind or status not in {"True", "False", "Unknown"}:
        raise ValueError(f'"{text}" is not TYPE=STATUS, with status True, False or Unknown; write it as XIDErrors=True')
    return kind, status


@dataclass(frozen=True, slots=True)
class FaultRules:
    """What counts as a fault of a node."""

    conditions: frozenset[tuple[str, str]] = frozenset(map(condition, CONDITIONS))
    xids: frozenset[int] = frozenset(HARDWARE_XIDS)
    seconds: float = 3600.0  # for which a node is avoided for what nobody says to be over


DEFAULT_RULES = FaultRules()


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happened on a node and that nobody says to be over."""

    node: str
    problem: str
    at: float  # Unix seconds


@dataclass(frozen=True, slots=True)
class Xid:
    """What an exporter shows of a GPU: the code of an error, and how many there have been, as far as it knows."""

    metric: str
    gpu: str  # its index
    uuid: str
    code: int
    level: int = 1
    pod: str = ""  # namespace and name of whose GPU it is, if the exporter knows

    @property
    def key(self) -> str:
        """What is counted by itself."""
        return f"{self.uuid or self.gpu} {self.metric} {self.code}"


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read last of a node's exporter, and the faults that came of it: (GPU, XID) → Unix seconds."""

    levels: Mapping[str, int] = field(default_factory=dict)  # by key of a Xid; others are 0
    faults: Mapping[tuple[str, int], float] = field(default_factory=dict)

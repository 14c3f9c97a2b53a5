"""What nodes have done to gangs, and for how long they are avoided for it."""

from dataclasses import dataclass

from queuectl.model.reasons import Why


@dataclass(frozen=True, slots=True)
class Offence:
    """Something bad that happened to a gang on a node."""

    node: str
    at: float  # Unix seconds
    why: Why
    uid: str = ""  # of the workload; empty: it was no gang that showed it
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Why and for how long a node is not trusted with gangs."""

    node: str
    since: float  # Unix seconds
    until: float
    why: Why  # of the last offence
    times: int  # how often in a row


@dataclass(frozen=True, slots=True)
class Healing:
    """How quickly nodes are given up, and for how long. Times are in seconds."""

    not_ready: float = 30.0  # that a node may be not Ready before gangs leave it
    first: float = 600.0  # for which a node is avoided; 0: never

"""What is read of claims, volumes and storage classes: where pods that use them may go."""

from dataclasses import dataclass

from queuectl.model.objects import NodeTerm, VolumeUse

__all__ = ["Claim", "StorageClass", "Terms", "Volume", "VolumeUse"]

Terms = tuple[NodeTerm, ...]  # alternatives


@dataclass(frozen=True, slots=True)
class Claim:
    """A PersistentVolumeClaim."""

    key: str  # namespace/name
    modes: tuple[str, ...] = ()  # its access modes
    volume: str = ""  # the PersistentVolume that it has, or is to have
    bound: bool = False  # it has it
    storage_class: str = ""
    node: str = ""  # where the pod goes for which a volume is being made
    lost: bool = False
    deleting: bool = False

    @property
    def name(self) -> str:
        """Its name in its namespace."""
        return self.key.partition("/")[2]


@dataclass(frozen=True, slots=True)
class Volume:
    """A PersistentVolume: from which nodes it can be reached."""

    name: str
    claim: str = ""  # namespace/name of the claim that has it
    reach: tuple[Terms, ...] = ()  # each must hold


@dataclass(frozen=True, slots=True)
class StorageClass:
    """A StorageClass: when claims of it get their volumes, and where those can be."""

    name: str
    waits: bool = False  # until there is a pod that uses the claim
    provisions: bool = True  # False: volumes are only what somebody has made beforehand
    reach: Terms = ()  # none: everywhere
    default_since: str = ""  # creation time, of a class that is the default

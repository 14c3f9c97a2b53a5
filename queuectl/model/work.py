"""What an eviction costs: the work since the last checkpoint."""

from typing import NamedTuple, Self

RESTART_SECONDS = 600  # of work that an earlier preemption counts as: no restart is free, whoever it hits


class Work(NamedTuple):
    """GPUs times seconds. Of gangs without GPUs, which cost none of them, pods times seconds; compared after that."""

    gpu_seconds: int = 0
    pod_seconds: int = 0

    @classmethod
    def of(cls, gpus: int, pods: int, seconds: int) -> Self:
        """Return the work of so many seconds."""
        return cls(gpus * seconds, 0) if gpus else cls(0, pods * seconds)

    def plus(self, other: "Work") -> "Work":
        """Return the sum."""
        return Work(self.gpu_seconds + other.gpu_seconds, self.pod_seconds + other.pod_seconds)

    def __str__(self) -> str:
        """Return it in words."""
        parts = [
            f"{amount} {unit}" for amount, unit in zip(self, ("GPU-seconds", "pod-seconds"), strict=True) if amount
        ]
        return " and ".join(parts) or "nothing"


NO_WORK = Work()

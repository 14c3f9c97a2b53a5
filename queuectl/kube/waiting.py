"""Why containers of a pod can't start, as their kubelet says."""

from collections.abc import Iterable

import msgspec

MAX_TOLD = 200  # characters
_ON_THE_WAY = {"", "ContainerCreating", "PodInitializing"}


class Waiting(msgspec.Struct):
    """The state of a container that waits."""

    reason: str = ""
    message: str = ""


def obstacle(containers: Iterable[Waiting | None]) -> str:
    """Return what keeps the first of these containers from starting, for people; empty when nothing does."""
    one = next((one for one in containers if one is not None and one.reason not in _ON_THE_WAY), None)
    if one is None:
        return ""
    text = f"{one.reason} ({' '.join(one.message.split())})" if one.message.strip() else one.reason
    return text if len(text) <= MAX_TOLD else f"{text[: MAX_TOLD - 1]}…"

"""What GPUs count as: cards and parts of them, by the flavor they are of."""

from collections.abc import Iterable, Mapping

from queuectl.model.gpus import weight
from queuectl.model.objects import Flavor
from queuectl.model.resources import CARDS, MAX_AMOUNT


def weigh(resource: str, flavor: Flavor) -> int:
    """Return what a unit of a resource counts as on the flavor's nodes, in amounts of cards; 0: it is no GPU."""
    return next((amount for name, amount in flavor.gpus if name == resource), None) or weight(resource)


def cards(requests: Iterable[tuple[str, int]], flavor: Flavor) -> int:
    """Return what requests count as on the flavor's nodes, in amounts of cards; 0: none is for a GPU."""
    return min(MAX_AMOUNT, sum(amount * weigh(resource, flavor) for resource, amount in requests if amount))


def charge(amounts: Mapping[str, int], flavor: Flavor) -> dict[str, int]:
    """Return what amounts are charged in a flavor: themselves, and the cards of those that are GPUs."""
    count = cards(amounts.items(), flavor)
    return {**amounts, CARDS: count} if count else dict(amounts)

"""What a claim has already of its room."""

from queuectl.core.claims import Idle
from queuectl.model.plan import Placement, Portion
from tests.support.builders import GPU, requests

ONE = requests(gpu=1)
CELL = ("any", GPU)


def on(node: str, pods: int) -> Placement:
    return Placement("worker", "any", node, pods, ONE)


def test_what_the_victims_are_still_in_is_not_idle() -> None:
    victims = [Portion((on("n1", 2),), {CELL: 2}), Portion((on("n2", 4),), {CELL: 4})]
    idle = Idle.of(Portion((on("n1", 3), on("n2", 2)), {CELL: 5}), victims)
    assert idle == Idle({}, {"n1": ((GPU, 1), ("pods", 1))})


def test_without_victims_all_of_it_is_idle() -> None:
    idle = Idle.of(Portion((on("n1", 3), on("n1", 1)), {CELL: 4}), [])
    assert idle == Idle({CELL: 4}, {"n1": ((GPU, 4), ("pods", 4))})

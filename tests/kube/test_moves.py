"""Requests to move, as annotations."""

import pytest

from queuectl.kube import moves
from queuectl.kube.names import MOVE, MOVE_BY, MOVE_REFUSED
from queuectl.model.objects import MoveRequest

REQUEST = MoveRequest("u", "team/whole", (("a", 1), ("b", 2)), 3600.0, 1_790_000_000.125, "ann")


def test_a_request_is_read_as_it_was_written_until_it_is_refused() -> None:
    written = {MOVE: moves.annotation(REQUEST), MOVE_BY: "ann"}
    assert moves.read(written) == REQUEST
    assert moves.read({MOVE_BY: "ann"}) is None
    assert moves.refusal(written, REQUEST.until) is None
    answered = written | {MOVE_REFUSED: moves.refused(REQUEST, "no room")}
    assert moves.read(answered) is None
    assert moves.refusal(answered, REQUEST.until) == "no room"


def test_an_answer_is_to_one_request_only() -> None:
    answer = moves.refused(REQUEST, "no room")
    later = MoveRequest("u", "team/whole", (("a", 1),), 3600.0, REQUEST.until + 1)
    assert moves.read({MOVE: moves.annotation(later), MOVE_REFUSED: answer}) == later


@pytest.mark.parametrize("text", ["yes", "{}", '{"for": "team/whole", "uid": "u", "moves": {"a": "b"}}', "[1]"])
def test_what_can_not_be_read_is_a_request_with_a_problem(text: str) -> None:
    read = moves.read({MOVE: text, MOVE_BY: "ann"})
    assert read is not None
    assert (read.by, read.moves) == ("ann", ())
    assert "annotation queuectl.dev/move is not as queuectl defrag --apply writes it" in read.problem
    assert moves.read({MOVE: text, MOVE_REFUSED: moves.refused(read, read.problem)}) is None

"""Sentences that people read in kubectl."""

import ast
import string
from pathlib import Path

import pytest

import queuectl
from queuectl.model.lifecycle import STEP_OF, AttemptState
from queuectl.model.plan import Admission, Placement
from queuectl.model.reasons import BY_CODE, Reason, Why, why
from tests.support.builders import GPU, requests


def test_every_reason_has_a_sentence_and_a_code_of_its_own() -> None:
    assert len(Reason.__members__) == len(list(Reason)) == len(BY_CODE), "two reasons share a sentence or a code"
    assert Reason.PODS_READY_TIMEOUT.code == "PodsReadyTimeout"
    assert BY_CODE["Held"] is Reason.HELD


@pytest.mark.parametrize("reason", list(Reason), ids=lambda reason: reason.code)
def test_a_sentence_tells_all_its_facts(reason: Reason) -> None:
    facts = {name: f"<{name}>" for _, name, _, _ in string.Formatter().parse(reason.value) if name}
    told = why(reason, **facts)
    assert told.code == reason.code
    assert all(fact in str(told) for fact in facts.values())
    assert str(told)[0].isupper() or str(told).startswith("<")
    for name in facts:
        with pytest.raises(KeyError, match=name):
            why(reason, **{other: fact for other, fact in facts.items() if other != name})


def test_whoever_gives_a_reason_gives_all_its_facts() -> None:
    """A fact that is missing is an error when the reason is given, which for some is seldom."""
    lacking = []
    for file in Path(queuectl.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "why"):
                continue
            given, [reason, *_] = {word.arg for word in call.keywords}, call.args
            if isinstance(reason, ast.Attribute) and None not in given:  # else given elsewhere, or by **
                holes = {name for _, name, _, _ in string.Formatter().parse(Reason[reason.attr].value) if name}
                lacking += [f"{file.name}:{call.lineno} {reason.attr}: {name}" for name in holes - given]
    assert lacking == []


def test_a_sentence_survives_facts_that_an_earlier_version_did_not_record() -> None:
    assert str(Why(Reason.NODE_LOST, {})) == "Node ? is gone."


def test_braces_in_a_fact_stay() -> None:
    assert str(why(Reason.NODE_LOST, node="{x}")) == "Node {x} is gone."


def test_an_admission_adds_up_per_node() -> None:
    admission = Admission(
        "g", (Placement("a", "f", "n1", 2, requests(gpu=1)), Placement("b", "f", "n1", 1, requests(cpu=1)))
    )
    assert admission.per_node() == {("n1", "pods"): 3, ("n1", GPU): 2, ("n1", "cpu"): 1000}


def test_states_with_a_step() -> None:
    assert STEP_OF.keys() == {
        AttemptState.RESERVED, AttemptState.CREATED, AttemptState.SHRINKING, AttemptState.REPAIRING,
        AttemptState.GROWING, AttemptState.CHECKPOINTING, AttemptState.ENDING,
    }  # fmt: skip

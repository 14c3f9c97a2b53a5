"""Each file of cases agrees with the peer, but for the differences that are argued."""

import json
from pathlib import Path

import pytest

from tests.peer_cases.__main__ import DIFFERENCES, differing

FILES = sorted(path for path in DIFFERENCES.parent.glob("*.json") if path != DIFFERENCES)


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_differs_from_the_peer_only_where_that_is_argued(file: Path) -> None:
    """A difference that nobody has argued is a defect, and so is an argument for a case that agrees."""
    cases = json.loads(file.read_text(encoding="utf-8"))
    argued = json.loads(DIFFERENCES.read_text(encoding="utf-8")).keys() & {case["name"] for case in cases}
    assert differing(cases).keys() == argued

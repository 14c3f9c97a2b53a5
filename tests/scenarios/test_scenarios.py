"""The scenarios beside this file, in virtual time."""

from pathlib import Path

import pytest

from queuectl.cli.documents import read as read_documents
from queuectl.simulate.clockwork import run
from queuectl.simulate.form import read
from queuectl.simulate.verdict import differences

FILES = sorted(Path(__file__).parent.glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_ends_as_wanted(path: Path) -> None:
    [document] = read_documents([str(path)])
    scenario = read(document.data)
    assert scenario.want, "a scenario that wants nothing tests nothing"
    assert differences(scenario, run(scenario)) == []

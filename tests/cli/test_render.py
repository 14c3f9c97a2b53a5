"""Ages, cells and tables."""

import pytest

from queuectl.cli.errors import CommandError
from queuectl.cli.options import PhaseName, seconds
from queuectl.cli.render import Table, age, clean, duration
from queuectl.kube.crds import Phase

MINUTE, HOUR, DAY = 60, 3600, 86400

LENGTHS = {
    -5: "0s",
    0: "0s",
    119: "119s",
    2 * MINUTE: "2m",
    5 * MINUTE + 30: "5m30s",
    10 * MINUTE + 30: "10m",
    179 * MINUTE: "179m",
    3 * HOUR: "3h",
    3 * HOUR + 12 * MINUTE: "3h12m",
    47 * HOUR + 59 * MINUTE: "47h",
    3 * DAY + 4 * HOUR: "3d4h",
    100 * DAY + HOUR: "100d",
    800 * DAY: "2y70d",
    9 * 365 * DAY: "9y",
}


@pytest.mark.parametrize("length", LENGTHS)
def test_lengths_of_time_are_in_kubectls_form(length: int) -> None:
    assert duration(length) == LENGTHS[length]


def test_an_age_is_reckoned_from_the_api_servers_time() -> None:
    assert age("1970-01-01T00:01:00Z", now=360) == "5m"
    assert age(None) == "-"


def test_a_cell_is_one_line_without_control_characters() -> None:
    assert clean("one\ntwo \x1b[31mred") == "one two  [31mred"
    assert clean(None) == clean("") == "-"
    assert clean(0) == "0"


def test_rows_shown_later_stand_under_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(("NAME", "PHASE"))
    table.show([("a", "Pending")])
    table.show([("b", "Running")])
    assert capsys.readouterr().out == "NAME   PHASE\na      Pending\nb      Running\n"


@pytest.mark.parametrize(("text", "want"), [("90", 90), ("90s", 90), ("10m", 600), ("1h30m", 5400), ("1.5s", 1.5)])
def test_a_time_limit(text: str, want: float) -> None:
    assert seconds(text) == want


@pytest.mark.parametrize("text", ["", "ten", "-5", "5d", "1m1h"])
def test_no_time_limit(text: str) -> None:
    with pytest.raises(CommandError, match="is not a duration; write 90s, 10m or 1h30m"):
        seconds(text)


def test_phases_are_those_of_the_api() -> None:
    assert [phase.value for phase in PhaseName] == [phase.value for phase in Phase]

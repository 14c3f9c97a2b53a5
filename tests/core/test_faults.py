"""Which nodes are at fault: by conditions, by what their GPUs report, and by what jobs blame them for."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queuectl.core.faults import Faulty, judge, look, of_gpus, told
from queuectl.model.faults import CONDITIONS, HARDWARE_XIDS, OTHER_XIDS, Fault, FaultRules, Reading, Xid, condition

RULES = FaultRules(seconds=600)
GAUGE, COUNT = "DCGM_FI_DEV_XID_ERRORS", "DCGM_EXP_XID_ERRORS_COUNT"
# What NVIDIA's device plugin takes for errors of the application.
APPLICATION = {13, 31, 43, 45, 68, 109}


def gauge(code: int, gpu: str = "3") -> Xid:
    return Xid(GAUGE, gpu, f"GPU-{gpu}", code)


def count(code: int, times: int, gpu: str = "3") -> Xid:
    return Xid(COUNT, gpu, f"GPU-{gpu}", code, times)


def test_what_is_there_at_first_sight_is_of_before() -> None:
    reading, new = look(None, [gauge(79), count(48, 2, "1")], 100.0, RULES)
    assert new == []
    assert reading.faults == {}
    again, new = look(reading, [gauge(79), count(48, 2, "1")], 130.0, RULES)
    assert (again, new) == (reading, []), "the last error stays until the exporter is started anew"


def test_a_new_error_is_one_that_the_exporter_shows_more_of() -> None:
    reading, _ = look(None, [], 100.0, RULES)
    reading, new = look(reading, [gauge(79), count(79, 1)], 130.0, RULES)
    assert [xid.code for xid in new] == [79], "both tell of the same"
    assert reading.faults == {("3", 79): 130.0}
    reading, new = look(reading, [gauge(79)], 430.0, RULES)
    assert new == []
    reading, new = look(reading, [gauge(79), count(79, 1)], 460.0, RULES)
    assert [xid.code for xid in new] == [79], "it came again after those of the window were forgotten"
    assert reading.faults == {("3", 79): 460.0}
    reading, new = look(reading, [gauge(48), count(79, 1)], 490.0, RULES)
    assert reading.faults == {("3", 79): 460.0, ("3", 48): 490.0}
    reading, _ = look(reading, [], 500.0, RULES)
    reading, new = look(reading, [gauge(48)], 510.0, RULES)
    assert [xid.code for xid in new] == [48], "the exporter was started anew"


def test_what_the_program_is_to_blame_for_is_no_fault() -> None:
    for code in APPLICATION | OTHER_XIDS.keys() | {8, 999}:
        reading, new = look(Reading(), [gauge(code)], 100.0, RULES)
        assert [xid.code for xid in new] == [code]
        assert reading.faults == {}
    assert not HARDWARE_XIDS.keys() & (APPLICATION | OTHER_XIDS.keys())
    assert {48, 64, 74, 79, 95, 119, 140} <= HARDWARE_XIDS.keys()
    assert told("3", 79) == "GPU 3 reported XID 79 (it has fallen off the bus)"


def judged(
    *faults: Fault,
    said: Mapping[str, tuple[str, ...]] | None = None,
    blames: Sequence[Fault] = (),
    nodes: int = 4,
    now: float = 0.0,
) -> dict[str, Faulty]:
    return judge(said or {}, faults, blames, nodes=nodes, now=now, rules=RULES)


def test_a_fault_that_nobody_says_to_be_over_ends_by_itself() -> None:
    reading = Reading(faults={("3", 79): 3600.0})
    [fault] = of_gpus("n", reading)
    assert judged(fault, now=4199.0) == {
        "n": Faulty(
            "GPU 3 reported XID 79 (it has fallen off the bus) at 01:00:00 UTC, avoided until 01:10:00 UTC",
            leaves=True,
        )
    }
    assert judged(fault, now=4200.0) == {}
    assert look(reading, [], 4200.0, RULES)[0] == Reading()


def test_all_that_is_said_of_a_node_is_told() -> None:
    blame = Fault("n", "a job blames it", 0.0)
    found = judged(said={"n": ("condition A is True",), "m": ()}, blames=[blame])
    assert found == {"n": Faulty("condition A is True; a job blames it, avoided until 00:10:00 UTC", leaves=True)}
    assert judged(blames=[blame]) == {"n": Faulty("a job blames it, avoided until 00:10:00 UTC", leaves=False)}


def test_of_a_storm_of_errors_a_few_are_told_and_how_many_more_there_are() -> None:
    """Else statuses and conditions of all who hear of it would be as long as that."""
    storm = [Fault("n", f"error {i}", 0.0) for i in range(1000)]
    [faulty] = judged(*storm).values()
    assert faulty.problem.startswith("error 0, avoided until 00:10:00 UTC; error 1,")
    assert faulty.problem.endswith("; and 996 more")


@given(st.integers(1, 200), st.integers(0, 200), st.integers(0, 200))
def test_no_more_nodes_are_emptied_or_blamed_than_are_allowed(nodes: int, faulty: int, blamed: int) -> None:
    said = {f"n{i}": ("condition A is True",) for i in range(min(faulty, nodes))}
    blames = [Fault(f"n{i}", "a job blames it", float(i)) for i in range(min(blamed, nodes))]
    found = judged(said=said, blames=blames, nodes=nodes, now=300.0)
    assert said.keys() <= found.keys()
    emptied = sum(one.leaves for one in found.values())
    assert emptied == (len(said) if len(said) <= max(3, nodes // 5) else 0)
    only_blamed = found.keys() - said.keys()
    assert len(only_blamed) <= max(3, nodes // 10)
    lasting = [node.node for node in blames if node.at + RULES.seconds > 300.0]
    for node in lasting[-3:]:
        assert node in found, "the latest count"


@pytest.mark.parametrize("text", ["XIDErrors", "=True", "XIDErrors=true", "XIDErrors=", ""])
def test_a_condition_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write it as XIDErrors=True"):
        condition(text)


def test_conditions_that_count_by_default_are_of_those_who_set_them() -> None:
    kinds: dict[str, Any] = dict(map(condition, CONDITIONS))
    assert len(kinds) == len(CONDITIONS)
    assert kinds["KernelDeadlock"] == kinds["XIDErrors"] == kinds["GPUMissing"] == "True"
    assert kinds["AcceleratedHardwareReady"] == "False"
    assert "Ready" not in kinds

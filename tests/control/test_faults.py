"""What one leader knows of faults, and what the next one knows of it."""

from dataclasses import replace

from queuectl.control.faults import MAX_SAVED, Faults
from queuectl.model.failures import Ignored
from queuectl.model.faults import FaultRules, Reading, Xid
from queuectl.model.lifecycle import Workload
from tests.support.builders import node

RULES = FaultRules(seconds=600)
LOST = Xid("DCGM_FI_DEV_XID_ERRORS", "3", "GPU-3", 79)
OWN = Xid("DCGM_FI_DEV_XID_ERRORS", "2", "GPU-2", 31)
WORKLOAD = Workload("u", "team", "llm", "q", 0, 0.0, 1)


def faults(*names: str) -> Faults:
    result = Faults(RULES)
    for name in names:
        result.on_node(name, node(name))
    return result


def test_the_next_leader_goes_on_from_what_the_ledger_knows() -> None:
    first = faults("n1", "n2")
    assert first.read("n1", [], 0.0) == []
    assert first.read("n1", [LOST, OWN], 30.0) == [OWN], "of the other the node is to blame"
    known = {name: reading for name, reading in first.take_unsaved().items() if reading}
    assert known["n1"].faults == {("3", 79): 30.0}
    assert first.take_unsaved() == {}
    assert first.read("n1", [LOST, OWN], 60.0) == []
    assert first.take_unsaved() == {}, "nothing is new"

    second = faults("n1", "n2")
    second.recall({**known, "gone": Reading()}, [])
    assert second.take_unsaved() == {"gone": None}
    assert second.read("n1", [LOST, OWN], 90.0) == []
    avoided = second.avoided(90.0)["n1"]
    assert avoided.why.startswith("GPU 3 reported XID 79 (it has fallen off the bus) at 00:00:30 UTC")
    assert avoided.leave is not None
    assert second.ends(90.0) == 630.0
    assert second.avoided(630.0) == {}
    assert second.read("n1", [LOST, OWN], 660.0) == []
    assert second.take_unsaved()["n1"] == Reading({LOST.key: 1, OWN.key: 1}), "what is over is forgotten"
    assert second.read("n2", [LOST], 690.0) == [], "what is there at first sight is of before"


def test_a_job_is_told_of_an_error_once_in_a_while_however_many_gpus_show_it() -> None:
    one = faults("n1")
    told = [
        one.is_news(uid, code, at)
        for uid, code, at in (("a", 31, 0.0), ("a", 31, 599.0), ("a", 43, 1.0), ("b", 31, 1.0))
    ]
    assert told == [True, False, True, True]
    assert one.is_news("a", 31, 600.0)


def test_a_node_that_is_gone_begins_anew() -> None:
    one = faults("n1")
    one.read("n1", [], 0.0)
    one.read("n1", [LOST], 30.0)
    one.on_node("n1", None)
    assert one.take_unsaved() == {"n1": None}
    assert one.avoided(31.0) == {}
    assert one.read("n1", [LOST], 32.0) == [], "its exporter may be read once more"
    one.on_node("n1", node("n1"))
    assert one.avoided(33.0) == {}


def test_what_is_not_known_to_the_ledger_goes_there_bit_by_bit() -> None:
    names = [f"n{i}" for i in range(MAX_SAVED + 1)]
    one = faults(*names)
    for name in names:
        one.read(name, [], 0.0)
    assert [*one.take_unsaved()] == names[:-1]
    assert [*one.take_unsaved()] == names[-1:]


def test_nodes_that_jobs_blame_are_avoided_and_nobody_leaves_them() -> None:
    one = faults("n1", "n2")
    one.recall({}, [replace(WORKLOAD, ignored=Ignored(2, None, (("n1", 100.0), ("other", 100.0))))])
    [(name, avoided)] = one.avoided(200.0).items()
    assert (name, avoided.leave) == ("n1", None)
    assert avoided.why == "a rule of team/llm blames it for a failure, avoided until 00:11:40 UTC"
    one.blame(replace(WORKLOAD, ignored=Ignored(3, None, (("n1", 100.0), ("n2", 300.0)))))
    assert one.avoided(699.0).keys() == {"n1", "n2"}
    assert one.avoided(700.0).keys() == {"n2"}
    assert one.ends(700.0) == 900.0


def test_a_condition_counts_as_long_as_it_is_there() -> None:
    one = faults("n1")
    one.on_node("n1", replace(node("n1"), faults=("condition GPUMissing is True",)))
    assert one.avoided(0.0)["n1"].why == "condition GPUMissing is True"
    assert one.avoided(10**9)["n1"].leave is not None
    one.on_node("n1", node("n1"))
    assert one.avoided(0.0) == {}

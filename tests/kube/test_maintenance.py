import copy
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from queuectl.core.maintenance import UPGRADE_SKIP, is_as_wanted
from queuectl.kube import decode, maintenance
from queuectl.model.maintenance import NodePhase, NodeState, Phase, Progress, TestPhase, Wanted
from queuectl.model.reasons import Reason, why

Object = dict[str, Any]


def merged(target: Object, patch: Object) -> Object:
    """Apply a merge patch (RFC 7396)."""
    result = dict(target)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key, {}), value) if isinstance(value, dict) else value
    return result


def node(*, cordoned: bool, skipped: bool) -> Object:
    labels = {"pool": "a"} | ({UPGRADE_SKIP: "true"} if skipped else {})
    meta = {"name": "n", "resourceVersion": "7", "labels": labels, "annotations": {"other": "kept"}}
    return {"metadata": meta, "spec": {"unschedulable": True} if cordoned else {}}


def read(item: Object) -> Any:
    return decode.node(json.dumps(item).encode()).value


@given(
    st.builds(node, cordoned=st.booleans(), skipped=st.booleans()),
    st.lists(
        st.builds(Wanted, st.sampled_from(["a", "b"]), st.booleans(), st.sampled_from([None, False, True])), max_size=6
    ),
)
def test_whatever_is_wanted_of_a_node_in_the_end_it_is_as_others_have_left_it(
    before: Object, wants: list[Wanted]
) -> None:
    cordoned, skipped = "unschedulable" in before["spec"], UPGRADE_SKIP in before["metadata"]["labels"]
    now = copy.deepcopy(before)
    for want in [*wants, Wanted()]:
        patch = maintenance.node_patch(now, want)
        now = merged(now, patch or {})
        assert maintenance.node_patch(now, want) is None
        assert is_as_wanted(read(now), want)
        assert now["spec"].get("unschedulable", False) == (want.cordoned or cordoned)
        if want.held is not None:
            assert (UPGRADE_SKIP in now["metadata"]["labels"]) == (want.held or skipped)
    assert now == before


def test_a_patch_holds_only_for_the_node_as_it_was_read() -> None:
    patch = maintenance.node_patch(node(cordoned=False, skipped=False), Wanted("a", cordoned=True))
    assert patch is not None
    assert patch["metadata"]["resourceVersion"] == "7"


def test_who_lets_a_node_take_pods_again_meanwhile_is_not_undone_twice() -> None:
    now = node(cordoned=False, skipped=False)
    now = merged(now, maintenance.node_patch(now, Wanted("a", cordoned=True)) or {})
    del now["spec"]["unschedulable"]
    now["spec"]["unschedulable"] = False
    assert maintenance.node_patch(now, Wanted()) == {
        "metadata": {"annotations": {maintenance.MARK: None}, "resourceVersion": "7"}
    }


def test_a_note_that_cannot_be_read_counts_as_none() -> None:
    for text in ("", "{", "[]", "7"):
        assert not maintenance.mark({maintenance.MARK: text}).cordoned
    assert maintenance.mark({maintenance.DONE: ""}).done


def manifest(**spec: Any) -> Object:
    meta = {
        "name": "m",
        "uid": "u",
        "resourceVersion": "3",
        "generation": 2,
        "creationTimestamp": "2026-12-01T00:00:00Z",
    }
    return {"metadata": meta, "spec": {"nodes": ["n"], **spec}}


def test_what_a_status_says_is_what_is_read_of_it() -> None:
    item = manifest(window={"start": "2026-12-01T00:01:00Z"}, maxUnavailable="25%")
    one = maintenance.maintenance(json.dumps(item).encode()).value
    assert (one.created_at, one.start, one.end, one.max_unavailable) == (1796083200.0, 1796083260.0, None, "25%")
    states = (NodeState("n", NodePhase.DRAINING, 1796083261.7, "NodeDraining", "a/b leave it", canary=True),)
    told = Progress(Phase.ACTIVE, states, why(Reason.MAINTENANCE_UNDER_WAY, nodes=1, done=0, skipped=0, now=1))
    item["status"] = maintenance.status(one, told, 1796083262.0)
    again = maintenance.maintenance(json.dumps(item).encode()).value
    assert again.phase is Phase.ACTIVE
    [state] = again.states
    assert (state.name, state.phase, state.since, state.canary) == ("n", NodePhase.DRAINING, 1796083261.0, True)
    assert maintenance.status(again, Progress(Phase.ACTIVE, again.states, told.why), 1796083299.0) == item["status"]


def test_a_test_pod_goes_to_its_node_although_that_is_cordoned_and_tells_what_came_of_it() -> None:
    container = {"name": "test", "image": "cuda"}
    rules = {"namespace": "x", "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [container]}}}
    one = maintenance.maintenance(json.dumps(manifest(test=rules)).encode()).value
    pod = maintenance.test_pod(one, "n")
    assert maintenance.test_pod(one, "n") == pod, "it has the same name whoever makes it"
    assert maintenance.test_pod(one, "o")["metadata"]["name"] != pod["metadata"]["name"]
    assert pod["spec"]["tolerations"] == [{"operator": "Exists"}]
    assert "'values': ['n']" in str(pod["spec"]["affinity"])
    pod["metadata"] |= {"uid": "p", "resourceVersion": "9"}
    ended = {"name": "test", "state": {"terminated": {"exitCode": 3, "message": "no GPU\n"}}}
    pod["status"] = {"phase": "Failed", "containerStatuses": [ended]}
    test = maintenance.node_test(json.dumps(pod).encode()).value
    assert (test.maintenance, test.node, test.phase) == ("u", "n", TestPhase.FAILED)
    assert test.problem == "container test exited with 3: no GPU"
    full = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available: 1 Insufficient memory.."}
    pod["status"] = {"phase": "Pending", "conditions": [full]}
    test = maintenance.node_test(json.dumps(pod).encode()).value
    assert test.problem == "it finds no room: 0/1 nodes are available: 1 Insufficient memory"

"""The form of scenarios: what it refuses and how, and what the command makes of it."""

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from queuectl.simulate.clockwork import run
from queuectl.simulate.form import GPU, read
from queuectl.simulate.verdict import differences

PAGE = Path(__file__).parents[2] / "docs" / "scenarios.md"
SMALL: dict[str, Any] = {
    "nodes": [{"name": "n", "gpus": 8}],
    "queues": [{"name": "q", "quotas": [{"flavor": "default", "resource": GPU, "nominal": 8}]}],
    "jobs": [{"name": "a", "queue": "q", "gpus": 8, "run": 10}, {"name": "b", "queue": "q", "gpus": 8}],
}


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    data = copy.deepcopy(SMALL)
    change(data)
    return data


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda d: d.pop("queues"), "queues: is required; add it"),
        (lambda d: d.update(job=[]), "job: unknown field job; did you mean jobs?"),
        (lambda d: d["jobs"][0].update(pod=1), "jobs[0].pod: unknown field pod; did you mean pods?"),
        (lambda d: d["jobs"][0].update(queue="p"), 'jobs[0].queue: there is no "p"; known are q'),
        (lambda d: d["queues"][0].update(parent="p"), 'queues[0].parent: there is no "p"; known are none'),
        (
            lambda d: d.update(jobs=[{"name": "j", "queue": "p"}], queues=[{"name": f"n{i:02}"} for i in range(30)]),
            "n05, n06, n07, and 22 more",
        ),
        (lambda d: d.update(policy={"fairSharing": "X"}), "policy.fairSharing: 'X' is not a list; write [X]"),
        (lambda d: d["jobs"][0].update(memory="lots"), 'jobs[0].memory: "lots" is not a quantity'),
        (lambda d: d["jobs"][0].update(minPods=2), "jobs[0]: minPods of 2 is more than pods, 1; write"),
        (
            lambda d: d["jobs"][0].update(runs=[1, 2]),
            "jobs[0]: runs has 2 times for 1 pods; write at most one for each",
        ),
        (lambda d: d["jobs"][0].update(runs=[-1]), "jobs[0].runs[0]: -1: input should be greater than or equal to 0"),
        (lambda d: d["jobs"][1].update(name="a"), 'jobs: two are named "a"; give each a name of its own'),
        (lambda d: d["jobs"][0].update(roles=[{"name": "r"}]), "gpus and roles exclude each other"),
        (lambda d: d["queues"][0].update(order="Fifo"), "queues[0].order"),
        (lambda d: d.update(events=[{"at": 1}]), "events[0]: nothing happens; add one of finish, fail"),
        (lambda d: d.update(events=[{"at": 1, "finish": "a", "fail": "a"}]), "several things at once"),
        (lambda d: d.update(events=[{"at": 1, "nodeDown": "m"}]), 'events[0]: there is no "m"; known are n'),
        (
            lambda d: d.update(events=[{"at": 1, "setQuota": {"queue": "q", "flavor": "f"}}]),
            "quotas of queue q may be meant: 0",
        ),
        (lambda d: d.update(want=[{"running": ["a"]}]), "want[0]: running is of a time; add at"),
        (lambda d: d.update(want=[{"at": 1, "reason": {"a": "Hold"}}]), '"Hold" is not a reason; did you mean Held?'),
        (lambda d: d.update(want=[{"neverMoved": ["c"]}]), 'want[0]: there is no "c"; known are a, b'),
    ],
)
def test_what_is_wrong_is_told_with_its_field_and_a_remedy(change: Callable[[Any], object], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        read(changed(change))


@pytest.mark.parametrize(
    "want",
    [
        {"at": 5, "running": ["b"]},
        {"at": 5, "reason": {"b": "WaitingForNodes"}},
        {"at": 5, "pods": {"a": 0}},
        {"at": 20, "finished": ["b"]},
        {"evictions": 1},
        {"evictionsOf": {"a": 1}},
        {"startedBy": {"b": 9}},
        {"startedAfter": {"b": 11}},
    ],
)
def test_what_is_not_as_wanted_differs(want: dict[str, Any]) -> None:
    scenario = read(SMALL | {"want": [want]})
    assert len(differences(scenario, run(scenario))) == 1


def test_an_eviction_is_no_rest_and_moves_a_job() -> None:
    data = changed(lambda d: d["jobs"][1].update(priority=1, at=3))
    data["queues"][0]["preemption"] = {"withinQueue": "LowerPriority"}
    scenario = read(data | {"want": [{"restAfter": 2}, {"neverMoved": ["a"]}, {"restAfter": 3, "neverMoved": ["b"]}]})
    assert [line.split(":")[0] for line in differences(scenario, run(scenario))] == [
        "want[0].restAfter",
        "want[1].neverMoved",
    ]


def test_the_example_of_the_docs_is_as_wanted() -> None:
    [example] = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    scenario = read(yaml.safe_load(example))
    result = run(scenario)
    assert differences(scenario, result) == []
    assert all(entry.why in PAGE.read_text(encoding="utf-8") for entry in result.timeline)


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "queuectl", "simulate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_exits_by_what_it_finds(tmp_path: Path) -> None:
    files = {"good": SMALL, "bad": SMALL | {"want": [{"evictions": 3}]}, "none": {"jobs": []}}
    for name, data in files.items():
        (tmp_path / name).write_text(yaml.safe_dump(data), encoding="utf-8")
    assert simulate(str(tmp_path / "good")).returncode == 0
    differs = simulate(str(tmp_path / "good"), str(tmp_path / "bad"), "-o", "json")
    assert differs.returncode == 6
    assert differs.stderr == "queuectl: not as wanted: 1 of 2 scenarios\n"
    good, bad = json.loads(differs.stdout)
    assert (good["differences"], bad["differences"]) == ([], ["want[0].evictions: 3 wanted, 0 made"])
    assert {"time": 10.0, "job": "b", "what": "Running"}.items() <= good["timeline"][-1].items()
    refused = simulate(str(tmp_path / "none"))
    assert refused.returncode == 4
    assert "queues: is required; add it" in refused.stderr
    assert simulate(str(tmp_path / "missing")).returncode == 2


def test_pods_end_by_the_times_of_their_role_or_their_job() -> None:
    roles = [
        {"name": "shard", "pods": 3, "runs": [5, 7]},
        {"name": "merge", "pods": 2},
        {"name": "server", "mustSucceed": False},
        {"name": "cache", "mustSucceed": False, "runs": [7]},
    ]
    job = {"name": "j", "queue": "q", "run": 20, "roles": roles}
    [form] = read(changed(lambda d: d.update(jobs=[job]))).jobs
    assert form.pod_ends == {
        5: {("shard", 0)},
        7: {("shard", 1), ("shard", 2), ("cache", 0)},
        20: {("merge", 0), ("merge", 1)},
    }

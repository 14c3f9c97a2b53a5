"""queues and nodes: who holds what."""

import json
from dataclasses import replace

import yaml

from queuectl.cli.cluster import Under, views
from queuectl.cli.errors import Exit
from queuectl.model.devices import Allocated, DeviceClaim, Listed, Slice
from queuectl.model.maintenance import Maintenance, NodePhase, NodeState, Phase
from queuectl.model.objects import DeviceKind, Flavor
from queuectl.model.resources import CARD
from tests.support.builders import node
from tests.support.commands import Commands
from tests.support.stage import GPU, Stage


async def test_queues_show_what_waits_runs_and_is_used(live: Stage, staged: Commands) -> None:
    await live.nodes(2)
    root = await live.queue(16)
    child = await live.queue(0, "child", parent=root, order="StrictFIFO")
    await live.submit("runs", 1, 8)
    await live.submit("waits", 2, 8)
    await live.until_phase("runs", "Running")
    await live.until_reason("waits", "WaitingForQuota")
    async with staged.running("queues", "-w") as output:
        await output.until_row(root, "1", "1", "yes")

    table = (await staged("queues", root, child)).rows
    assert table[0] == ["NAME", "PARENT", "ORDER", "PENDING", "RUNNING", "READY"]
    assert table[1] == [root, "-", "BestEffortFIFO", "1", "1", "yes"]
    assert table[2][:5] == [child, root, "StrictFIFO", "0", "0"]
    wide = (await staged("queues", root, "-o", "wide")).rows
    assert wide[0][6:] == ["FLAVOR", "RESOURCE", "USED", "TOTAL", "NOMINAL"]
    assert wide[1][6:] == [live.name, GPU, "8", "16", "16"]
    assert json.loads((await staged("queues", root, "-o", "json")).out)["spec"]["order"] == "BestEffortFIFO"
    assert (await staged("queues", root, "-o", "name")).out == f"queue.queuectl.dev/{root}\n"
    told = (await staged("queues", "nowhere", code=Exit.NOT_FOUND)).err
    assert 'no queue "nowhere"; known are ' in told


async def test_nodes_show_who_holds_their_gpus(live: Stage, staged: Commands) -> None:
    names = await live.nodes(3)
    await live.queue(8)
    await live.submit("mine", 1, 4)
    await live.until_phase("mine", "Running")
    held = (await live.pods("mine"))[0]["spec"]["nodeName"]
    other = next(name for name in names if name != held)
    container = {"name": "main", "image": "other:1", "resources": {"limits": {GPU: 3}}}
    spec = {"containers": [container], "nodeName": other}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other", "namespace": live.namespace}, "spec": spec}
    async with staged.running("nodes", "-w") as output:
        await output.until_row(other, "8", "0", "0", "8", "-")
        await live.create(pod)
        await output.until_row(other, "8", "0", "3", "5", "-")
    cordon = {"spec": {"unschedulable": True}}
    await live.client.request(
        "PATCH", f"/api/v1/nodes/{names[2]}", body=cordon, content_type="application/merge-patch+json"
    )

    rows = {row[0]: row[1:] for row in (await staged("nodes", *names)).rows}
    assert rows["NAME"] == ["STATE", "FLAVOR", "RESOURCE", "GPUS", "HELD", "OTHERS", "FREE", "MAINTENANCE"]
    assert rows[held][3:] == ["8", "4", "0", "4", "-"]
    assert rows[other][3:] == ["8", "0", "3", "5", "-"]
    assert live.name in rows[held][1]
    assert rows[names[2]][0] == ("Ready,Cordoned")
    one = json.loads((await staged("nodes", held, "-o", "json")).out)
    assert one["gpus"] == [{"resource": GPU, "total": 8, "held": 4, "others": 0, "free": 4, "unit": "whole"}]
    assert (one["model"], one["problems"]) == ("NVIDIA-H100-80GB-HBM3", [])
    assert len(yaml.safe_load((await staged("nodes", *names, "-o", "yaml")).out)) == 3
    assert (await staged("nodes", held, "-o", "name")).out == f"node/{held}\n"
    for words in (("nodes",), ("forgive",), ("maintenance", "done")):
        told = (await staged(*words, held[:-1], code=Exit.NOT_FOUND)).err
        assert f'no node "{held[:-1]}"; did you mean ' in told
        assert held in told


def test_wide_nodes_tell_what_their_gpus_are_and_what_can_t_be_right() -> None:
    flavors = [Flavor("own", (("pool", "own"),), gpu_model="T4", gpus=(("example.com/t4", CARD),)), Flavor("any")]
    labels = {
        "pool": "own", "nvidia.com/gpu.product": "Tesla-T4-SHARED", "nvidia.com/gpu.count": "2",
        "nvidia.com/gpu.replicas": "4", "nvidia.com/gpu.sharing-strategy": "mps",
        "nvidia.com/cuda.driver-version.full": "550.1",
    }  # fmt: skip
    has = {"cpu": 8000, "nvidia.com/gpu": 7, "nvidia.com/mig-1g.5gb": 2, "example.com/t4": 3, "example.com/nic": 1}
    sick, plain = (
        replace(node("a", labels=labels), allocatable=has),
        replace(node("b"), allocatable={"example.com/t4": 1}),
    )
    shown = views(flavors, [sick, plain], [])
    rows = [row for view in shown for row in view.rows(wide=True)]
    assert [(row[3], row[4], row[10]) for row in rows] == [
        ("example.com/t4", 3, "shared"), ("nvidia.com/gpu", 7, "shared"), ("nvidia.com/mig-1g.5gb", 2, "slice 1g.5gb"),
        ("", 0, ""),  # only by the other flavor's word is it a GPU
    ]  # fmt: skip
    assert rows[0][9:12:2] == ["Tesla-T4-SHARED", "550.1"]
    few, strategy = shown[0].problems
    assert few == (
        "label nvidia.com/gpu.count is 2 and nvidia.com/gpu.replicas 4, and the node offers 7 nvidia.com/gpu;"
        " right would be 8, unless one is unhealthy"
    )
    assert strategy.endswith("label nvidia.com/mig.strategy is none; right would be mixed")
    assert rows[0][12] == "; ".join(shown[0].problems)


def test_nodes_show_the_maintenance_that_they_belong_to_and_how_far_they_are() -> None:
    def under(name: str, created: float, **phases: NodePhase) -> Maintenance:
        states = tuple(NodeState(n, p, 0.0) for n, p in phases.items())
        return Maintenance(name, created_at=created, nodes=tuple(phases), states=states)

    fans = under("fans", 1, a=NodePhase.RELEASED, b=NodePhase.DRAINING, c=NodePhase.PENDING)
    drivers = under("drivers", 2, a=NodePhase.PENDING, b=NodePhase.PENDING, c=NodePhase.SAFE, d=NodePhase.SKIPPED)
    shown = views([], [node(name) for name in "abcd"], [], maintenances=[drivers, fans])
    assert [row[8] for view in shown for row in view.rows()] == ["drivers:Pending", "fans:Draining", "drivers:Safe", ""]

    halted = replace(under("halted", 0, a=NodePhase.PENDING), phase=Phase.HALTED)  # and leaves it to others
    assert [view.maintenance for view in views([], [node("a")], [], maintenances=[halted, fans, drivers])] == [
        Under("drivers", "Pending")
    ]


def test_nodes_show_what_conditions_say_to_be_at_fault() -> None:
    [view] = views([], [replace(node("a"), faults=("condition GPUMissing is True",), unschedulable=True)], [])
    assert (view.state, view.problems[-1]) == ("Ready,Cordoned,Faulty", "condition GPUMissing is True")


def test_nodes_show_gpus_that_claims_name() -> None:
    kind = DeviceKind("d.example.com", "gpus", GPU, "uuid")
    listed = [
        Listed(f"gpu-{n}", {"d.example.com/uuid": str(n), "d.example.com/productName": "H 100"}) for n in range(4)
    ]
    slices = [Slice("s", "a", "d.example.com", "a", 1, 1, (*listed, Listed("gpu-4")))]
    devices = [Allocated("d.example.com", "a", f"gpu-{n}") for n in range(3)]
    claims = [
        DeviceClaim("1", "team", "mine", workload="uid", devices=tuple(devices[:2])),
        DeviceClaim("2", "team", "other", devices=(devices[2],)),
    ]

    [view] = views([Flavor("named", devices=kind)], [node("a", gpu=0)], [], slices, claims)

    assert view.rows() == [["a", "Ready", "named", GPU, 4, 2, 1, 1, ""]]
    assert view.model == "H-100"
    assert any("device gpu-4" in problem for problem in view.problems)

"""Nodes whose GPUs claims name, on a real control plane: what a driver and an admin would write."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from queuectl.kube import decode
from queuectl.kube.client import APPLY_PATCH, MERGE_PATCH
from queuectl.kube.informer import Informer
from queuectl.kube.names import API, DEVICES_API, claims_path, slices_path
from queuectl.model.devices import Allocated, DeviceClaim
from tests.support import manifests
from tests.support.stage import GPU, STAGE_LABEL, Object, Stage

DRIVER = "gpu.example.com"
PCIE = "resource.kubernetes.io/pcieRoot"
INSIDE = [{"name": "nvlink", "gpus": 4, "attribute": "group"}, {"name": "pcie", "gpus": 2, "attribute": PCIE}]


async def offer(stage: Stage, *, gpus: int, count: int = 1, first: int = 0, by_name: str = "") -> list[str]:
    """Create nodes with devices, of NVLink groups of four; the stage's flavor is one of devices from then on.

    ``by_name``: the extended resource by which pods can ask for them without any claim of their own, too.
    """
    names = await stage.nodes(count, gpus=0, first=first)
    device_class: Object = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": f"by-name.{DRIVER}" if by_name else DRIVER},
        "spec": {"selectors": [{"cel": {"expression": f"device.driver == '{DRIVER}'"}}]},
    }
    if by_name:
        device_class["spec"]["extendedResourceName"] = by_name
    params = {"fieldManager": "test", "force": "true"}
    path = f"{DEVICES_API}/deviceclasses/{device_class['metadata']['name']}"
    await stage.client.request("PATCH", path, params=params, body=device_class, content_type=APPLY_PATCH)
    flavor = manifests.flavor(
        stage.name,
        nodeLabels={STAGE_LABEL: stage.name},
        devices={"driver": DRIVER, "deviceClassName": DRIVER, "resource": by_name or GPU},
        topology={"insideNode": INSIDE},
    )
    path = f"{API}/resourceflavors/{stage.name}"
    await stage.client.request("PATCH", path, body={"spec": flavor["spec"]}, content_type=MERGE_PATCH)
    for name in names:
        uid = (await stage.client.request("GET", f"/api/v1/nodes/{name}"))["metadata"]["uid"]
        await stage.client.request("POST", slices_path(), body=_slice(name, uid, gpus))
    return names


@asynccontextmanager
async def shared_devices(stage: Stage) -> AsyncIterator[list[str]]:
    """Watch the stage's claims; the list has each device that two of them had at any version of the API."""
    holders: dict[Allocated, str] = {}
    found: list[str] = []

    def on_change(old: DeviceClaim | None, new: DeviceClaim | None) -> None:
        for device in old.devices if old else ():
            if holders.get(device) == (old.name if old else ""):
                del holders[device]
        for device in new.devices if new else ():
            other = holders.setdefault(device, new.name if new else "")
            if new is not None and other != new.name:
                found.append(f"{device.device} of {device.pool} is {other}'s and {new.name}'s")

    informer = Informer(stage.client, claims_path(stage.namespace), decode.resource_claim, on_change)
    task = asyncio.create_task(informer.run())
    try:
        await informer.synced.wait()
        yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _slice(node: str, uid: str, gpus: int) -> Object:
    devices = [
        {
            "name": f"gpu-{number}",
            "attributes": {
                "uuid": {"string": f"GPU-{node}-{number}"},
                "group": {"int": number // 4},
                PCIE: {"string": f"pci0000:0{number // 2}"},
            },
        }
        for number in range(gpus)
    ]
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{node}-gpus", "ownerReferences": [owner]},
        "spec": {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": devices},
    }

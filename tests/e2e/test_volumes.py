"""Gangs go where their volumes can be reached, and kube-scheduler agrees. A test binds claims as the binder would."""

from collections.abc import AsyncIterator

import pytest

from queuectl.kube.client import MERGE_PATCH
from tests.support.stage import Object, Stage

ZONE = "topology.kubernetes.io/zone"
MODE, STORAGE = "ReadWriteMany", "1Gi"


@pytest.fixture
async def claims(live: Stage) -> AsyncIterator["Claims"]:
    result = Claims(live)
    try:
        yield result
    finally:
        await result.close()


class Claims:
    """Claims of the stage's namespace, with volumes that were made for them."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._paths: list[str] = []

    async def bound(self, name: str, *, zone: str) -> None:
        """Create a claim and a volume that only nodes of a zone reach, bound to each other."""
        stage, volume = self._stage, f"{self._stage.name}-{name}"
        spec = {"accessModes": [MODE], "storageClassName": "", "volumeName": volume}
        claim = await self._create(
            "PersistentVolumeClaim", name, {**spec, "resources": {"requests": {"storage": STORAGE}}}
        )
        expression = {"key": ZONE, "operator": "In", "values": [zone]}
        ref = {key: claim["metadata"][key] for key in ("namespace", "name", "uid")}
        await self._create(
            "PersistentVolume",
            volume,
            {
                "accessModes": [MODE],
                "capacity": {"storage": STORAGE},
                "hostPath": {"path": "/data"},
                "claimRef": {"kind": "PersistentVolumeClaim", "apiVersion": "v1", **ref},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}},
            },
        )
        done = {"metadata": {"annotations": {"pv.kubernetes.io/bind-completed": "yes"}}}
        for path in self._paths[-2:]:
            status = {"status": {"phase": "Bound"}}
            await stage.client.request("PATCH", f"{path}/status", body=status, content_type=MERGE_PATCH)
        await stage.client.request("PATCH", self._paths[-2], body=done, content_type=MERGE_PATCH)

    async def close(self) -> None:
        for path in self._paths:  # no controller takes the finalizers away
            await self._stage.client.request("DELETE", path)
            body = {"metadata": {"finalizers": None}}
            await self._stage.client.request("PATCH", path, body=body, content_type=MERGE_PATCH)

    async def _create(self, kind: str, name: str, spec: Object) -> Object:
        namespaced = kind == "PersistentVolumeClaim"
        meta = {"name": name} | ({"namespace": self._stage.namespace} if namespaced else {})
        created = await self._stage.create({"apiVersion": "v1", "kind": kind, "metadata": meta, "spec": spec})
        base = f"/api/v1/namespaces/{self._stage.namespace}" if namespaced else "/api/v1"
        self._paths.append(f"{base}/{kind.lower()}s/{name}")
        return created


async def test_a_gang_goes_to_the_zone_of_its_volume_waits_for_it_and_is_bound(live: Stage, claims: Claims) -> None:
    await live.nodes(2, labels={ZONE: "a"})
    [home] = await live.nodes(1, first=2, labels={ZONE: "b"})
    await live.queue(32)
    pod = {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]}
    await live.submit("first", 2, 4, pod=pod)
    told = await live.until_reason("first", "VolumeNotReady")
    assert "uses claim data, and it does not exist" in told["status"]["message"]

    await claims.bound("data", zone="b")
    running = await live.until_phase("first", "Running")
    assert {p["spec"]["nodeName"] for p in await live.pods("first")} == {home}
    assert not [one for one in running["status"]["conditions"] if one["type"] == "PlaceUncertain"]

    await live.submit("second", 1, 8, pod=pod)
    told = await live.until_reason("second", "WaitingForNodes")
    assert "its volumes can't be reached from 2 other nodes" in told["status"]["message"]
    await live.delete_job("first")
    second = await live.until_phase("second", "Running")
    assert second["status"]["attempt"] == 1
    assert [p["spec"]["nodeName"] for p in await live.pods("second")] == [home]

"""Claims on a control plane that has no binder: they are bound as it would have done."""

from collections.abc import Mapping

from queuectl.kube.client import MERGE_PATCH, ApiError
from tests.support.stage import Object, Stage

MODE, STORAGE = "ReadWriteMany", "1Gi"


class Claims:
    """Claims of the stage's namespace, with volumes that were made for them."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._paths: list[str] = []

    async def bound(self, name: str, *, reach: Mapping[str, str] = {}, labels: Mapping[str, str] = {}) -> None:
        """Create a claim and a volume, bound to each other. `reach`: labels of the nodes from which it can be used."""
        stage, volume = self._stage, f"{self._stage.name}-{name}"
        spec = {"accessModes": [MODE], "storageClassName": "", "volumeName": volume}
        storage = {"resources": {"requests": {"storage": STORAGE}}}
        claim = await self._create("PersistentVolumeClaim", name, spec | storage)
        ref = {key: claim["metadata"][key] for key in ("namespace", "name", "uid")}
        expressions = [{"key": key, "operator": "In", "values": [value]} for key, value in reach.items()]
        required = {"required": {"nodeSelectorTerms": [{"matchExpressions": expressions}]}}
        await self._create(
            "PersistentVolume",
            volume,
            {
                "accessModes": [MODE],
                "capacity": {"storage": STORAGE},
                "hostPath": {"path": "/data"},
                "claimRef": {"kind": "PersistentVolumeClaim", "apiVersion": "v1", **ref},
                **({"nodeAffinity": required} if reach else {}),
            },
            labels,
        )
        of_claim, of_volume = self._paths[-2:]
        for path in (of_claim, of_volume):
            status = {"status": {"phase": "Bound"}}
            await stage.client.request("PATCH", f"{path}/status", body=status, content_type=MERGE_PATCH)
        done = {"metadata": {"annotations": {"pv.kubernetes.io/bind-completed": "yes"}}}
        await stage.client.request("PATCH", of_claim, body=done, content_type=MERGE_PATCH)

    async def close(self) -> None:
        """Remove all of it, whether or not a controller takes the finalizers away."""
        for path in self._paths:
            await self._stage.client.request("DELETE", path)
            body = {"metadata": {"finalizers": None}}
            try:
                await self._stage.client.request("PATCH", path, body=body, content_type=MERGE_PATCH)
            except ApiError as error:
                if error.reason != "NotFound":
                    raise

    async def _create(self, kind: str, name: str, spec: Object, labels: Mapping[str, str] = {}) -> Object:
        namespaced = kind == "PersistentVolumeClaim"
        meta: Object = {"name": name, "labels": dict(labels)}
        meta |= {"namespace": self._stage.namespace} if namespaced else {}
        created = await self._stage.create({"apiVersion": "v1", "kind": kind, "metadata": meta, "spec": spec})
        base = f"/api/v1/namespaces/{self._stage.namespace}" if namespaced else "/api/v1"
        self._paths.append(f"{base}/{kind.lower()}s/{name}")
        return created

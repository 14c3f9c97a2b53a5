"""Claims and volumes on a real control plane, whose binder binds them."""

from collections.abc import Mapping

from queuectl.kube.client import MERGE_PATCH, ApiError
from tests.support.eventually import eventually
from tests.support.stage import Object, Stage

STORAGE = {"storage": "1Gi"}


class Claims:
    """Claims of the stage's namespace, and volumes and StorageClasses with its name in theirs."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._paths: list[str] = []

    async def bound(self, name: str, *, reach: Mapping[str, str] = {}, labels: Mapping[str, str] = {}) -> None:
        """Create a claim with a volume of its own. `reach`: labels of the nodes from which it can be used."""
        spec = {"accessModes": ["ReadWriteMany"], "storageClassName": "", "resources": {"requests": STORAGE}}
        volume = f"{self._stage.name}-{name}"
        path = f"/api/v1/namespaces/{self._stage.namespace}/persistentvolumeclaims"
        claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "spec": {**spec, "volumeName": volume}}
        await self._create(path, claim, name)
        await self.volume(name, reach=reach, labels=labels)

        async def done() -> bool:
            seen = await self._stage.client.request("GET", f"{path}/{name}")
            return "pv.kubernetes.io/bind-completed" in seen["metadata"].get("annotations", {})

        await eventually(done, f"claim {name} is bound")

    async def volume(
        self, name: str, *, reach: Mapping[str, str] = {}, labels: Mapping[str, str] = {}, storage_class: str = ""
    ) -> None:
        """Create a volume that any claim of the class may have."""
        expressions = [{"key": key, "operator": "In", "values": [value]} for key, value in reach.items()]
        spec: Object = {
            "accessModes": ["ReadWriteMany", "ReadWriteOnce"],
            "capacity": STORAGE,
            "hostPath": {"path": "/data"},
            "storageClassName": storage_class,
        }
        if reach:
            spec["nodeAffinity"] = {"required": {"nodeSelectorTerms": [{"matchExpressions": expressions}]}}
        volume = {"apiVersion": "v1", "kind": "PersistentVolume", "spec": spec}
        await self._create("/api/v1/persistentvolumes", volume, f"{self._stage.name}-{name}", labels)

    async def storage_class(self, *, allowed: Mapping[str, str]) -> str:
        """Create a class that waits for pods and has only volumes made beforehand. `allowed`: labels of nodes."""
        expressions = [{"key": key, "values": [value]} for key, value in allowed.items()]
        kind = {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "provisioner": "kubernetes.io/no-provisioner",
            "volumeBindingMode": "WaitForFirstConsumer",
            "allowedTopologies": [{"matchLabelExpressions": expressions}],
        }
        await self._create("/apis/storage.k8s.io/v1/storageclasses", kind, self._stage.name)
        return self._stage.name

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

    async def _create(self, path: str, body: Object, name: str, labels: Mapping[str, str] = {}) -> None:
        await self._stage.client.request("POST", path, body=body | {"metadata": {"name": name, "labels": dict(labels)}})
        self._paths.append(f"{path}/{name}")

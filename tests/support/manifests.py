"""Manifests of our kinds, the smallest that are accepted, to be varied."""

from typing import Any

from queuectl.kube.names import API_VERSION

Manifest = dict[str, Any]


def container(name: str = "main", *, gpu: int | str | None = 1, **more: Any) -> Manifest:
    resources = {} if gpu is None else {"resources": {"requests": {"cpu": "500m", "nvidia.com/gpu": gpu}}}
    return {"name": name, "image": "train:1", **resources, **more}


def role(name: str = "worker", replicas: Any = 2, *containers: Manifest, **more: Any) -> Manifest:
    template = {"spec": {"containers": list(containers or [container()])}}
    return {"name": name, "replicas": replicas, "template": template, **more}


def job(name: str = "llm", *roles: Manifest, namespace: str = "default", **spec: Any) -> Manifest:
    return {
        "apiVersion": API_VERSION,
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"queue": "team-a", "roles": list(roles or [role()]), **spec},
    }


def queue(name: str = "team-a", **spec: Any) -> Manifest:
    return {"apiVersion": API_VERSION, "kind": "Queue", "metadata": {"name": name}, "spec": spec}


def quota(nominal: Any = 8, *, flavor: str = "h100", resource: str = "nvidia.com/gpu") -> Manifest:
    return {"flavor": flavor, "resource": resource, "nominal": nominal}


def flavor(name: str = "h100", **spec: Any) -> Manifest:
    return {"apiVersion": API_VERSION, "kind": "ResourceFlavor", "metadata": {"name": name}, "spec": spec}


def maintenance(name: str = "fans", **spec: Any) -> Manifest:
    spec = {"nodes": ["gpu-07"], **spec}
    given = {key: value for key, value in spec.items() if value is not None}
    return {"apiVersion": API_VERSION, "kind": "NodeMaintenance", "metadata": {"name": name}, "spec": given}


def with_pod(manifest: Manifest, **fields: Any) -> Manifest:
    """Add fields to the pod spec of the first role."""
    manifest["spec"]["roles"][0]["template"]["spec"] |= fields
    return manifest


def collection(manifest: Manifest) -> str:
    """Return the URL path under which objects of this kind are."""
    base = f"/apis/{API_VERSION}"
    namespace = manifest["metadata"].get("namespace")
    plural = f"{manifest['kind'].lower()}s"
    return f"{base}/namespaces/{namespace}/{plural}" if namespace else f"{base}/{plural}"

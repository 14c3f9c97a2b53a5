"""The generated files are current, the schemas are complete, and the API server takes all that config/ renders."""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from queuectl.control.settings import Settings
from queuectl.kube import manifests
from queuectl.kube.client import APPLY_PATCH, KubeClient

ROOT = Path(__file__).parents[2]
NAMESPACE = "queuectl-system"


def test_generated_files_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert manifests.main(["--check", "--root", str(ROOT)]) == 0
    assert capsys.readouterr().err == ""


def test_check_names_what_is_not_current(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert manifests.main(["--write", "--root", str(tmp_path)]) == 0
    assert manifests.main(["--check", "--root", str(tmp_path)]) == 0
    (tmp_path / "crds/queues.yaml").write_text("kind: Other\n")
    (tmp_path / "config/base/policies.yaml").unlink()
    capsys.readouterr()

    assert manifests.main(["--check", "--root", str(tmp_path)]) == 1
    assert {line.rpartition(" ")[2] for line in capsys.readouterr().err.splitlines()} == {
        "crds/queues.yaml",
        "config/base/policies.yaml",
    }


def test_files_hold_what_all_manifests_returns() -> None:
    loaded = [item for text in manifests.files().values() for item in yaml.safe_load_all(text)]

    def by_name(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return sorted(items, key=lambda item: (item["kind"], item["metadata"]["name"]))

    assert by_name(loaded) == by_name(manifests.all_manifests())


def fields(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, part in schema.get("properties", {}).items():
        yield f"{path}.{name}", part
        yield from fields(part, f"{path}.{name}")
    for inner in ("items", "additionalProperties"):
        if inner in schema:
            yield f"{path}[]", schema[inner]
            yield from fields(schema[inner], f"{path}[]")


@pytest.mark.parametrize("crd", manifests.crds(), ids=lambda crd: crd["spec"]["names"]["plural"])
def test_every_field_is_described_and_bounded(crd: dict[str, Any]) -> None:
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert schema["description"]
    for path, part in fields(schema, ""):
        if path.startswith(".metadata") or path in {".apiVersion", ".kind"}:
            continue
        assert path.endswith("[]") or part["description"].endswith("."), path
        if part.get("type") == "string":
            assert {"maxLength", "enum", "format"} & part.keys(), path
        if part.get("type") == "array":
            assert "maxItems" in part, path
        if "additionalProperties" in part:
            assert "maxProperties" in part, path


def render(folder: Path) -> list[dict[str, Any]]:
    """Return the objects of a kustomization that only lists resources."""
    text = (folder / "kustomization.yaml").read_text()
    kustomization = yaml.safe_load(text)
    assert kustomization.keys() == {"apiVersion", "kind", "resources"}
    objects = []
    for entry in kustomization["resources"]:
        path = (folder / entry).resolve()
        if path.is_dir():
            objects += render(path)
        else:
            # kustomize refuses files outside of the kustomization's own folder.
            assert path.is_relative_to(folder.resolve())
            objects += list(yaml.safe_load_all(path.read_text()))
    return objects


RENDERED = {name: render(ROOT / "config" / name) for name in ("base", "overlays/trial")}


def every(kind: str) -> list[dict[str, Any]]:
    return [item for item in RENDERED["overlays/trial"] if item["kind"] == kind]


@pytest.fixture
async def namespace(kube: KubeClient) -> str:
    (item,) = every("Namespace")
    await apply(kube, item, dry_run=False)
    return NAMESPACE


async def apply(kube: KubeClient, item: dict[str, Any], *, dry_run: bool = True) -> dict[str, Any]:
    group = item["apiVersion"]
    base = f"/apis/{group}" if "/" in group else f"/api/{group}"
    kind = item["kind"].lower()
    plural = kind[:-1] + "ies" if kind.endswith("y") else kind + ("es" if kind.endswith("s") else "s")
    within = f"/namespaces/{item['metadata']['namespace']}" if "namespace" in item["metadata"] else ""
    params = {"fieldManager": "test", "fieldValidation": "Strict", "force": "true"}
    applied: dict[str, Any] = await kube.request(
        "PATCH",
        f"{base}{within}/{plural}/{item['metadata']['name']}",
        params=params | ({"dryRun": "All"} if dry_run else {}),
        body=item,
        content_type=APPLY_PATCH,
    )
    return applied


@pytest.mark.parametrize("overlay", RENDERED)
async def test_the_api_server_takes_every_object(kube: KubeClient, namespace: str, overlay: str) -> None:
    identities = [(item["kind"], item["metadata"]["name"]) for item in RENDERED[overlay]]
    assert len(set(identities)) == len(identities)
    for item in RENDERED[overlay]:
        applied = await apply(kube, item)
        assert applied["metadata"]["name"] == item["metadata"]["name"]


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
async def test_pods_keep_to_the_restricted_pod_security_standard(kube: KubeClient, namespace: str, kind: str) -> None:
    (item,) = every(kind)
    pod = deepcopy(item["spec"]["template"])
    pod["spec"].pop("serviceAccountName", None)
    meta = {**pod["metadata"], "name": "pod", "namespace": namespace}
    if kind == "StatefulSet":
        pod["spec"]["volumes"].append({"name": "data", "emptyDir": {}})

    # The namespace enforces the standard, on pods alone.
    created = await apply(kube, {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod["spec"]})

    (container,) = created["spec"]["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["resources"].keys() >= {"requests", "limits"}


def test_the_deployment_refers_to_what_is_there() -> None:
    names = {(item["kind"], item["metadata"]["name"]) for item in RENDERED["overlays/trial"]}
    (deployment,) = every("Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]

    assert deployment["spec"]["replicas"] == 2
    assert deployment["spec"]["selector"]["matchLabels"] == deployment["spec"]["template"]["metadata"]["labels"]
    assert ("ServiceAccount", deployment["spec"]["template"]["spec"]["serviceAccountName"]) in names
    assert {("ConfigMap", source["configMapRef"]["name"]) for source in container["envFrom"]} <= names
    secrets = {(item["metadata"]["name"], key) for item in every("Secret") for key in item["stringData"]}
    for variable in container["env"]:
        reference = variable["valueFrom"]["secretKeyRef"]
        assert (reference["name"], reference["key"]) in secrets


def test_the_config_map_holds_settings_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    (config,) = every("ConfigMap")
    (deployment,) = every("Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    prefix = Settings.model_config["env_prefix"]
    assert {key.removeprefix(prefix).lower() for key in config["data"]} <= Settings.model_fields.keys()
    for key, value in config["data"].items():
        monkeypatch.setenv(key, value)

    settings = Settings()  # type: ignore[call-arg]  # from the environment

    assert settings.host == "0.0.0.0"
    assert settings.port == container["ports"][0]["containerPort"]


def test_the_controllers_rights_name_no_wildcards_and_no_secrets() -> None:
    roles = [*every("ClusterRole"), *every("Role")]
    granted = [value for role in roles for rule in role["rules"] for values in rule.values() for value in values]

    assert "*" not in granted
    assert not {"secrets", "configmaps", "roles", "clusterroles", "bind", "escalate", "impersonate"} & set(granted)

"""What a pod has of its node for itself, and what of it nobody promises."""

from typing import Any

import pytest

from queuectl.kube.alone import alone, unpromised
from queuectl.model.resources import ALONE

APP = {"app": "llm"}


def _ports(*ports: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {"containers": [{"name": "main", "ports": list(ports)}], **spec}


def _anti(*terms: dict[str, Any]) -> dict[str, Any]:
    return {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": list(terms)}}}


def _term(labels: dict[str, str] | None = None, key: str = "kubernetes.io/hostname", **more: Any) -> dict[str, Any]:
    return {"labelSelector": {"matchLabels": labels or APP}, "topologyKey": key, **more}


PORTS = {
    "of a host": (_ports({"containerPort": 80, "hostPort": 8080}), {"hostport-TCP-8080"}),
    "of a protocol": (_ports({"containerPort": 80, "hostPort": 53, "protocol": "UDP"}), {"hostport-UDP-53"}),
    "of the container alone": (_ports({"containerPort": 80}), set()),
    "all of a pod on its host's network": (_ports({"containerPort": 80}, hostNetwork=True), {"hostport-TCP-80"}),
    "of a sidecar": (
        {"initContainers": [{"restartPolicy": "Always", "ports": [{"containerPort": 1, "hostPort": 1}]}]},
        {"hostport-TCP-1"},
    ),
    "of what runs before": ({"initContainers": [{"ports": [{"containerPort": 1, "hostPort": 1}]}]}, set()),
    "at two addresses": (
        _ports(
            {"containerPort": 1, "hostPort": 1, "hostIP": "10.0.0.1"}, {"containerPort": 1, "hostPort": 1, "hostIP": ""}
        ),
        {"hostport-TCP-1"},
    ),
}


@pytest.mark.parametrize(("spec", "names"), PORTS.values(), ids=PORTS.keys())
def test_ports(spec: dict[str, Any], names: set[str]) -> None:
    assert alone([(spec, {})], "team") == [dict.fromkeys(names, ALONE)]


def test_pods_that_are_to_be_apart_need_all_of_what_a_node_has_and_those_they_avoid_a_part() -> None:
    kinds = [(_anti(_term()), APP), ({}, {**APP, "role": "logger"}), ({}, {"app": "other"})]
    [needs, beside, nothing] = alone(kinds, "team")
    [name] = needs
    assert needs == {name: ALONE}
    assert beside == {name: 1}
    assert nothing == {}


def test_who_avoids_the_same_labels_in_the_same_namespace_is_apart_from_each_other() -> None:
    expressions = {"matchExpressions": [{"key": "app", "operator": "In", "values": ["llm"]}]}
    same = {"labelSelector": expressions, "topologyKey": "kubernetes.io/hostname"}
    assert alone([(_anti(_term()), APP)], "team") == alone([(_anti(same), APP)], "team")
    assert alone([(_anti(_term()), APP)], "team") != alone([(_anti(_term()), APP)], "other")


SPREAD = {"maxSkew": 1, "topologyKey": "zone", "labelSelector": {}}
FIELDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nothing": ({"volumes": [{"name": "tmp", "emptyDir": {}}], "affinity": None}, []),
    "apart from its like": (_anti(_term()), []),
    "apart from others": (_anti(_term({"app": "other"})), ["affinity.podAntiAffinity"]),
    "apart by rack": (_anti(_term(key="rack")), ["affinity.podAntiAffinity"]),
    "apart across namespaces": (_anti(_term(namespaceSelector={})), ["affinity.podAntiAffinity"]),
    "beside others": (
        {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [_term()]}}},
        ["affinity.podAffinity"],
    ),
    "rather beside others": (
        {"affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [_term()]}}},
        [],
    ),
    "spread": ({"topologySpreadConstraints": [SPREAD]}, ["topologySpreadConstraints"]),
    "rather spread": ({"topologySpreadConstraints": [{**SPREAD, "whenUnsatisfiable": "ScheduleAnyway"}]}, []),
    "another scheduler": ({"schedulerName": "mine"}, ["schedulerName"]),
    "the usual scheduler": ({"schedulerName": "default-scheduler"}, []),
    "devices by claim": ({"resourceClaims": [{"name": "gpu"}]}, ["resourceClaims"]),
}


@pytest.mark.parametrize(("spec", "fields"), FIELDS.values(), ids=FIELDS.keys())
def test_what_is_not_promised(spec: dict[str, Any], fields: list[str]) -> None:
    assert unpromised(spec, APP) == fields

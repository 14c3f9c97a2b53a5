"""From a pydantic model to a CustomResourceDefinition with a structural schema."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from queuectl.kube.names import GROUP, VERSION

_KEPT = {
    "default", "description", "enum", "format", "items", "maxItems", "maxLength", "maxProperties", "maximum",
    "minItems", "minLength", "minProperties", "minimum", "pattern", "properties", "required", "type",
}  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A column of ``kubectl get``; a ``wide`` one is shown with ``-o wide``."""

    name: str
    path: str
    type: str = "string"
    wide: bool = False


@dataclass(frozen=True)
class Resource:
    """A kind of ours as the API server knows it."""

    model: type[BaseModel]
    plural: str
    short_names: tuple[str, ...]
    columns: tuple[Column, ...]
    namespaced: bool = False
    categories: tuple[str, ...] = field(default=("queuectl",))


def crd(resource: Resource) -> dict[str, Any]:
    """Return the CustomResourceDefinition of a kind."""
    kind = resource.model.__name__
    version: dict[str, Any] = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": [_column(column) for column in resource.columns],
        "schema": {"openAPIV3Schema": structural(resource.model)},
    }
    if "status" in resource.model.model_fields:
        version["subresources"] = {"status": {}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{resource.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": resource.plural,
                "singular": kind.lower(),
                "shortNames": list(resource.short_names),
                "categories": list(resource.categories),
            },
            "scope": "Namespaced" if resource.namespaced else "Cluster",
            "versions": [version],
        },
    }


def structural(model: type[BaseModel]) -> dict[str, Any]:
    """Return the model's schema as the API server wants it: no references, no unions, no nulls."""
    schema = model.model_json_schema(by_alias=True)
    result = _pass(schema, schema.get("$defs", {}))
    # The API server owns these three: it allows no constraint on them here, but one of the name, which CEL needs
    # to reckon what a message with the name costs.
    result["properties"] |= {
        "apiVersion": {"type": "string", "description": "The API's group and version."},
        "kind": {"type": "string", "description": "The kind of object."},
        "metadata": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 253}}},
    }
    return result


def _pass(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> dict[str, Any]:
    schema = _resolved(schema, defs)
    result = {key: value for key, value in schema.items() if key in _KEPT or key.startswith("x-kubernetes-")}
    if "const" in schema:
        result["enum"] = [schema["const"]]
    if result.get("default", ...) in (None, {}):  # pydantic's way of saying optional
        del result["default"]
    if "properties" in schema:
        result["properties"] = {name: _pass(part, defs) for name, part in schema["properties"].items()}
    if "items" in schema:
        result["items"] = _pass(schema["items"], defs)
    match schema.get("additionalProperties"):
        case True:
            result["x-kubernetes-preserve-unknown-fields"] = True
        case dict() as values:
            result["additionalProperties"] = _pass(values, defs)
    return result


def _resolved(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> dict[str, Any]:
    """Replace a reference or an optional by what it stands for; keys beside it win."""
    own = dict(schema)
    if "$ref" in own:
        target = defs[own.pop("$ref").rpartition("/")[2]]
    elif "anyOf" in own:
        (target,) = (option for option in own.pop("anyOf") if option.get("type") != "null")
    else:
        return own
    return _resolved({**target, **own}, defs)


def _column(column: Column) -> dict[str, Any]:
    result: dict[str, Any] = {"name": column.name, "type": column.type, "jsonPath": column.path}
    return result | {"priority": 1} if column.wide else result

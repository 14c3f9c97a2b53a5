"""Objects of ours as users write them: YAML or JSON, from files or stdin."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from queuectl.cli.errors import CommandError, Exit
from queuectl.kube.crds import KINDS
from queuectl.kube.names import API, API_VERSION, jobs_path
from queuectl.kube.problems import problems

try:
    from yaml import CSafeLoader as _SafeLoader
except ImportError:  # PyYAML without libyaml
    from yaml import SafeLoader as _SafeLoader  # type: ignore[assignment]

_MODELS = {model.__name__: model for model in KINDS}
_FIELDS = "apiVersion, kind, metadata and spec"
_OF_THE_SERVER = ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "selfLink")


@dataclass
class Document:
    """One object and where it stands. ``problems`` are pairs of a field and a sentence."""

    source: str
    data: dict[str, Any]
    problems: list[tuple[str, str]] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """The object's kind."""
        return str(self.data.get("kind"))

    @property
    def name(self) -> str:
        """The object's name, or the beginning of one."""
        meta = self.data.get("metadata") or {}
        return str(meta.get("name") or meta.get("generateName") or "") if isinstance(meta, Mapping) else ""

    @property
    def spec(self) -> Mapping[str, Any]:
        """The object's spec."""
        spec: Mapping[str, Any] = self.data.get("spec") or {}
        return spec

    @property
    def path(self) -> str:
        """Where objects of this kind are in the API."""
        if self.kind == "TrainingJob":
            return jobs_path(self.data["metadata"]["namespace"])
        return f"{API}/{self.kind.lower()}s"

    def lines(self) -> Iterator[str]:
        """Yield each problem as a line."""
        label = " ".join(filter(None, (self.kind if "kind" in self.data else "", self.name)))
        for where, sentence in self.problems:
            yield ": ".join(filter(None, (self.source, label, where, sentence)))


def read(files: Sequence[str], *, what: str = "TrainingJob", fields: str = _FIELDS) -> list[Document]:
    """Read all documents, each of which has such fields. Raises CommandError for what can't be read or isn't YAML."""
    found: list[Document] = []
    for file in files:
        name = "standard input" if file == "-" else file
        try:
            text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        except OSError as error:
            raise CommandError(f"{file}: {error.strerror}; name a file, or - for standard input", Exit.USAGE) from error
        except UnicodeDecodeError as error:
            raise CommandError(f"{name} is not UTF-8 text: {error.reason}", Exit.REFUSED) from error
        items = [item for document in _parse(name, text) for item in _flat(document)]
        for number, item in enumerate(items, 1):
            source = name if len(items) == 1 else f"{name}, document {number}"
            if not isinstance(item, dict):
                raise CommandError(
                    f"{source}: this is {_kind_of(item)}, not an object; write {fields}",
                    Exit.REFUSED,
                )
            found.append(Document(source, item))
    if not found:
        raise CommandError(f"{', '.join(files)}: no documents; write at least one {what}, with {fields}", Exit.REFUSED)
    return found


def check(document: Document, namespace: str | None, default_namespace: str) -> None:
    """Validate a document by its model, put it into its namespace, and note what is wrong."""
    data = document.data
    model = _MODELS.get(document.kind)
    if data.get("apiVersion") != API_VERSION:
        told = f'"{data["apiVersion"]}" is not ours' if "apiVersion" in data else "is required"
        document.problems.append(("apiVersion", f"{told}; write {API_VERSION}"))
    if model is None:
        told = f'"{data["kind"]}" can\'t be submitted' if "kind" in data else "is required"
        document.problems.append(("kind", f"{told}; write {', '.join(_MODELS)}"))
    if model is None or document.problems:
        return
    # What the API server wrote, so that what "get -o yaml" shows can be submitted again.
    data.pop("status", None)
    meta = data.get("metadata")
    if isinstance(meta, dict):
        for key in _OF_THE_SERVER:
            meta.pop(key, None)
    try:
        model.model_validate(data)
    except ValidationError as error:
        document.problems.extend(problems(error, model))
        return
    meta = data["metadata"]
    if not meta.get("name") and not meta.get("generateName"):
        document.problems.append(("metadata.name", "is required; add it, or generateName"))
    elif model.__name__ == "TrainingJob":
        own = meta.setdefault("namespace", namespace or default_namespace)
        if namespace and own != namespace:
            document.problems.append(
                ("metadata.namespace", f'"{own}" is not the "{namespace}" of -n; leave out one of them')
            )


def _parse(name: str, text: str) -> list[Any]:
    try:
        return [document for document in yaml.load_all(text, _Loader) if document is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise CommandError(
            f"{name}: {where}{error.problem or error.context}; the YAML must be mended there", Exit.REFUSED
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise CommandError(f"{name} is not YAML: {' '.join(str(error).split())}", Exit.REFUSED) from error


def _flat(document: Any) -> Iterator[Any]:
    if isinstance(document, dict) and document.get("kind") == "List" and isinstance(document.get("items"), list):
        yield from document["items"]
    else:
        yield document


def _kind_of(value: object) -> str:
    return {list: "a list", str: "a text", bool: "a truth value"}.get(type(value), "a number")


class _Loader(_SafeLoader):
    """Reads YAML as Kubernetes does: keys are texts and occur once, and times are texts."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a text", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f'the key "{key.value}" occurs twice', key.start_mark
                )
            seen.add(key.value)
            key.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)


# No times, and no numbers to the base of 60: 12:30 is a text.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":int", ":float"))]
    for first, resolvers in _SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^[-+]?(0b[01_]+|0[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$"),
    list("-+0123456789"),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?|\.[0-9][0-9_]*([eE][-+]?[0-9]+)?)$"),
    list("-+0123456789."),
)

"""Field types of the API that say in words what is wrong, in Python and in CEL alike."""

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from queuectl.model.resources import CARDS, QUANTITY_PATTERN, is_extended, is_whole, parse_quantity

LABEL_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
SUBDOMAIN_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
QUALIFIED_PATTERN = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
RESOURCE_PATTERN = (
    r"^(cpu|memory|ephemeral-storage|pods|hugepages-[1-9][0-9]*[KMG]i"
    r"|[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)$"
)
NOT_A_RESOURCE = (
    "is not a resource; write cpu, memory, ephemeral-storage, pods, hugepages-2Mi or the full name of a device, such as"
    " nvidia.com/gpu"
)
NOT_A_QUANTITY = "is not a quantity; write 8 or 64Gi"
NOT_WHOLE = "is not a whole number, and devices come in whole ones"
BELOW_ZERO = "is below zero; write 0 or more"
MAX_SECONDS = 10 * 366 * 86_400  # of any time limit


def rule(cel: str, message: str = "", *, says: str = "", field: str = "") -> dict[str, str]:
    """Return a CEL rule with a fixed ``message``, or one that the CEL expression ``says`` makes."""
    entry = {"rule": cel, "message": message, "messageExpression": says, "fieldPath": field}
    return {key: value for key, value in entry.items() if value}


def rules(*entries: dict[str, str]) -> dict[str, Any]:
    """Return the rules as extra keys of a JSON schema."""
    return {"x-kubernetes-validations": list(entries)}


@dataclass(frozen=True)
class Matching:
    """Marks a string that must match ``pattern``; the error says ``remedy`` instead of showing the pattern."""

    pattern: str
    remedy: str
    longest: int

    def check(self, value: str) -> str:
        """Return the value; raises ValueError when it doesn't match."""
        if not re.fullmatch(self.pattern, value):
            raise ValueError(f'"{value}" {self.remedy}')
        return value

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Check the length, then the pattern."""
        text = core_schema.str_schema(strict=True, max_length=self.longest)
        return core_schema.no_info_after_validator_function(self.check, text)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Say the same in CEL."""
        says = f"'\"' + self + '\" {self.remedy}'"
        return {
            "type": "string",
            "maxLength": self.longest,
            **rules(rule(f"self.matches('{self.pattern}')", says=says)),
        }


class AmountMarker:
    """Marks a quantity: an int or a string, not negative."""

    def check(self, value: object) -> int | str:
        """Return the value as written; raises ValueError when it isn't a quantity or is negative."""
        if isinstance(value, bool) or not isinstance(value, int | str):
            part = f'a part as text, "{value}" or 500m; of devices such as GPUs there are only whole ones'
            raise ValueError(f"{value!r} {NOT_A_QUANTITY}, {part}")  # noqa: TRY004 - pydantic's way
        if not re.fullmatch(QUANTITY_PATTERN, str(value)):
            raise ValueError(f'"{value}" {NOT_A_QUANTITY}')
        if parse_quantity("", value) < 0:
            raise ValueError(f"{value} {BELOW_ZERO}")
        return value

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Keep the value as the user wrote it."""
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return Kubernetes' int-or-string.

        Its CEL cost is reckoned as that of a 3 MiB string, too dear for every request of every container. So an
        admission policy looks at the text (see ``queuectl.kube.policies``).
        """
        return {"x-kubernetes-int-or-string": True, "minimum": 0}


def check_whole(resource: str, **amounts: int | str | None) -> None:
    """Raise ValueError for a part of a device, by the name of its field."""
    for name, amount in amounts.items():
        if amount is not None and is_extended(resource) and resource != CARDS and not is_whole(amount):
            raise ValueError(f"{name}: {amount} {NOT_WHOLE}")


_LABEL_REMEDY = "is not a name; use lower-case letters, digits and -, such as worker-a"
LabelName = Annotated[str, Matching(LABEL_PATTERN, _LABEL_REMEDY, 63)]
LevelName = Annotated[
    str, Matching(LABEL_PATTERN, "is not the name of a level; use lower-case letters, digits and -", 63)
]
Weight = Annotated[
    str, Matching("^[1-9][0-9]{0,2}/[1-9][0-9]{0,2}$", "is not a weight; write it as a fraction, such as 1/7", 7)
]
Slice = Annotated[
    str,
    Matching(
        r"^[0-9a-z]+[._][0-9a-z._]*[0-9a-z]$",
        "is not a profile of slices; write it as the label of nodes does, such as 1g.10gb or cpx_nps4",
        32,
    ),
]
FilePath = Annotated[str, Matching("^/.*$", "is not a path; write it from the root on, such as /checkpoints", 1024)]
UrlPath = Annotated[str, Matching("^/[!-~]*$", "is not the path of a URL; write it as /checkpoint", 256)]
RoleName = Annotated[str, Matching(LABEL_PATTERN, _LABEL_REMEDY, 30)]
Name = Annotated[
    str, Matching(SUBDOMAIN_PATTERN, "is not a name; use lower-case letters, digits, - and ., such as team-a", 253)
]
QualifiedName = Annotated[
    str, Matching(QUALIFIED_PATTERN, "is not a qualified name; write it as cpu or nvidia.com/gpu", 316)
]
ResourceName = Annotated[str, Matching(RESOURCE_PATTERN, NOT_A_RESOURCE, 316)]
Quantity = Annotated[int | str, AmountMarker()]

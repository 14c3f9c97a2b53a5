"""Rows of the ledger ⇄ values of the model, and many rows in one statement."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any

from sqlalchemy import RowMapping, TableValuedAlias, bindparam, column, func
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import TypeEngine

from queuectl.model.checkpoint import Ask, Checkpoint
from queuectl.model.failures import NONE_IGNORED, Ignored
from queuectl.model.lifecycle import Attempt, AttemptState, End, Outcome, Workload, WorkloadState
from queuectl.model.plan import Placement, Portion
from queuectl.model.reasons import BY_CODE, Why

Quota = dict[tuple[str, str], int]


def rowset(
    rows: Sequence[Mapping[str, Any]], /, **columns: type[TypeEngine[Any]] | TypeEngine[Any]
) -> TableValuedAlias:
    """Return a table of the rows for use in FROM, sent as one parameter however many they are."""
    parameter = bindparam(None, list(rows), type_=JSONB, unique=True)
    fields = [column(name, kind) for name, kind in columns.items()]
    return func.jsonb_to_recordset(parameter).table_valued(*fields, name="given").render_derived(with_types=True)


def why_to_json(why: Why) -> dict[str, Any]:
    """Encode a reason; facts that JSON doesn't know become text."""
    return {"reason": why.code, "facts": plain(why.facts)}


def why_from_json(data: Mapping[str, Any]) -> Why:
    """Decode what ``why_to_json`` wrote."""
    return Why(BY_CODE[data["reason"]], data["facts"])


def end_to_json(end: End | None) -> dict[str, Any] | None:
    """Encode an end; facts that JSON doesn't know become text."""
    if end is None:
        return None
    return {
        **why_to_json(end.why),
        "outcome": end.outcome.value,
        "not_before": end.not_before,
        "charged": end.charged,
        "late": end.late,
        "exit_code": end.exit_code,
        "barred": end.barred,
        "ask": asdict(end.ask) if end.ask else None,
        "ignored": asdict(end.ignored) if end.ignored else None,
    }


def end_from_json(data: Mapping[str, Any] | None) -> End | None:
    """Decode what ``end_to_json`` wrote."""
    if data is None:
        return None
    return End(
        why=why_from_json(data),
        outcome=Outcome(data["outcome"]),
        not_before=data["not_before"],
        charged=data["charged"],
        late=data["late"],
        exit_code=data["exit_code"],
        barred=data.get("barred"),  # earlier versions did not record it
        ask=Ask(**data["ask"]) if data.get("ask") else None,  # nor this
        ignored=ignored_from_json(data.get("ignored")),  # nor this
    )


def ignored_from_json(data: Mapping[str, Any] | None) -> Ignored | None:
    """Decode failures that were not charged; None when there are none."""
    return Ignored(data["times"], data["step"], tuple((node, at) for node, at in data["nodes"])) if data else None


def checkpoint_to_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """Encode a checkpoint."""
    return {**asdict(checkpoint), "path": clean(checkpoint.path)}


def plain(facts: Mapping[str, object]) -> dict[str, Any]:
    """Return the facts with only what JSON in Postgres can hold."""
    return {clean(key): _plain(value) for key, value in facts.items()}


def clean(text: str) -> str:
    """Return the text without what Postgres refuses: NUL and halves of surrogate pairs."""
    return text.replace("\0", "").encode("utf-8", "replace").decode()


def _plain(value: object) -> object:
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and isfinite(value)):
        return value
    if isinstance(value, Mapping):
        return {clean(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return clean(str(value))


def workload_from_row(row: RowMapping) -> Workload:
    """Build a workload from a row of its table."""
    return Workload(
        uid=row["uid"],
        namespace=row["namespace"],
        name=row["name"],
        queue=row["queue"],
        priority=row["priority"],
        submitted_at=row["submitted_at"],
        seq=row["seq"],
        state=WorkloadState(row["state"]),
        attempt=row["attempt"],
        failures=row["failures"],
        ignored=ignored_from_json(row["ignored"]) or NONE_IGNORED,
        late_starts=row["late_starts"],
        not_before=row["not_before"],
        preemptions=row["preemptions"],
        first_admitted_at=row["first_admitted_at"],
        requeued_at=row["requeued_at"],
        last_end=end_from_json(row["last_end"]),
        finished_at=row["finished_at"],
        saved=Checkpoint(**row["saved"]) if row["saved"] else None,
        lost=row["lost"],
    )


@dataclass(frozen=True, slots=True)
class Places:
    """Where an attempt's pods are, sorted by role, flavor and node: those that stay, and those that leave."""

    stay: tuple[Placement, ...] = ()
    leaving: tuple[Placement, ...] = ()


def attempt_from_row(row: RowMapping, places: Places, victims: tuple[tuple[str, int], ...] = ()) -> Attempt:
    """Build an attempt from a row of its table, its reservations and those it still waits for."""
    leaving = Portion(places.leaving, quota_from_json(row["leaving"])) if row["leaving"] is not None else None
    held = quota_from_json(row["quota"])
    return Attempt(
        uid=row["workload_uid"],
        number=row["number"],
        state=AttemptState(row["state"]),
        generation=row["generation"],
        placements=places.stay,
        admitted_at=row["admitted_at"],
        running_at=row["running_at"],
        end=end_from_json(row["end"]),
        quota=Portion((), held).without(leaving).quota if leaving else held,
        holds=row["holds"],
        victims=victims,
        claimed=not row["promised"],
        leaving=leaving,
        shrunk=why_from_json(row["shrunk"]) if row["shrunk"] is not None else None,
        done=frozenset((role, index) for role, index in row["done"]),
        coming=frozenset((role, index) for role, index in row["coming"]),
        growing_at=row["growing_at"],
        ending_at=row["ending_at"],
        ask=Ask(**row["ask"]) if row["ask"] else None,
    )


def attempts_from_rows(rows: Sequence[RowMapping], places: Mapping[tuple[str, int], Places]) -> list[Attempt]:
    """Build attempts from the rows of all that are active, each with those of them that it waits for."""
    victims: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for row in rows:
        if row["claimed_by_uid"] is not None:
            claimer = (row["claimed_by_uid"], row["claimed_by_attempt"])
            victims.setdefault(claimer, []).append((row["workload_uid"], row["number"]))
    keys = [(row["workload_uid"], row["number"]) for row in rows]
    return [
        attempt_from_row(row, places.get(key, Places()), tuple(sorted(victims.get(key, ()))))
        for key, row in zip(keys, rows, strict=True)
    ]


def places_by_attempt(rows: Iterable[RowMapping]) -> dict[tuple[str, int], Places]:
    """Group reservations by (uid, attempt)."""
    found: dict[tuple[str, int], list[tuple[Placement, int]]] = {}
    for row in rows:
        requests = tuple((resource, amount) for resource, amount in row["requests"])
        held = Placement(
            row["role"], row["flavor"], row["node"], row["pods"], requests, row["cards"], row["first"]
        )  # fmt: skip
        found.setdefault((row["workload_uid"], row["attempt"]), []).append((held, row["leaving"]))
    result = {}
    for key, pairs in found.items():
        pairs.sort(key=lambda pair: _place(pair[0]))
        stay = tuple(replace(p, pods=p.pods - leaving) for p, leaving in pairs if leaving < p.pods)
        result[key] = Places(stay, tuple(replace(p, pods=leaving) for p, leaving in pairs if leaving))
    return result


def _place(placement: Placement) -> tuple[str, str, str, int]:
    return (placement.role, placement.flavor, placement.node, placement.first)


def quota_to_json(quota: Mapping[tuple[str, str], int]) -> list[list[Any]]:
    """Encode (flavor, resource) → amount."""
    return [[flavor, resource, amount] for (flavor, resource), amount in sorted(quota.items())]


def quota_from_json(data: Iterable[Sequence[Any]]) -> Quota:
    """Decode (flavor, resource) → amount."""
    return {(flavor, resource): amount for flavor, resource, amount in data}

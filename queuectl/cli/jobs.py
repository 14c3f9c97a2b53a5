"""``queuectl get`` and ``queuectl describe``."""

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from queuectl.cli.errors import CommandError, Exit
from queuectl.cli.options import (
    AllNamespaces,
    Context,
    Kubeconfig,
    Namespace,
    Output,
    OutputForm,
    PhaseName,
    Selector,
    Watch,
)
from queuectl.cli.render import NONE, Table, age, clean, duration, show_objects

if TYPE_CHECKING:
    from queuectl.cli.session import Session

Object = dict[str, Any]

COLUMNS = ("NAME", "QUEUE", "PRIORITY", "PHASE", "PODS", "POSITION", "REASON", "AGE")
MORE_COLUMNS = ("ATTEMPT", "NODES", "MESSAGE")


def get(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", show_default=False)] = None,
    *,
    watch: Watch = False,
    output: OutputForm = None,
    queue: Annotated[str | None, typer.Option("--queue", metavar="NAME", help="Only jobs of this queue.")] = None,
    phase: Annotated[PhaseName | None, typer.Option("--phase", help="Only jobs in this phase.")] = None,
    selector: Selector = None,
    namespace: Namespace = None,
    everywhere: AllNamespaces = False,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """List jobs."""
    if names and everywhere:
        raise CommandError("a job is named within one namespace; give names, or -A, not both", Exit.USAGE)
    from queuectl.cli import session

    wanted = _Wanted(frozenset(names or ()), queue, phase)

    async def main(here: "session.Session") -> int:
        missing: list[str] = []
        if names and not watch:
            found, missing = await _named(here, names)
        else:
            from queuectl.kube.listing import list_objects

            found = await list_objects(here.client, here.path(), **({"labelSelector": selector} if selector else {}))
        shown = [job for job in found if wanted.has(job)]
        list_ = _List(output, everywhere=everywhere, one=len(names or ()) == 1)
        if queue is not None and not shown:
            await _need_queue(here, queue)
        if not shown and output is None and not missing:
            which = (f" of queue {queue}" if queue else "") + (f" in phase {phase}" if phase else "")
            session.say(f"no jobs{which} {'in any namespace' if everywhere else f'in namespace {here.namespace}'}")
        if shown or output in {Output.JSON, Output.YAML}:
            list_.show(shown, first=True)
        if watch:
            await _watch(here, shown, wanted, list_, selector)
        for name in missing:
            session.say(str(await here.no_job(name)))
        return Exit.NOT_FOUND if missing else Exit.DONE

    session.run(main, kubeconfig=kubeconfig, context=context, namespace=namespace, everywhere=everywhere)


def describe(
    names: Annotated[list[str], typer.Argument(metavar="NAME...")],
    *,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Show all about jobs."""
    from queuectl.cli import session
    from queuectl.cli.change import each

    async def one(here: "session.Session", name: str) -> None:
        from queuectl.kube.listing import list_objects
        from queuectl.kube.names import WORKLOAD_LABEL, pods_path

        job = await here.need(name)
        uid = job["metadata"]["uid"]
        events_path = f"/apis/events.k8s.io/v1/namespaces/{here.namespace}/events"
        pods, events = await asyncio.gather(
            list_objects(here.client, pods_path(here.namespace), labelSelector=f"{WORKLOAD_LABEL}={uid}"),
            list_objects(here.client, events_path, fieldSelector=f"regarding.uid={uid}"),
        )
        if name != names[0]:
            typer.echo("\n")
        _describe(job, pods, events)

    async def main(here: "session.Session") -> int:
        return await each(list(dict.fromkeys(names)), lambda name: one(here, name), at_once=1)

    session.run(main, kubeconfig=kubeconfig, context=context, namespace=namespace)


# Lists


class _Wanted:
    def __init__(self, names: frozenset[str], queue: str | None, phase: str | None) -> None:
        self._names, self._queue, self._phase = names, queue, phase

    def has(self, job: Object) -> bool:
        return (
            (not self._names or job["metadata"]["name"] in self._names)
            and (self._queue is None or job["spec"]["queue"] == self._queue)
            and (self._phase is None or phase_of(job) == self._phase)
        )


class _List:
    """Prints jobs in one form, once or as they change."""

    def __init__(self, form: Output | None, *, everywhere: bool, one: bool) -> None:
        self._form, self._everywhere, self._one = form, everywhere, one
        wide = form is Output.WIDE
        columns = (*(("NAMESPACE",) if everywhere else ()), *COLUMNS, *(MORE_COLUMNS if wide else ()))
        self._table = Table(columns, wide=wide)

    def show(self, jobs: Sequence[Object], *, first: bool, gone: bool = False) -> None:
        if self._form in {None, Output.WIDE}:
            self._table.show(self._row(job, gone=gone) for job in sorted(jobs, key=_by_name))
        elif first:
            show_objects(jobs, str(self._form), one=self._one)
        else:
            show_objects(jobs, str(self._form), one=True)
        sys.stdout.flush()

    def _row(self, job: Object, *, gone: bool) -> list[object]:
        meta, spec, status = job["metadata"], job["spec"], job.get("status") or {}
        row: list[object] = [meta["namespace"]] if self._everywhere else []
        row += [
            meta["name"],
            spec["queue"],
            spec.get("priorityClassName") or spec.get("priority") or 0,
            "Deleted" if gone else phase_of(job),
            pods_of(job),
            status.get("queuePosition"),
            status.get("reason"),
            age(meta["creationTimestamp"]),
        ]
        if self._form is Output.WIDE:
            nodes = {assignment["node"] for assignment in status.get("assignments") or ()}
            row += [status.get("attempt"), len(nodes) or None, status.get("message")]
        return row


def _by_name(job: Object) -> tuple[str, str]:
    return job["metadata"]["namespace"], job["metadata"]["name"]


def phase_of(job: Mapping[str, Any]) -> str:
    """Return a job's phase; a job that no controller has seen yet waits."""
    return str((job.get("status") or {}).get("phase") or PhaseName.PENDING)


def pods_of(job: Mapping[str, Any]) -> str:
    """Return pods ready of pods wanted, such as 3/8."""
    wanted = sum(role["replicas"] for role in job["spec"]["roles"])
    return str((job.get("status") or {}).get("pods") or f"0/{wanted}")


async def _named(here: "Session", names: Sequence[str]) -> tuple[list[Object], list[str]]:
    unique = list(dict.fromkeys(names))
    jobs = await asyncio.gather(*(here.job(name) for name in unique))
    return (
        [job for job in jobs if job is not None],
        [name for name, job in zip(unique, jobs, strict=True) if job is None],
    )


async def _need_queue(here: "Session", name: str) -> None:
    """Raise CommandError when there is no such queue, as far as queues may be read."""
    from queuectl.cli import session
    from queuectl.kube.client import ApiError
    from queuectl.kube.listing import list_objects
    from queuectl.kube.names import API

    try:
        known = {queue["metadata"]["name"] for queue in await list_objects(here.client, f"{API}/queues")}
    except ApiError as error:
        if error.status != 403:  # noqa: PLR2004
            raise
        return
    if name not in known:
        raise session.no_queue(name, known)


async def _watch(here: "Session", shown: Sequence[Object], wanted: _Wanted, list_: _List, selector: str | None) -> None:
    from queuectl.cli.watching import changes

    printed = {job["metadata"]["uid"]: job["metadata"]["resourceVersion"] for job in shown}
    async with changes(here.client, here.path(), label_selector=selector or "") as seen:
        async for old, new in seen:
            if new is not None and wanted.has(new):
                meta = new["metadata"]
                if printed.get(meta["uid"]) != meta["resourceVersion"]:
                    list_.show([new], first=False)
                    printed[meta["uid"]] = meta["resourceVersion"]
            elif new is None and old is not None and printed.pop(old["metadata"]["uid"], None):
                list_.show([old], first=False, gone=True)


# One job


def _describe(job: Object, pods: Sequence[Object], events: Sequence[Object]) -> None:
    spec, status = job["spec"], job.get("status") or {}
    for label, value in _facts(job):
        typer.echo(f"{label + ':':<16}{clean(value)}")
    _section("Roles", ("NAME", "PODS", "EACH POD REQUESTS", "MUST SUCCEED"), (_role(role) for role in spec["roles"]))
    now, before = by_attempt(status, pods)
    _section("Pods", ("ROLE", "NODE", "FLAVOR", "PODS", "STATE"), places(status, now))
    if before:
        typer.echo(f"Of earlier attempts: {_counts(Counter(map(_pod_state, before)))}")
    if name := logged(status, now or before):
        typer.echo(f"Logs: kubectl logs -n {job['metadata']['namespace']} {name}")
    conditions = status.get("conditions") or ()
    _section(
        "Conditions",
        ("TYPE", "STATUS", "REASON", "SINCE", "MESSAGE"),
        ([c["type"], c["status"], c["reason"], age(c["lastTransitionTime"]), c["message"]] for c in conditions),
    )
    _section("Events", ("AGE", "TYPE", "REASON", "MESSAGE"), _events(events))


def _facts(job: Object) -> Iterator[tuple[str, object]]:
    from queuectl.kube.names import SUBMITTED_BY

    meta, spec, status = job["metadata"], job["spec"], job.get("status") or {}
    position = status.get("queuePosition")
    facts = {
        "Name": meta["name"],
        "Namespace": meta["namespace"],
        "Labels": ", ".join(f"{key}={value}" for key, value in sorted((meta.get("labels") or {}).items())),
        "Queue": spec["queue"],
        "Priority": spec.get("priorityClassName") or spec.get("priority") or 0,
        "Phase": phase_of(job) + (" (being deleted)" if meta.get("deletionTimestamp") else ""),
        "Reason": status.get("reason") or "no controller has looked at it yet",
        "Message": status.get("message"),
        "Position": f"{position} in queue {spec['queue']}" if position else None,
        "Pods ready": pods_of(job),
        "Attempt": f"{status.get('attempt', 0)} ({status.get('failures', 0)} failed of {spec['backoffLimit'] + 1})",
        "Submitted": _when(meta["creationTimestamp"]),
        "Submitted by": (meta.get("annotations") or {}).get(SUBMITTED_BY),
        "Admitted": _when(status.get("admittedAt")),
        "Started": _when(status.get("startedAt")),
        "Finished": _when(status.get("finishedAt")),
        "Ran": _between(status.get("startedAt"), status.get("finishedAt")),
        "Exit code": status.get("exitCode"),
        "Checkpoint": _checkpoint(status.get("lastCheckpoint")),
        "Lost so far": f"{status['lostSeconds']} GPU-seconds" if status.get("lostSeconds") else None,
        "GPU models": ", ".join((spec.get("gpu") or {}).get("models", ())),
        "Start deadline": duration(spec["startDeadlineSeconds"]),
        "Longest run": _seconds(spec.get("maxRunSeconds")),
        "Hold": f"yes; queuectl release {meta['name']} lets it start" if spec.get("hold") else None,
        "Kept after end": _seconds(spec.get("ttlSecondsAfterFinished")),
    }
    return ((label, value) for label, value in facts.items() if value not in {None, ""})


def _when(stamp: str | None) -> str:
    return f"{stamp} ({age(stamp)} ago)" if stamp else ""


def _between(start: str | None, end: str | None) -> str:
    if not start or not end:
        return ""
    return duration((datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds())


def _seconds(value: int | None) -> str:
    return "" if value is None else duration(value)


def _checkpoint(last: Mapping[str, Any] | None) -> str | None:
    if last is None:
        return None
    step, path = (last.get(name) for name in ("step", "path"))
    parts = [_when(last["time"]), f"attempt {last['attempt']}", None if step is None else f"step {step}", path]
    return ", ".join(part for part in parts if part)


def _role(role: Object) -> list[object]:
    from queuectl.model.resources import format_quantity, pod_requests

    requests = pod_requests(role["template"]["spec"])
    shown = ", ".join(f"{name}: {format_quantity(name, value)}" for name, value in requests.items() if name != "pods")
    return [role["name"], role["replicas"], shown, "yes" if role.get("mustSucceed", True) else "no"]


def by_attempt(status: Mapping[str, Any], pods: Sequence[Object]) -> tuple[list[Object], list[Object]]:
    """Return the pods of the attempt that the status is about, and those of attempts before it."""
    from queuectl.kube.names import ATTEMPT_LABEL

    parts: tuple[list[Object], list[Object]] = ([], [])
    for pod in pods:
        number = pod["metadata"]["labels"].get(ATTEMPT_LABEL, "")
        parts[number.isdecimal() and int(number) < status.get("attempt", 0)].append(pod)
    return parts


def logged(status: Mapping[str, Any], pods: Sequence[Object]) -> str | None:
    """Return the pod whose log is the one to look at: the failed one that the message names, else any failed, else any."""
    begun = [pod for pod in pods if pod["status"].get("phase") in {"Running", "Succeeded", "Failed"}]
    words = str(status.get("message", "")).split()

    def last(pod: Object) -> tuple[bool, bool, int, str]:
        name = str(pod["metadata"]["name"])
        return name not in words, pod["status"]["phase"] != "Failed", len(name), name  # "a-9" is before "a-10"

    return min(begun, key=last)["metadata"]["name"] if begun else None


def places(status: Mapping[str, Any], pods: Sequence[Object]) -> Iterator[list[object]]:
    """Yield a row for each role on each node; a gang may have thousands of pods."""
    from queuectl.kube.names import ROLE_LABEL

    states: dict[tuple[str, str], Counter[str]] = {}
    for pod in pods:
        place = (pod["metadata"]["labels"].get(ROLE_LABEL, ""), pod["spec"].get("nodeName", ""))
        states.setdefault(place, Counter())[_pod_state(pod)] += 1
    for assignment in status.get("assignments") or ():
        place = (assignment["role"], assignment["node"])
        seen = _counts(states.pop(place, Counter()))
        unseen = "gone" if status.get("phase") == PhaseName.STOPPING else "not bound yet"
        yield [*place, assignment["flavor"], assignment["pods"], seen or unseen]
    for (role, node), found in sorted(states.items()):  # pods without a node, and those of an attempt that has ended
        yield [role, node, NONE, found.total(), _counts(found)]


def _counts(states: Counter[str]) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(states.items()))


def _pod_state(pod: Object) -> str:
    if pod["metadata"].get("deletionTimestamp"):
        return "Terminating"
    if pod["spec"].get("schedulingGates"):
        return "Gated"
    conditions = pod["status"].get("conditions") or ()
    if any(c["type"] == "Ready" and c["status"] == "True" for c in conditions):
        return "Ready"
    return str(pod["status"].get("phase", "Pending"))


def _events(events: Sequence[Object]) -> Iterator[list[object]]:
    def last(event: Object) -> str:
        series = event.get("series") or {}
        return str(
            series.get("lastObservedTime")
            or event.get("deprecatedLastTimestamp")
            or event.get("eventTime")
            or event["metadata"]["creationTimestamp"]
        )

    for event in sorted(events, key=last):
        count = (event.get("series") or {}).get("count") or event.get("deprecatedCount") or 1
        when = age(last(event)) + (f" (x{count})" if count > 1 else "")
        yield [when, event.get("type"), event.get("reason"), event.get("note")]


def _section(title: str, columns: Sequence[str], rows: Any) -> None:
    found = list(rows)
    typer.echo(f"\n{title}:" + ("" if found else " none"))
    if found:
        Table(columns, wide=True).show(found)

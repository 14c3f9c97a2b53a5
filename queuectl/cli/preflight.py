"""What one object can't know of itself: is there such a queue, could it ever run it, would its pods be accepted.

Nothing here creates anything. Each finding becomes a problem of its document; what can't be checked, for lack of
rights, is told and left to the controller, which checks the same.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from queuectl.cli.documents import Document
from queuectl.control.status import uncertain
from queuectl.core.backlog import Backlog
from queuectl.core.grace import cut
from queuectl.core.made import Made
from queuectl.core.nominate import nominate
from queuectl.core.snapshot import Snapshot
from queuectl.core.tree import Tree, broken_queues
from queuectl.kube import decode
from queuectl.kube.client import ApiError, KubeClient
from queuectl.kube.listing import list_raw
from queuectl.kube.names import API
from queuectl.kube.pods import manifests
from queuectl.kube.problems import nearest
from queuectl.model.checkpoint import ANSWERS, Answer, Signal
from queuectl.model.lifecycle import Attempt, AttemptState
from queuectl.model.objects import Flavor, Job, Queue
from queuectl.model.plan import Placement
from queuectl.model.reasons import Reason
from queuectl.model.resources import format_quantity, is_extended, parse_quantity

AT_ONCE = 8
DRY_RUN = {"dryRun": "All", "fieldValidation": "Strict"}
# What to do about waits that time doesn't end.
_REMEDIES = {
    Reason.NO_MATCHING_FLAVOR: "Ask for what the queue has ({flavors}), or name another queue",
    Reason.EXCEEDS_MAX_QUOTA: "Ask for at most that, or name a queue that may use more",
    Reason.EXCEEDS_OWN_QUOTA: "Ask for at most that, or let it be preemptible, so that it may borrow",
    Reason.EXCEEDS_LIMIT: "Ask for at most that, or name a queue with another limit",
}

Tell = Callable[[str], None]


@dataclass
class Known:
    """What is there, the documents' own included; None: may not be read."""

    queues: dict[str, Queue] | None
    flavors: dict[str, Flavor] | None
    classes: Mapping[str, bool]  # PriorityClass → whether it exists


async def check(client: KubeClient, documents: Sequence[Document], *, force: bool, tell: Tell) -> None:
    """Note what is wrong with documents that are sound in themselves. Raises ApiUnreachableError."""
    _check_twice(documents)
    known = await _look(client, documents, tell)
    offered = await _offered(client) if any(document.kind == "Queue" for document in documents) else set()
    for document in documents:
        if document.kind == "Queue":
            _check_queue(document, known)
            _tell_of_devices(document, offered, tell)
        elif document.kind == "TrainingJob":
            _check_names(document, known)
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(document: Document) -> None:
        async with gate:
            await _dry_run(client, document, known, force=force, tell=tell)

    await asyncio.gather(*(one(document) for document in documents if not document.problems))


async def _look(client: KubeClient, documents: Sequence[Document], tell: Tell) -> Known:
    async def read(kind: str, decoder: Callable[[bytes], Any], what: str) -> dict[str, Any] | None:
        try:
            found = [decoder(bytes(raw)).value for raw in await list_raw(client, f"{API}/{kind}")]
        except ApiError as error:
            if error.status != 403:  # noqa: PLR2004
                raise
            tell(f"{what} are not checked: {error.message}")
            return None
        mine = [decoder(_encoded(d)).value for d in documents if f"{d.kind.lower()}s" == kind]
        # What is there wins over a document of that name, which will be refused.
        return {item.name: item for item in (*mine, *found)}

    classes = sorted({d.spec["priorityClassName"] for d in documents if d.spec.get("priorityClassName")})
    there = await asyncio.gather(*(_exists(client, name, tell) for name in classes))
    return Known(
        await read("queues", decode.queue, "queues"),
        await read("resourceflavors", decode.flavor, "flavors"),
        dict(zip(classes, there, strict=True)),
    )


def _encoded(document: Document) -> bytes:
    return msgspec.json.encode(document.data | {"metadata": {"name": document.name}})


async def _exists(client: KubeClient, name: str, tell: Tell) -> bool:
    try:
        await client.request("GET", f"/apis/scheduling.k8s.io/v1/priorityclasses/{name}")
    except ApiError as error:
        if error.status == 404:  # noqa: PLR2004
            return False
        tell(f"PriorityClass {name} is not checked: {error.message}")
    return True


def _check_twice(documents: Sequence[Document]) -> None:
    first: dict[tuple[str, str, str], Document] = {}
    for document in documents:
        meta = document.data["metadata"]
        if not meta.get("name"):
            continue
        key = (document.kind, meta.get("namespace", ""), meta["name"])
        other = first.setdefault(key, document)
        if other is not document:
            document.problems.append(
                ("metadata.name", f'"{meta["name"]}" is in {other.source} already; give it another name')
            )


def _check_names(document: Document, known: Known) -> None:
    queue, name = document.spec.get("queue"), document.spec.get("priorityClassName")
    if queue and known.queues is not None and queue not in known.queues:
        document.problems.append(("spec.queue", f'"{queue}" does not exist; {_nearest(queue, known.queues, "queues")}'))
    if name and not known.classes[name]:
        document.problems.append(
            ("spec.priorityClassName", f'"{name}" does not exist; name a PriorityClass, or give priority instead')
        )


def _check_queue(document: Document, known: Known) -> None:
    queues, parent = known.queues, document.spec.get("parent")
    if queues is not None and parent:
        if parent not in queues:
            document.problems.append(
                (
                    "spec.parent",
                    f'"{parent}" does not exist; {_nearest(parent, queues.keys() - {document.name}, "queues")}',
                )
            )
        elif circle := _circle(document.name, queues):
            document.problems.append(
                ("spec.parent", f'"{parent}" closes a circle, {" > ".join(circle)}; remove parent from one of them')
            )
    below = any(queue.parent == document.name for queue in (queues or {}).values())
    for index, quota in enumerate(document.spec.get("quotas") or ()):
        nominal, lends = (parse_quantity("cpu", quota.get(part, 0)) for part in ("nominal", "lendingLimit"))
        if queues is not None and not below and lends > nominal:
            more = f"{quota['lendingLimit']} is more than nominal, {quota['nominal']}, and no queue is below this one"
            document.problems.append((f"spec.quotas[{index}].lendingLimit", f"{more}; write at most that"))
    if known.flavors is not None:
        for index, quota in enumerate(document.spec.get("quotas") or ()):
            if quota["flavor"] not in known.flavors:
                nearest = _nearest(quota["flavor"], known.flavors, "flavors")
                document.problems.append(
                    (f"spec.quotas[{index}].flavor", f'"{quota["flavor"]}" does not exist; {nearest}')
                )


async def _offered(client: KubeClient) -> set[str]:
    """Return the resources of all nodes; nothing when nodes may not be read."""
    try:
        return {name for raw in await list_raw(client, "/api/v1/nodes") for name in decode.node(raw).value.allocatable}
    except ApiError as error:
        if error.status != 403:  # noqa: PLR2004
            raise
        return set()


def _tell_of_devices(document: Document, offered: Collection[str], tell: Tell) -> None:
    for resource in dict.fromkeys(quota["resource"] for quota in document.spec.get("quotas") or ()):
        if offered and is_extended(resource) and resource not in offered:
            devices = {name for name in offered if is_extended(name)}
            tell(
                f"{document.source}: Queue {document.name}: no node offers {resource} today; {nearest(resource, devices)}"
            )


def _circle(name: str, queues: Mapping[str, Queue]) -> list[str]:
    """Return the circle of parents that a queue is part of, or nothing."""
    way = [name]
    while (parent := queues[way[-1]].parent) in queues and parent not in way:
        way.append(parent)
    return [*way, name] if parent == name else []


def _nearest(name: str, known: Collection[str], what: str) -> str:
    return nearest(name, known) if known else f"there are no {what} yet; submit one first, or in the same file"


async def _dry_run(client: KubeClient, document: Document, known: Known, *, force: bool, tell: Tell) -> None:
    try:
        answer = await client.request_raw("POST", document.path, params=DRY_RUN, body=document.data)
    except ApiError as error:
        document.problems.append(("", refusal(error, document)))
        return
    if document.kind != "TrainingJob":
        return
    job = decode.job(answer).value
    if job.problem is not None:
        document.problems.append(("", str(job.problem)))
        return
    queue = job.gang.queue
    if "queue" not in document.spec and known.queues is not None and queue not in known.queues:
        told = f'"{queue}", the default of namespace {job.gang.namespace}, does not exist'
        document.problems.append(("spec.queue", f"{told}; {_nearest(queue, known.queues, 'queues')}"))
        return
    for role in silent_roles(document.spec):
        tell(
            f"{document.source}: {document.kind} {document.name}: role {role} answers by an annotation of its pods, and its"
            " template has no serviceAccountName; name one that may patch pods, or let the namespace's default do that"
        )
    if job.unpromised:
        tell(f"{document.source}: {document.kind} {document.name}: {uncertain(job)}")
    rules = (known.queues or {}).get(queue)
    if rules is not None and (shorter := cut(replace(job, max_grace_seconds=rules.max_grace_seconds))):
        tell(f"{document.source}: {document.kind} {document.name}: {shorter}")
    if not force:
        _check_quota(document, job, known)
    await _dry_run_pods(client, document, job, known, tell)


def silent_roles(spec: Mapping[str, Any]) -> list[str]:
    """Return the roles whose pods are to answer by their annotation, and name no service account to write it with."""
    given = spec.get("checkpoint") or {}
    signal = Signal(given.get("signal") or Signal.SIG_TERM)
    if (given.get("answer") or ANSWERS[signal][0]) != Answer.ANNOTATION:
        return []
    asked = given.get("role")
    return [
        role["name"]
        for role in spec["roles"]
        if (role["name"] == asked if asked else role.get("mustSucceed", True))
        and not (role["template"].get("spec") or {}).get("serviceAccountName")
    ]


def refusal(error: ApiError, document: Document) -> str:
    """Return why the API server refused a document, and what to do."""
    if error.reason == "AlreadyExists":
        name = document.data["metadata"].get("name")
        what = f"queuectl cancel {name}" if document.kind == "TrainingJob" else f"kubectl edit {document.kind} {name}"
        return f'metadata.name: "{name}" exists already; choose another name, or: {what}'
    if error.status == 404 and error.details.get("kind") == "namespaces":  # noqa: PLR2004
        return f'metadata.namespace: "{error.details.get("name")}" does not exist; create it, or name another with -n'
    return error.message


def _check_quota(document: Document, job: Job, known: Known) -> None:
    """Ask the core whether the job could run in its queue if nothing else did, on as many nodes as it likes."""
    queue = (known.queues or {}).get(job.gang.queue)
    if queue is None or known.flavors is None:
        return
    tree = Tree.of(known.queues.values(), broken_queues(known.queues)) if known.queues else Tree(())
    snapshot = Snapshot(known.queues or {}, known.flavors, waiting=Backlog(), fleet=None, tree=tree, later=tree)
    verdict = nominate(snapshot, frozenset(), job.gang, now=0.0).wait
    if verdict is not None and verdict.reason in _REMEDIES:
        flavors = ", ".join(dict.fromkeys(flavor for flavor, _ in queue.nominal)) or "no flavors"
        remedy = _REMEDIES[verdict.reason].format(flavors=flavors)
        document.problems.append(("spec.roles", f"{verdict} {remedy}; --force lets it wait for a change of the queue"))


async def _dry_run_pods(client: KubeClient, document: Document, job: Job, known: Known, tell: Tell) -> None:
    """Let the API server judge one pod of each role, as the controller will create it."""
    placements = tuple(Placement(role.name, "", "", 1, role.requests) for role in job.gang.roles)
    attempt = Attempt(job.gang.uid, 1, AttemptState.RESERVED, job.generation, placements, 0.0)
    made = Made()
    made.begin(attempt)
    for index, role in enumerate(job.gang.roles):
        pod = manifests(job, attempt, 0, known.flavors or {})[role.name, 0]
        # The class is made with the first pods and the owner isn't there yet. A name of its own lets it be repeated.
        del pod["spec"]["priorityClassName"], pod["metadata"]["ownerReferences"]
        pod["metadata"]["generateName"] = pod["metadata"].pop("name")[:50] + "-"
        try:
            path = f"/api/v1/namespaces/{job.gang.namespace}/pods"
            answer = await client.request_raw("POST", path, params=DRY_RUN, body=pod)
            if beyond := made.beyond(decode.pod(answer).value):
                more = ", ".join(f"{format_quantity(resource, amount)} {resource}" for resource, amount in beyond)
                tell(
                    f"{document.source}: pods of role {role.name} request {more} more than their template: the API server"
                    " adds it (LimitRange, RuntimeClass or webhook), and it is reserved, too"
                )
        except ApiError as error:
            passing = "exceeded quota" in error.message or "cannot create resource" in error.message
            if error.status == 403 and passing:  # noqa: PLR2004 - the first may pass, the second is the user's own right
                tell(f"{document.source}: pods of role {role.name} are not checked: {error.message}")
            else:
                document.problems.append((f"spec.roles[{index}].template", _about_template(error.message)))


def _about_template(message: str) -> str:
    """Return the API server's words about a pod, as words about the template."""
    if "strict decoding error: " in message:
        message = message.partition("strict decoding error: ")[2] + "; correct or remove it"
    elif message.startswith("Pod ") and " is invalid: " in message:
        message = message.partition(" is invalid: ")[2]
    return message

"""Who may use a queue, and how much of it each may hold at a time.

A limit of a queue is for the jobs of that queue itself, not for those of queues below it. What a job holds is what
its pods request, from the decision until its last pod is gone: room that is promised to it counts, too.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from queuectl.core.nodes import holds
from queuectl.model.objects import Gang, Queue, Requirement, Role
from queuectl.model.policy import Cap, StopPolicy
from queuectl.model.reasons import Reason, Why, why
from queuectl.model.resources import CARDS, Resources, format_quantity, times, total

# A job over a limit waits for others of the same user, namespace or queue, so it holds up nobody else.
OVER_A_LIMIT = {Reason.EXCEEDS_LIMIT, Reason.MAX_RUNNING_REACHED, Reason.MAX_RESOURCES_REACHED}

_Key = tuple[str, str, str]  # queue, prefix of the limit, user or namespace


class _Limit(NamedTuple):
    key: _Key
    prefix: str  # of the limit's fields in the queue's spec
    whose: str
    cap: Cap


@dataclass(frozen=True)
class Held:
    """What is held of queues that have limits: jobs and amounts, of each queue, user and namespace."""

    jobs: Counter[_Key] = field(default_factory=Counter)
    amounts: Counter[tuple[_Key, str]] = field(default_factory=Counter)

    def add(self, queue: Queue, namespace: str, user: str, amounts: Resources) -> None:
        """Count a job's room."""
        for limit in _limits(queue, namespace, user):
            self.jobs[limit.key] += 1
            for resource, _ in limit.cap.max_resources:
                self.amounts[limit.key, resource] += amounts.get(resource, 0)

    def remove(self, queue: Queue, namespace: str, user: str, amounts: Resources) -> None:
        """Stop counting a job's room, all of it as it was added."""
        for limit in _limits(queue, namespace, user):
            self.jobs[limit.key] -= 1
            for resource, _ in limit.cap.max_resources:
                self.amounts[limit.key, resource] -= amounts.get(resource, 0)
                if not self.jobs[limit.key]:  # users come and go
                    del self.amounts[limit.key, resource]
            if not self.jobs[limit.key]:
                del self.jobs[limit.key]

    def copy(self) -> Self:
        """Return a copy to count on in."""
        return type(self)(self.jobs.copy(), self.amounts.copy())

    def over(
        self, queue: Queue, gang: Gang, roles: Sequence[Role], cards: int = 0, *, starts: bool = True
    ) -> Why | None:
        """Return the limit that keeps the gang from starting with these pods now, or ever.

        ``cards``: what their GPUs count as. ``starts``: False for pods that it gets beside those that it has.
        """
        limits = list(_limits(queue, gang.namespace, gang.user))
        if not limits:
            return None
        asked = requested(roles) | {CARDS: cards}
        amounts = [
            (limit, resource, most, asked[resource])
            for limit in limits
            for resource, most in limit.cap.max_resources
            if asked.get(resource)
        ]
        for limit, resource, most, wanted in amounts:
            if wanted > most:
                return why(
                    Reason.EXCEEDS_LIMIT, queue=queue.name, whose=limit.whose, resource=resource,
                    wanted=format_quantity(resource, wanted), limit=format_quantity(resource, most),
                    field=f"{limit.prefix}maxResources",
                )  # fmt: skip
        for limit in limits:
            most_jobs, running = limit.cap.max_running, self.jobs[limit.key]
            if starts and most_jobs is not None and running >= most_jobs:
                return why(
                    Reason.MAX_RUNNING_REACHED, queue=queue.name, whose=limit.whose, running=running,
                    limit=most_jobs, field=f"{limit.prefix}maxRunning",
                )  # fmt: skip
        for limit, resource, most, wanted in amounts:
            used = self.amounts[limit.key, resource]
            if used + wanted > most:
                return why(
                    Reason.MAX_RESOURCES_REACHED, queue=queue.name, whose=limit.whose, resource=resource,
                    used=format_quantity(resource, used), wanted=format_quantity(resource, wanted),
                    limit=format_quantity(resource, most), field=f"{limit.prefix}maxResources",
                )  # fmt: skip
        return None


def requested(roles: Sequence[Role]) -> dict[str, int]:
    """Return what all pods of the roles request."""
    return total(times(dict(role.requests), role.pods) for role in roles)


def limited(queue: Queue) -> bool:
    """Tell whether the queue has any limit."""
    return queue.max_running is not None or bool(queue.per_user or queue.per_namespace)


def particular(queue: Queue) -> bool:
    """Tell whether it matters to the queue whose a job is."""
    return queue.namespaces is not None or limited(queue)


def stopped(queues: Mapping[str, Queue], name: str) -> Why | None:
    """Return the stop policy that keeps a queue from admitting: its own or that of one above it."""
    by = stopped_by(queues, name, (StopPolicy.HOLD, StopPolicy.HOLD_AND_DRAIN))
    return why(Reason.QUEUE_STOPPED, queue=name, stopped=by.name, policy=by.stop.value) if by else None


def stopped_by(queues: Mapping[str, Queue], name: str, policies: Collection[StopPolicy]) -> Queue | None:
    """Return the queue, this one or the nearest above it, that has one of these policies."""
    queue, seen = queues.get(name), set[str]()
    while queue is not None and queue.name not in seen:
        if queue.stop in policies:
            return queue
        seen.add(queue.name)  # parents may form a cycle
        queue = queues.get(queue.parent)
    return None


def not_for(queue: Queue, namespace: str, labels: Mapping[str, str]) -> Why | None:
    """Return why jobs of a namespace with these labels may not use the queue."""
    for need in queue.namespaces or ():
        if not holds(need, labels):
            found = f"{need.key}={labels[need.key]}" if need.key in labels else f"no label {need.key}"
            return why(
                Reason.NAMESPACE_NOT_ALLOWED, queue=queue.name, namespace=namespace, needs=_words(need), found=found
            )
    return None


def _words(need: Requirement) -> str:
    match need.operator:
        case "Exists":
            return f"a label {need.key}"
        case "DoesNotExist":
            return f"no label {need.key}"
        case operator:
            return f"{need.key} {'not in' if operator == 'NotIn' else 'in'} ({', '.join(need.values)})"


def _limits(queue: Queue, namespace: str, user: str) -> Iterator[_Limit]:
    given = (
        ("", "", "in all", Cap(queue.max_running)),
        ("perUser.", user, f"of user {user or '(unknown)'}", queue.per_user),
        ("perNamespace.", namespace, f"of namespace {namespace}", queue.per_namespace),
    )
    for prefix, who, whose, cap in given:
        if cap:
            yield _Limit((queue.name, prefix, who), prefix, whose, cap)

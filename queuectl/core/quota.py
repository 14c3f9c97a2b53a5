"""Quota: which flavors a role may use and what it charges to its queue."""

from collections.abc import Iterator, Mapping, Sequence

from queuectl.core.snapshot import Snapshot
from queuectl.model.objects import Flavor, Gang, Queue, Role
from queuectl.model.reasons import Reason, Why, why
from queuectl.model.resources import format_quantity, is_extended, is_gpu, total


def wants_gpu(role: Role) -> bool:
    """Tell whether the role's pods request GPUs of any kind."""
    return any(is_gpu(resource) for resource, _ in role.requests)


def charge(queue: Queue, flavor: str, role: Role) -> dict[tuple[str, str], int]:
    """Return (flavor, resource) → amount that the whole role charges to the queue.

    Extended resources always count; cpu, memory and the like only where the queue gives a quota for them.
    """
    return {
        (flavor, resource): amount * role.pods
        for resource, amount in role.requests
        if is_extended(resource) or (flavor, resource) in queue.nominal
    }


def flavor_choices(snapshot: Snapshot, queue: Queue, gang: Gang) -> Iterator[Mapping[str, Flavor]]:
    """Yield role → flavor, in the order in which the queue lists its flavors.

    All roles with GPUs share one flavor, so that a gang never mixes models; the others share one of their own,
    which the GPU flavor is tried for first.
    """
    known = _known(snapshot, queue)
    with_gpu, without = _by_gpu(gang)
    gpu_flavors = _offering(queue, known, with_gpu, gang.gpu_models)
    for gpu_flavor in gpu_flavors if with_gpu else (None,):
        others = sorted(_offering(queue, known, without), key=lambda flavor: flavor is not gpu_flavor)
        for other in others if without else (None,):
            chosen = {role.name: gpu_flavor for role in with_gpu} | {role.name: other for role in without}
            yield {name: flavor for name, flavor in chosen.items() if flavor is not None}


def no_flavor(snapshot: Snapshot, queue: Queue, gang: Gang) -> Why:
    """Say why ``flavor_choices`` has nothing for the gang."""
    known = _known(snapshot, queue)
    with_gpu, without = _by_gpu(gang)
    roles = with_gpu if with_gpu and not _offering(queue, known, with_gpu, gang.gpu_models) else without
    role = next((role for role in roles if not _offering(queue, known, [role])), roles[0])
    asked = [resource for resource, _ in role.requests if is_extended(resource)]
    nowhere = [resource for resource in asked if not any((f.name, resource) in queue.nominal for f in known)]
    if not queue.nominal:
        problem = "it has no quota; add spec.quotas"
    elif not known:
        problem = f"ResourceFlavor {', '.join(dict.fromkeys(f for f, _ in queue.nominal))} does not exist"
    elif nowhere:
        problem = f"none has a quota for {', '.join(nowhere)}"
    elif roles is with_gpu and _offering(queue, known, roles):
        problem = f"none is of GPU model {' or '.join(gang.gpu_models)}"
    else:
        together = sorted({resource for role in roles for resource, _ in role.requests if is_extended(resource)})
        problem = f"none has quotas for all of {', '.join(together)}"
    return why(Reason.NO_MATCHING_FLAVOR, queue=queue.name, role=role.name, problem=problem)


def check(
    snapshot: Snapshot, queue: Queue, gang: Gang, flavors: Mapping[str, Flavor]
) -> Why | dict[tuple[str, str], int]:
    """Return what the gang would charge to its queue, or why its nominal quota does not allow that now."""
    wanted = total(charge(queue, flavors[role.name].name, role) for role in gang.roles)
    waiting: Why | None = None
    for (flavor, resource), amount in wanted.items():
        nominal = queue.nominal.get((flavor, resource), 0)
        used = snapshot.usage.get((queue.name, flavor, resource), 0)
        if used + amount <= nominal:
            continue
        reason = Reason.EXCEEDS_MAX_QUOTA if amount > nominal else Reason.WAITING_FOR_QUOTA
        numbers = {"wanted": amount, "nominal": nominal, "used": used, "missing": used + amount - nominal}
        facts = {name: format_quantity(resource, number) for name, number in numbers.items()}
        refusal = why(reason, queue=queue.name, flavor=flavor, resource=resource, **facts)
        if reason is Reason.EXCEEDS_MAX_QUOTA:
            return refusal
        waiting = waiting or refusal
    return waiting or wanted


def _known(snapshot: Snapshot, queue: Queue) -> list[Flavor]:
    names = dict.fromkeys(flavor for flavor, _ in queue.nominal)
    return [snapshot.flavors[name] for name in names if name in snapshot.flavors]


def _by_gpu(gang: Gang) -> tuple[list[Role], list[Role]]:
    """Return the roles with GPUs and those without."""
    return [role for role in gang.roles if wants_gpu(role)], [role for role in gang.roles if not wants_gpu(role)]


def _offering(queue: Queue, known: Sequence[Flavor], roles: Sequence[Role], models: Sequence[str] = ()) -> list[Flavor]:
    """Return the flavors in which the queue has quota for every extended resource of the roles."""
    asked = {resource for role in roles for resource, _ in role.requests if is_extended(resource)}
    return [
        flavor
        for flavor in known
        if all((flavor.name, resource) in queue.nominal for resource in asked)
        and (not models or flavor.gpu_model in models)
    ]

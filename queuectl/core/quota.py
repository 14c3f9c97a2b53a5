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
    known = [snapshot.flavors[name] for name in dict.fromkeys(f for f, _ in queue.nominal) if name in snapshot.flavors]
    with_gpu = [role for role in gang.roles if wants_gpu(role)]
    without = [role for role in gang.roles if not wants_gpu(role)]
    gpu_flavors: Sequence[Flavor | None] = [
        f
        for f in known
        if all(_offers(queue, f, role) for role in with_gpu) and (not gang.gpu_models or f.gpu_model in gang.gpu_models)
    ]
    for gpu_flavor in gpu_flavors if with_gpu else (None,):
        others = [f for f in known if all(_offers(queue, f, role) for role in without)]
        others.sort(key=lambda f: f is not gpu_flavor)
        for other in others if without else (None,):
            chosen = {role.name: gpu_flavor for role in with_gpu} | {role.name: other for role in without}
            yield {name: flavor for name, flavor in chosen.items() if flavor is not None}


def no_flavor(snapshot: Snapshot, queue: Queue, gang: Gang) -> Why:
    """Say what of the gang no flavor of its queue offers."""
    for role in gang.roles:
        offering = [f for f in {f for f, _ in queue.nominal} if f in snapshot.flavors]
        fitting = [f for f in offering if _offers(queue, snapshot.flavors[f], role)]
        if not fitting:
            missing = ", ".join(resource for resource, _ in role.requests if is_extended(resource))
            return why(Reason.NO_MATCHING_FLAVOR, queue=queue.name, missing=missing or "nodes", role=role.name)
    role = next((role for role in gang.roles if wants_gpu(role)), gang.roles[0])
    missing = f"GPU model {' or '.join(gang.gpu_models)}" if gang.gpu_models else "all its resources in one flavor"
    return why(Reason.NO_MATCHING_FLAVOR, queue=queue.name, missing=missing, role=role.name)


def check(
    snapshot: Snapshot, queue: Queue, gang: Gang, flavors: Mapping[str, Flavor]
) -> Why | dict[tuple[str, str], int]:
    """Return what the gang would charge to its queue, or why its nominal quota does not allow that now."""
    wanted = total(charge(queue, flavors[role.name].name, role) for role in gang.roles)
    waiting: Why | None = None
    for (flavor, resource), amount in wanted.items():
        nominal = queue.nominal.get((flavor, resource), 0)
        used = snapshot.usage.get((queue.name, flavor, resource), 0)
        facts = {"queue": queue.name, "flavor": flavor, "resource": resource} | {
            name: format_quantity(resource, value)
            for name, value in {
                "wanted": amount, "nominal": nominal, "used": used, "missing": used + amount - nominal,
            }.items()
        }  # fmt: skip
        if amount > nominal:
            return why(Reason.EXCEEDS_MAX_QUOTA, **facts)
        if used + amount > nominal:
            waiting = waiting or why(Reason.WAITING_FOR_QUOTA, **facts)
    return waiting or wanted


def _offers(queue: Queue, flavor: Flavor, role: Role) -> bool:
    return all((flavor.name, r) in queue.nominal for r, _ in role.requests if is_extended(r))

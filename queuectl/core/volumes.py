"""What a job's claims mean for it: where its pods can go, why it has to wait, and what can't be promised.

By kube-scheduler's rules: a pod goes where all of its volumes can be reached, and nowhere while a claim has none and
would not get one by the pod. An empty storage class has no volumes but those that somebody binds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from queuectl.model.objects import NODE_LEVEL, Job, NodeTerm, Requirement, Role
from queuectl.model.reasons import Reason, Why, why
from queuectl.model.volumes import Claim, StorageClass, Terms, Volume, VolumeUse

_ONE_POD = "ReadWriteOncePod"
_ONE_NODE = frozenset({"ReadWriteOnce", _ONE_POD})


@dataclass
class Volumes:
    """Claims by namespace and name, volumes and storage classes by name."""

    claims: dict[str, Claim] = field(default_factory=dict)
    volumes: dict[str, Volume] = field(default_factory=dict)
    classes: dict[str, StorageClass] = field(default_factory=dict)
    known: bool = False  # whether all of them have been read

    def judge(self, job: Job) -> Job:
        """Return a job, as it was read, with what its claims mean for it."""
        if not job.volumes or job.problem is not None:
            return job
        found = {use: self._of(job, use) for use in job.volumes}
        reach: dict[str, dict[Terms, None]] = {}
        for use, one in found.items():
            reach.setdefault(use.role, {}).update(dict.fromkeys(filter(None, one.reach)))
        roles = tuple(
            replace(role, constraints=replace(role.constraints, volumes=tuple(reach.get(role.name, ()))))
            for role in job.gang.roles
        )
        left_open = tuple(
            f"spec.roles[{use.role}].template.spec.volumes[{use.name}] ({one.left_open})"
            for use, one in found.items()
            if one.left_open
        )
        return replace(
            job,
            gang=replace(job.gang, roles=roles),
            unpromised=job.unpromised + left_open,
            problem=next((one.problem for one in found.values() if one.problem), None),
        )

    def _of(self, job: Job, use: VolumeUse) -> "_Found":
        if not self.known:
            return _Found(problem=_not_ready(use, "the controller has yet to read this cluster's volumes"))
        if not use.claim:
            return self._of_its_own(use)
        claim = self.claims.get(f"{job.gang.namespace}/{use.claim}")
        if claim is None:
            return _Found(problem=_not_ready(use, "it does not exist"))
        users = list(_users(job, use.claim))
        pods = sum(role.pods for role in users)
        if _ONE_POD in claim.modes and pods > 1:
            problem = f"claim {claim.name} is {_ONE_POD}: one pod may use it, and the job has {pods} that do"
            field = f"spec.roles[{use.role}].template.spec.volumes[{use.name}]"
            return _Found(problem=why(Reason.MISCONFIGURED, field=field, problem=problem))
        found = self._of_claim(use, claim, pods)
        return found if found.left_open or found.problem else replace(found, left_open=_elsewhere(claim, users, pods))

    def _of_claim(self, use: VolumeUse, claim: Claim, pods: int) -> "_Found":
        if claim.deleting:
            return _Found(problem=_not_ready(use, "it is being deleted"))
        if claim.lost or (claim.bound and claim.volume not in self.volumes):
            return _Found(problem=_not_ready(use, f"its volume {claim.volume} does not exist"))
        if claim.bound:
            return _Found(self.volumes[claim.volume].reach)
        if claim.volume:
            return _Found(problem=_not_ready(use, f"it has yet to be bound to volume {claim.volume}"))
        kind = self.classes.get(claim.storage_class)
        if kind is None or not kind.waits:
            return _Found(problem=_not_ready(use, "it is not bound to a volume"))
        here = (NodeTerm(fields=(Requirement("metadata.name", "In", (claim.node,)),)),) if claim.node else ()
        left_open = _made_before(kind)
        if pods > 1:
            left_open = f"claim {claim.name} gets its volume where the first of {pods} pods goes"
        return _Found((kind.reach, here), left_open=left_open)

    def _of_its_own(self, use: VolumeUse) -> "_Found":
        """Return what a claim means that each pod makes for itself."""
        name = use.storage_class
        if name is None:
            defaults = [kind for kind in self.classes.values() if kind.default_since]
            name = max(defaults, key=lambda kind: (kind.default_since, kind.name)).name if defaults else ""
        kind = self.classes.get(name)
        if kind is None:
            problem = (
                f"StorageClass {name} does not exist" if name else "it names no StorageClass, nor is one the default"
            )
            return _Found(problem=_not_ready(use, problem))
        left_open = _made_before(kind) if kind.waits else f"StorageClass {name} does not wait for the pod"
        return _Found((kind.reach,), left_open=left_open)


@dataclass(frozen=True, slots=True)
class _Found:
    """What a claim means for the pods that use it."""

    reach: tuple[Terms, ...] = ()
    problem: Why | None = None
    left_open: str = ""  # what about it can't be promised


def _users(job: Job, claim: str) -> Iterator[Role]:
    names = {use.role for use in job.volumes if use.claim == claim}
    return (role for role in job.gang.roles if role.name in names)


def _not_ready(use: VolumeUse, problem: str) -> Why:
    what = f"claim {use.claim}" if use.claim else f"for volume {use.name} a claim of each pod's own"
    return why(Reason.VOLUME_NOT_READY, role=use.role, volume=what, problem=problem)


def _elsewhere(claim: Claim, users: Sequence[Role], pods: int) -> str:
    """Say what may keep a claim from a pod: that others use it, or pods of the job on other nodes."""
    if _ONE_POD in claim.modes:
        return f"claim {claim.name} is {_ONE_POD}: it may be that a pod of another job has it"
    by_itself = len(users) == 1 and users[0].topology.required == NODE_LEVEL
    if pods > 1 and claim.modes and _ONE_NODE.issuperset(claim.modes) and not by_itself:
        return f"claim {claim.name} is ReadWriteOnce: one node can have it at a time"
    return ""


def _made_before(kind: StorageClass) -> str:
    return "" if kind.provisions else f"StorageClass {kind.name} has only volumes that were made beforehand"

"""Volumes that jobs use by claims, and which jobs a change of one concerns."""

import asyncio
from collections import defaultdict
from collections.abc import Set as AbstractSet

from queuectl.core.volumes import Volumes
from queuectl.model.objects import Job
from queuectl.model.volumes import Claim, StorageClass, Volume


class JobVolumes:
    """What claims, volumes and storage classes mean for jobs."""

    def __init__(self) -> None:
        """Start without any."""
        self.used = asyncio.Event()  # set once a job uses a claim: only then they are of any matter
        self._volumes = Volumes()
        self._jobs: dict[str, Job] = {}  # that use claims, as they were read, by uid
        self._users: defaultdict[str, set[str]] = defaultdict(set)  # uids of those, by namespace and name of the claim

    def keep(self, job: Job) -> Job:
        """Take in a job as it was read; return it with what its claims mean for it."""
        uid = job.gang.uid
        if job.volumes or uid in self._jobs:
            self.forget(uid)
        if job.volumes:
            self.used.set()
            self._jobs[uid] = job
            for key in _claims_of(job):
                self._users[key].add(uid)
        return self._volumes.judge(job)

    def forget(self, uid: str) -> None:
        """Forget a job."""
        job = self._jobs.pop(uid, None)
        for key in _claims_of(job) if job else ():
            self._users[key].discard(uid)
            if not self._users[key]:
                del self._users[key]

    def again(self, uids: AbstractSet[str]) -> list[Job]:
        """Return some jobs with what their claims mean for them now."""
        return [self._volumes.judge(self._jobs[uid]) for uid in uids] if self._volumes.known else []

    def on_claim(self, old: Claim | None, new: Claim | None) -> set[str]:
        """Take in a changed PersistentVolumeClaim; return the jobs that it concerns."""
        if new is not None:
            self._volumes.claims[new.key] = new
        elif old is not None:
            self._volumes.claims.pop(old.key, None)
        changed = [one.key for one in (old, new) if one is not None and new != old]
        return self._of(*changed)

    def on_volume(self, old: Volume | None, new: Volume | None) -> set[str]:
        """Take in a changed PersistentVolume; return the jobs that it concerns."""
        if new is not None:
            self._volumes.volumes[new.name] = new
        elif old is not None:
            self._volumes.volumes.pop(old.name, None)
        changed = [one.claim for one in (old, new) if one is not None and new != old]
        return self._of(*changed)

    def on_storage_class(self, old: StorageClass | None, new: StorageClass | None) -> set[str]:
        """Take in a changed StorageClass; return the jobs that it concerns."""
        if new is not None:
            self._volumes.classes[new.name] = new
        elif old is not None:
            self._volumes.classes.pop(old.name, None)
        return set(self._jobs) if new != old else set()

    def are_known(self) -> set[str]:
        """Take in that all of them have been read; return the jobs that this concerns."""
        self._volumes.known = True
        return set(self._jobs)

    def _of(self, *claims: str) -> set[str]:
        return {uid for claim in claims for uid in self._users.get(claim, ())}


def _claims_of(job: Job) -> set[str]:
    """Return namespace and name of the claims that a job's pods use."""
    return {f"{job.gang.namespace}/{use.claim}" for use in job.volumes if use.claim}

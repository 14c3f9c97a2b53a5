"""How long a job may take to leave: as long as it asks for, and no longer than its queue allows. Pure."""

from queuectl.model.objects import Job
from queuectl.model.reasons import Reason, Why, why

_POD_FIELD = "terminationGracePeriodSeconds"
_POD_DEFAULT = 30  # as the API server fills it in


def allowed(job: Job, seconds: int) -> int:
    """Return how many of the seconds that are asked for the job may take."""
    return seconds if job.max_grace_seconds is None else min(seconds, job.max_grace_seconds)


def of_pods(job: Job, role: str) -> dict[str, int]:
    """Return what pods of a role have to say instead of what their template does, if anything."""
    given = _given(job, role)
    asked = _POD_DEFAULT if given is None else given
    return {_POD_FIELD: allowed(job, asked)} if allowed(job, asked) < asked else {}


def cut(job: Job) -> Why | None:
    """Say what a job asks for beyond what its queue allows, if anything."""
    fields = {"spec.checkpoint.graceSeconds": job.saving.grace_seconds} if job.saving else {}
    fields |= {f"{_POD_FIELD} of role {role}": _given(job, role) or 0 for role in job.templates}
    for field, seconds in fields.items():
        if (most := allowed(job, seconds)) < seconds:
            return why(Reason.GRACE_CUT, queue=job.gang.queue, allowed=most, field=field, wanted=seconds)
    return None


def _given(job: Job, role: str) -> int | None:
    given = job.templates[role].get("spec", {}).get(_POD_FIELD)
    return given if isinstance(given, int) else None  # anything else the API server refuses with the first pod

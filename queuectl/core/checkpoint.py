"""The checkpoint handshake: who is asked to save, whether all have, what is saved and what an interruption cost. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import inf

from queuectl.core.elastic import keys
from queuectl.core.grace import allowed
from queuectl.model.checkpoint import Ask, Checkpoint, Interruption, Report, Signal
from queuectl.model.lifecycle import Attempt, AttemptState, End, Outcome, Shrink
from queuectl.model.objects import Job, Pod
from queuectl.model.plan import PodKey, Portion, gpus_of
from queuectl.model.reasons import Why
from queuectl.model.work import NO_WORK, Work

Reports = Mapping[PodKey, Report]
# Exit codes of who has done with SIGTERM what it is for: 0, or 128 + 15, as JVMs and many trainers end after that. Without
# a handler nothing happens to the first process of a container until SIGKILL, which is 137.
LEFT_WELL = frozenset({0, 143})


def asked(attempt: Attempt, job: Job) -> list[PodKey]:
    """Return the pods of a gang that save its work, and are asked to if its job says how, in order.

    Those of a part that goes are among them: who trains with others saves together with them. Those that come are not.
    """
    return _of_those_that_save(job, attempt, keys(attempt.held, attempt.done))


def _of_those_that_save(job: Job, attempt: Attempt, pods: Iterable[PodKey]) -> list[PodKey]:
    chosen = job.saving.role if job.saving else ""
    roles = {chosen} if chosen else {role.name for role in job.gang.roles if role.must_succeed}
    return [key for key in pods if key[0] in roles and key not in attempt.coming]


def leave(
    attempt: Attempt, job: Job | None, cause: Why, now: float, *, since: float | None = None, by: float = inf
) -> End:
    """Return the end of an attempt that goes for somebody else. If it runs it is asked to save its work before.

    Times are Unix seconds. ``since``: what is saved from then on will do; now, when absent. ``by``: until when those
    have to answer who are asked otherwise than by deletion.
    """
    return End(cause, Outcome.REQUEUE, ask=_ask(attempt, job, now, since, by))


def give_up(attempt: Attempt, job: Job | None, cause: Why, part: Portion, now: float) -> Shrink:
    """Return that a running gang gives up a part. All of it saves its work before, for most trainers then start anew.

    With SIGTERM only the pods of the part are told.
    """
    return Shrink(cause, part, _ask(attempt, job, now))


def before_growth(attempt: Attempt, job: Job) -> Ask | None:
    """Return what the pods of a gang that grows are asked before others join them: most trainers start anew then.

    It follows from since when it grows, so whoever leads asks the same. None with SIGTERM, by which they would end.
    """
    by_word = job.saving is not None and job.saving.signal is not Signal.SIG_TERM
    if job.saving is None or not by_word or attempt.replaces or not attempt.coming or attempt.growing_at is None:
        return None
    at = round(attempt.growing_at, 3)  # Postgres keeps less of a time than a float does
    return Ask(at, at + allowed(job, job.saving.grace_seconds), len(asked(attempt, job)))


def _ask(attempt: Attempt, job: Job | None, now: float, since: float | None = None, by: float = inf) -> Ask | None:
    if job is None or job.saving is None or attempt.state is not AttemptState.RUNNING:
        return None
    by_deletion = job.saving.signal is Signal.SIG_TERM
    pods = 0 if by_deletion else len(asked(attempt, job))
    at, until = now if since is None else since, now + allowed(job, job.saving.grace_seconds)
    if by_deletion:
        return Ask(at, until)
    until = min(until, by)
    return Ask(at, until, pods) if pods and until > now else None


def asked_anew(attempt: Attempt, job: Job | None, pods: Mapping[PodKey, Pod], now: float) -> Attempt:
    """Return an attempt as a new leader has it, at a time in Unix seconds. ``pods``: those of it that are there.

    If the time of its pods to answer was over while nobody led, they have all of it again: nobody may have asked them.
    """
    growth = before_growth(attempt, job) if job else None
    if growth is not None and growth.until <= now and all(pods[key].gated for key in attempt.coming if key in pods):
        return replace(attempt, growing_at=now)
    ask = attempt.asking
    if ask is None or ask.until > now:
        return attempt
    ask = replace(ask, until=now + ask.until - ask.at)
    return replace(attempt, end=replace(attempt.end, ask=ask)) if attempt.end else replace(attempt, ask=ask)


def by_sigterm(job: Job | None, ask: Ask | None) -> int | None:
    """Return the seconds that pods have which are asked by their deletion; None: as long as they say themselves.

    They count from then on, not from the decision: a controller that comes late takes nothing of them.
    """
    if ask is None or ask.pods or job is None or job.saving is None:
        return None
    return allowed(job, job.saving.grace_seconds)


def answered(attempt: Attempt, job: Job, pods: Mapping[PodKey, Pod], reports: Reports, ask: Ask) -> list[PodKey]:
    """Return those of the asked pods that have done what they are asked for, or have nothing to save any more.

    One that was told to stop by others, or has stopped, can't answer any more; then what it has saved since counts.
    """

    def has(key: PodKey) -> bool:
        report, pod = reports.get(key), pods.get(key)
        if (report is not None and ask.answered_by(report.ask, attempt.number)) or (
            pod is not None and pod.phase == "Succeeded"
        ):
            return True
        stops = pod is None or pod.deleting or pod.ended
        return stops and report is not None and report.saved is not None and report.saved.at >= ask.at

    return [key for key in asked(attempt, job) if has(key)]


def by_exit(attempt: Attempt, pod: Pod, known: Report | None) -> Report | None:
    """Return what a pod says by its exit code after it was asked by deletion; what it has reported in words goes before.

    None when it says nothing. Whoever leaves well has saved what there was when it was asked.
    """
    ask = _by_deletion(attempt)
    if ask is None or not pod.ended or (known is not None and known.saved is not None):
        return None
    well = pod.phase == "Succeeded" or pod.exit_code in LEFT_WELL
    return Report(ask.id(attempt.number), Checkpoint(ask.at)) if well else Report()


def last_words(attempt: Attempt, job: Job, reports: Reports, now: float) -> Why | None:
    """Return what has come of asking pods by deleting them, once they are gone.

    None if they were not asked so, or nothing was ever heard of any of them: then nothing is known.
    """
    ask, stay = _by_deletion(attempt), keys(attempt.placements, attempt.done) if attempt.leaving else ()
    pods = [key for key in asked(attempt, job) if key not in stay]
    if ask is None or not pods or not any(key in reports for key in pods):
        return None
    latest = [reports[key].saved if key in reports else None for key in pods]
    done = sum(one is not None and one.at >= ask.at for one in latest)
    return replace(ask, until=min(now, ask.until), pods=len(pods), answered=done).outcome


def _by_deletion(attempt: Attempt) -> Ask | None:
    ask = attempt.end.ask if attempt.end else attempt.ask
    return ask if ask and not ask.pods else None


def saved(attempt: Attempt, job: Job, reports: Reports, now: float) -> Checkpoint | None:
    """Return the last checkpoint of which each pod that saves has its part: the oldest of their latest ones.

    What is dated in the future is of now.
    """
    stay = _of_those_that_save(job, attempt, keys(attempt.placements, attempt.done))
    latest = [reports[key].saved if key in reports else None for key in stay]
    known = [one for one in latest if one is not None]
    if not known or len(known) < len(latest):
        return None
    oldest = min(known, key=lambda one: (-1 if one.step is None else one.step, one.at))
    return replace(oldest, at=min(oldest.at, now), attempt=attempt.number)


def remind(attempt: Attempt, job: Job, last: Ask | None, now: float) -> Ask | None:
    """Return an ask that is due while the attempt runs on: its user wants a checkpoint, or it is time for one.

    ``last``: the latest ask of the attempt, if any.
    """
    saving, since = job.saving, attempt.running_at
    if saving is None or saving.signal is Signal.SIG_TERM or attempt.state is not AttemptState.RUNNING or since is None:
        return None
    until = now + allowed(job, saving.grace_seconds)
    since, wanted = max(since, attempt.saved_at or 0.0), job.save_asked_at
    if wanted is not None and since < wanted and (last is None or last.at < wanted):
        return Ask(wanted, until)
    since = max(since, last.at if last else 0.0)
    if saving.interval_seconds is not None and now >= since + saving.interval_seconds:
        return Ask(now, until)
    return None


def interruption(attempt: Attempt, step: int | None) -> Interruption | None:
    """Return what the end of an attempt cost, if it ran and its job goes on. ``step``: of its last checkpoint."""
    end, at = attempt.end, attempt.ending_at
    if end is None or end.outcome is not Outcome.REQUEUE or attempt.running_at is None or at is None:
        return None
    since = max(attempt.running_at, attempt.saved_at or 0.0)
    gpus = gpus_of(attempt.placements)
    lost = Work.of(gpus, attempt.whole.pods, max(0, round(at - since))) if attempt.placements else NO_WORK
    done = None
    if end.ask is not None:
        in_time = attempt.saved_at is not None and attempt.saved_at >= end.ask.at
        done = end.ask.answered >= end.ask.pods if end.ask.pods else in_time
    return Interruption(at, end.why.code, attempt.saved_at, step if attempt.saved_at else None, lost, done)

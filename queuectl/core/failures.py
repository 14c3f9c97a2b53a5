"""What follows from failed pods, as their job's ``podFailurePolicy`` says (KEP-3329). Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from queuectl.model.failures import Action, FailureRule
from queuectl.model.lifecycle import End, Outcome, Workload
from queuectl.model.objects import Job, Pod
from queuectl.model.reasons import Reason, Why, why


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed pod, how it failed, and the rule that says what follows; without one it is charged."""

    pod: Pod
    how: str
    code: int | None
    index: int = -1
    action: Action = Action.COUNT

    @property
    def rule(self) -> str:
        """The rule, by its place."""
        return f"rules[{self.index}] of podFailurePolicy"


def decisive(pods: Sequence[Pod], job: Job) -> Failure:
    """Return which of the failed pods counts: the one that the first rule matches, or the first one.

    Peers fail of what one of them does, and are often seen to have failed with it.
    """
    found = [_judge(pod, job) for pod in pods]
    return min(found, key=lambda failure: failure.index if failure.index >= 0 else len(job.failures.rules))


def disruption(pods: Sequence[Pod], job: Job) -> Failure | None:
    """Return the disrupted pod about whose conditions a rule says other than Ignore, which goes without saying."""
    found = [failure for pod in pods if (failure := _by_rules(pod, job, by_code=False)) is not None]
    first = min(found, key=lambda failure: failure.index, default=None)
    return first if first is not None and first.action is not Action.IGNORE else None


def end(failure: Failure, workload: Workload, job: Job, now: float, back_off: Callable[[int], float]) -> End:
    """Return the end of the gang. ``back_off``: until when to wait after so many failures in a row (Unix seconds).

    However the rules are, a job that fails time and again comes to an end: what is not charged is counted by itself,
    up to ``ignoreLimit``, and only steps that were never saved before begin that count anew.
    """
    told = {"pod": failure.pod.name, "how": failure.how, "rule": failure.rule}
    match failure.action:
        case Action.COUNT:
            return _charged(failure, workload, job, back_off)
        case Action.FAIL_JOB:
            cause = why(Reason.POD_FAILURE_POLICY, **told)
            return End(cause, Outcome.FAILED, charged=True, exit_code=failure.code)
    node = failure.pod.node if failure.action is Action.AVOID_NODE else ""
    step = workload.saved.step if workload.saved else None
    ignored = workload.ignored.then(step, node, now)
    limit = job.failures.ignore_limit
    if ignored.times > limit:
        last = f"Pod {failure.pod.name} failed with {failure.how} ({failure.rule}: {failure.action})."
        over = why(Reason.IGNORE_LIMIT_EXCEEDED, times=ignored.times, limit=limit, cause=last)
        return End(over, Outcome.FAILED, exit_code=failure.code, ignored=ignored)
    facts: dict[str, object] = {**told, "times": ignored.times, "limit": limit}
    cause = why(Reason.NODE_BLAMED, node=node, **facts) if node else why(Reason.FAILURE_IGNORED, **facts)
    return End(cause, Outcome.REQUEUE, back_off(ignored.times), exit_code=failure.code, ignored=ignored)


def _charged(failure: Failure, workload: Workload, job: Job, back_off: Callable[[int], float]) -> End:
    told = f" ({failure.rule}: {failure.action})" if failure.index >= 0 else ""
    code = "unknown" if failure.code is None else failure.code
    cause: Why = why(Reason.POD_FAILED, pod=failure.pod.name, code=f"{code}{told}")
    failures = workload.failures + 1
    if failures > job.backoff_limit:
        facts = {"failures": failures, "limit": job.backoff_limit, "cause": str(cause)}
        return End(why(Reason.BACKOFF_LIMIT_EXCEEDED, **facts), Outcome.FAILED, charged=True, exit_code=failure.code)
    return End(cause, Outcome.REQUEUE, back_off(failures), charged=True, exit_code=failure.code)


def _judge(pod: Pod, job: Job) -> Failure:
    code = "unknown" if pod.exit_code is None else pod.exit_code
    return _by_rules(pod, job) or Failure(pod, f"exit code {code}", pod.exit_code)


def _by_rules(pod: Pod, job: Job, *, by_code: bool = True) -> Failure | None:
    for index, rule in enumerate(job.failures.rules):
        if rule.role not in {"", pod.role} or (rule.codes and not by_code):
            continue
        found = _exit(rule, pod) if rule.codes else _condition(rule, pod)
        if found is not None:
            how, code = found
            return Failure(pod, how, code, index, rule.action)
    return None


def _exit(rule: FailureRule, pod: Pod) -> tuple[str, int] | None:
    """Return the exit code that a rule matches; containers that ended well have none."""
    for container, code in pod.exits:
        if rule.container in {"", container} and (code in rule.codes) is rule.among:
            return f"exit code {code} of container {container}", code
    return None


def _condition(rule: FailureRule, pod: Pod) -> tuple[str, int | None] | None:
    has = dict(pod.conditions)
    found = next((f"{kind}={status}" for kind, status in rule.conditions if has.get(kind) == status), None)
    return (f"condition {found}", pod.exit_code) if found else None

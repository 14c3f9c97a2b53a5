"""The checkpoint handshake: who is asked, when a gang may go, and what an interruption cost."""

from dataclasses import replace
from typing import Any

import pytest

from queuectl.core.checkpoint import (
    asked,
    asked_anew,
    before_growth,
    by_exit,
    by_sigterm,
    give_up,
    interruption,
    last_words,
    leave,
    remind,
    saved,
)
from queuectl.core.elastic import finished, last
from queuectl.core.lifecycle import View, deadline, next_move, still_asked
from queuectl.model.checkpoint import Answer, Ask, Checkpoint, Report, Saving, Signal
from queuectl.model.lifecycle import Attempt, AttemptState, End, Move, Outcome, Workload
from queuectl.model.objects import Job, Place, Pod
from queuectl.model.plan import Placement, PodKey, Portion, Repair
from queuectl.model.reasons import Reason, why
from queuectl.model.resources import CARD
from queuectl.model.work import Work
from tests.support.builders import gang, requests, role

NOW, RUNNING_AT = 2000.0, 1000.0
DRAINED = why(Reason.QUEUE_DRAINED, queue="q")
A, B, PS = ("worker", 0), ("worker", 1), ("ps", 0)
PLACEMENTS = (
    Placement("worker", "any", "n", 2, requests(gpu=4), 4 * CARD), Placement("ps", "any", "n", 1, requests(cpu=1)),
)  # fmt: skip
SAVING = Saving(Signal.ANNOTATION, Answer.ANNOTATION, grace_seconds=60)
JOB = Job(
    gang("g", role("worker", 2, gpu=4), role("ps", 1, must_succeed=False)), 1, "1", max_run_seconds=1005, saving=SAVING
)
RUNNING = Attempt("g", 3, AttemptState.RUNNING, 1, PLACEMENTS, 900.0, RUNNING_AT)
WORKLOAD = Workload("g", "team", "g", "q", 0, 0.0, 1, attempt=3)
PODS = {
    key: Pod(f"{key}", "team", f"g-{key[0]}-{key[1]}", "1", "n", "Running", ready=True, role=key[0], index=key[1])
    for key in (A, B, PS)
}


def leaving(job: Job = JOB) -> Attempt:
    end = leave(RUNNING, job, DRAINED, NOW)
    return replace(RUNNING, state=end.first, end=end)


def view(**given: Any) -> View:
    known: dict[str, Any] = {
        "workload": WORKLOAD, "attempt": leaving(), "job": JOB, "pods": PODS, "places": {"n": Place.GOOD}, "now": NOW + 1,
    }  # fmt: skip
    return View(**{**known, **given})


def report(name: str = "", at: float = NOW, step: int | None = None) -> Report:
    return Report(name, Checkpoint(at, step))


def end_of(move: Move | None) -> End:
    assert move is not None
    assert move.to is AttemptState.ENDING
    assert move.end is not None
    return move.end


def test_who_has_to_go_is_asked_first_if_its_job_says_how() -> None:
    assert leaving().state is AttemptState.CHECKPOINTING
    assert leaving().end == End(DRAINED, Outcome.REQUEUE, ask=Ask(NOW, NOW + 60, pods=2))
    assert deadline(leaving(), JOB) == NOW + 60
    assert leave(RUNNING, replace(JOB, saving=None), DRAINED, NOW) == End(DRAINED, Outcome.REQUEUE)
    starting = replace(RUNNING, state=AttemptState.UNGATED, running_at=None)
    assert leave(starting, JOB, DRAINED, NOW).first is AttemptState.ENDING, "it has nothing to save"
    by_signal = replace(JOB, saving=Saving(grace_seconds=60))
    assert leave(RUNNING, by_signal, DRAINED, NOW).ask == Ask(NOW, NOW + 60, pods=0)
    assert leaving(by_signal).state is AttemptState.ENDING, "its pods are asked by their deletion"


def test_who_may_never_have_been_asked_for_nobody_led_has_all_of_its_time_again() -> None:
    late = NOW + 900
    again = asked_anew(leaving(), JOB, {}, late)
    assert deadline(again, JOB) == late + 60
    assert next_move(view(attempt=again, now=late)) is None
    assert again.asking is not None
    assert again.asking.id(3) == ID, "it is the same ask"
    part = asked_anew(shrinking(), JOB, {}, late)
    assert part.asking is not None
    assert (part.asking.id(3), part.asking.until) == (ID, late + 60)
    for one in (leaving(), shrinking(), RUNNING):
        assert asked_anew(one, JOB, {}, NOW + 59) == one


def test_who_is_asked_by_deletion_has_all_of_its_grace_however_late_it_is_deleted() -> None:
    by_signal = replace(JOB, saving=Saving(grace_seconds=60))
    ask = Ask(NOW - 900, NOW - 840)  # nobody led since
    assert by_sigterm(by_signal, ask) == 60
    assert by_sigterm(replace(by_signal, max_grace_seconds=20), ask) == 20
    assert [by_sigterm(by_signal, None), by_sigterm(JOB, Ask(NOW, NOW + 60, 2)), by_sigterm(None, ask)] == [None] * 3


def test_before_others_join_a_gang_its_pods_are_asked_the_same_by_whoever_leads() -> None:
    """Most trainers start anew then. The new pods have nothing to save, and have their time to start after that."""
    part = Portion((Placement("worker", "any", "m", 1, requests(gpu=4), 4 * CARD, first=2),))
    grows = RUNNING.growing(part, NOW)
    ask = Ask(NOW, NOW + 60, pods=2)
    assert before_growth(grows, JOB) == ask
    assert deadline(grows, replace(JOB, max_run_seconds=None)) == NOW + 60 + JOB.start_deadline_seconds
    assert still_asked(view(attempt=grows)) == ask
    assert still_asked(view(attempt=grows, now=NOW + 60)) is None
    answers = {A: report(ID, step=7), B: report(ID, step=8)}
    assert still_asked(view(attempt=grows, reports=answers)) is None
    late = NOW + 900  # nobody led since
    again = asked_anew(grows, JOB, {}, late)
    assert still_asked(view(attempt=again, now=late)) == Ask(late, late + 60, pods=2)
    assert asked_anew(grows, JOB, {}, NOW + 59) == grows
    joined = Pod("uid-2", "ns", "g-2", "1", phase="Pending")
    assert asked_anew(grows, JOB, {("worker", 2): joined}, late) == grows, "it was let go, so they were asked"
    assert asked_anew(grows, JOB, {("worker", 2): replace(joined, gated=True)}, late) == again
    assert saved(grows, JOB, answers, NOW) == Checkpoint(NOW, 7, attempt=3)
    by_signal, silent = replace(JOB, saving=Saving(grace_seconds=60)), replace(JOB, saving=None)
    assert [before_growth(grows, job) for job in (by_signal, silent)] == [None, None]
    assert before_growth(RUNNING, JOB) is None
    lost = Repair(frozenset({B}), (), (), DRAINED)
    repaired = replace(RUNNING.repairing(lost, NOW), state=AttemptState.GROWING)
    assert before_growth(repaired, JOB) is None, "who has lost a peer can't save together with it"


def test_pods_of_the_role_are_asked_or_of_all_that_must_succeed() -> None:
    assert asked(RUNNING, JOB) == [A, B]
    assert asked(RUNNING, replace(JOB, saving=replace(SAVING, role="ps"))) == [PS]
    assert asked(RUNNING.without(finished(RUNNING, [A])), JOB) == [B], "what is done has nothing to save"


ID = Ask(NOW, NOW + 60).id(3)


@pytest.mark.parametrize(
    ("given", "answered"),
    [
        ({"reports": {A: report(ID), B: report(ID)}}, 2),
        # A reminder may be later than what a drain asks, which is named by the eviction, in whole seconds.
        ({"reports": {A: report(ID), B: report(Ask(NOW + 0.5, NOW).id(3))}}, 2),
        ({"reports": {A: report(ID), B: report(ID).after(report("exec-1", NOW - 1))}}, 2),
        ({"reports": {A: report(ID), B: report("mine", NOW + 1).after(report(ID))}}, 2),
        ({"reports": {A: report(ID)}, "pods": {**PODS, B: replace(PODS[B], phase="Succeeded")}}, 2),
        ({"reports": {A: report(ID)}, "now": NOW + 60}, 1),
        ({"now": NOW + 3600}, 0),
        ({"reports": {A: report(ID)}, "pods": {**PODS, B: replace(PODS[B], phase="Failed", exit_code=1)}}, 1),
        ({"pods": {A: PODS[A], PS: PODS[PS]}}, 0),
        ({"places": {"n": Place.GONE}}, 0),
    ],
    ids=[
        "all answer",
        "one answers a later ask",
        "somebody else had asked before",
        "somebody else has asked since",
        "one is done",
        "one is late",
        "all are late",
        "one dies of it",
        "one is removed",
        "their node is lost",
    ],
)
def test_a_gang_goes_when_all_have_answered_or_can_not_any_more(given: dict[str, Any], answered: int) -> None:
    over = min(given.get("now", NOW + 1), NOW + 60)
    assert end_of(next_move(view(**given))) == End(DRAINED, Outcome.REQUEUE, ask=Ask(NOW, over, 2, answered))


@pytest.mark.parametrize(
    "reports",
    [
        {},
        {A: report(ID)},
        {A: report(ID), B: report(at=NOW + 1)},
        {A: report(ID), B: report(Ask(NOW - 9, NOW).id(3))},
        {A: report(ID), B: report(Ask(NOW, NOW + 60).id(2))},
        {A: report(ID), PS: report(ID)},
        {A: report(ID), B: report("mine", NOW + 1)},
    ],
    ids=[
        "nobody",
        "one of two",
        "unasked",
        "an earlier ask",
        "of an earlier attempt",
        "whoever was not asked",
        "others' ask",
    ],
)
def test_until_then_it_stays(reports: dict[PodKey, Report]) -> None:
    assert next_move(view(reports=reports)) is None
    assert next_move(view(reports=reports, now=NOW + 59)) is None, "also past its maxRunSeconds"


def told(pod: Pod, *, since: float = NOW - 2, grace: float = 30, **given: Any) -> Pod:
    """Return a pod that others have told to stop."""
    return replace(pod, deleting=True, told_at=since, stops_by=since + grace, **given)


EVICTED = {**PODS, B: told(PODS[B], disrupted="Eviction API: evicting")}
UP = view(attempt=RUNNING, pods=EVICTED, now=NOW)


@pytest.mark.parametrize("cause", ["PodDisrupted", "PodLost"])
def test_a_gang_of_which_a_pod_is_evicted_or_deleted_saves_while_that_has_time_to_stop(cause: str) -> None:
    pods = EVICTED if cause == "PodDisrupted" else {**PODS, B: told(PODS[B])}
    move = next_move(replace(UP, pods=pods))
    assert move is not None
    assert move.to is AttemptState.CHECKPOINTING
    assert move.end is not None
    assert (move.end.why.code, move.end.outcome, move.end.charged) == (cause, Outcome.REQUEUE, False)
    assert move.end.ask == Ask(NOW - 2, NOW + 28, pods=2), "what it saves since it was told will do"
    asking = replace(UP, pods=pods, attempt=replace(RUNNING, state=AttemptState.CHECKPOINTING, end=move.end))
    assert next_move(replace(asking, now=NOW + 27)) is None
    assert end_of(next_move(replace(asking, now=NOW + 28))).why.code == cause
    name = Ask(NOW - 2, NOW).id(3)
    assert next_move(replace(asking, reports={B: report(name)})) is None
    ended = end_of(next_move(replace(asking, reports={A: report(name), B: report(name)})))
    assert ended.ask is not None
    assert (ended.why.code, ended.ask.answered) == (cause, 2)


def test_the_least_of_what_the_pod_and_the_job_allow_is_its_time() -> None:
    def until(pod: Pod, job: Job = JOB) -> float | None:
        move = next_move(replace(UP, job=job, pods={**PODS, B: pod}))
        assert move is not None
        assert move.end is not None
        return move.end.ask.until if move.end.ask else None

    assert until(told(PODS[B], grace=600)) == NOW + 60
    assert until(told(PODS[B], grace=2)) is None, "it should be gone by now"
    assert until(told(PODS[B], phase="Failed", exit_code=143)) is None, "it has stopped"
    assert until(told(PODS[B], grace=5), replace(JOB, saving=Saving(grace_seconds=60))) == NOW + 60, "SIGTERM, at once"
    assert until(told(PODS[B]), replace(JOB, saving=None)) is None
    both = next_move(replace(UP, pods={**EVICTED, A: told(PODS[A], grace=9)}))
    assert both is not None
    assert both.end is not None
    assert both.end.ask == Ask(NOW - 2, NOW + 7, pods=2), "the first to stop sets the time"


def test_an_evicted_gang_has_saved_when_all_did_so_before_they_stopped() -> None:
    """Those who agree to stop when one of them has to exit by themselves, and can't answer by name."""
    end = End(why(Reason.POD_DISRUPTED, pod="g", problem="evicting"), Outcome.REQUEUE, ask=Ask(NOW - 2, NOW + 28, 2))
    asking = replace(UP, attempt=replace(RUNNING, state=AttemptState.CHECKPOINTING, end=end))
    failed = {key: replace(pod, phase="Failed", exit_code=143) for key, pod in EVICTED.items() if key != PS}
    both = {A: report(at=NOW - 1), B: report(at=NOW - 1)}
    assert next_move(replace(asking, pods={**EVICTED, B: failed[B]}, reports={B: both[B]})) is None, "the other may yet"
    assert next_move(replace(asking, pods={A: PODS[A], PS: PODS[PS]}, reports={B: both[B]})) is None, (
        "also once it is gone"
    )
    for pods, reports, answered in (
        ({**EVICTED, **failed}, both, 2),
        ({A: failed[A], PS: PODS[PS]}, both, 2),
        ({**EVICTED, **failed}, {A: both[A], B: report(at=NOW - 3)}, 1),
        ({**EVICTED, B: failed[B]}, {A: both[A]}, 0),
    ):
        ended = end_of(next_move(replace(asking, pods=pods, reports=reports)))
        assert ended.ask is not None
        assert (ended.ask.answered, ended.charged) == (answered, False)


def test_who_lost_a_pod_for_good_or_can_be_repaired_is_not_asked() -> None:
    gone = next_move(replace(UP, pods={A: PODS[A], B: EVICTED[B]}))
    assert end_of(gone).ask is None
    assert next_move(replace(UP, job=replace(JOB, replaces_lost_pods=True))) is None, "the pod is to be replaced"
    starting = replace(UP, attempt=replace(RUNNING, state=AttemptState.UNGATED, running_at=None))
    assert end_of(next_move(starting)).ask is None, "it has nothing to save"


def test_an_ask_that_is_answered_twice_and_reports_after_it_are_answered() -> None:
    twice = report(ID, NOW + 1, 10).after(report(ID, NOW, 10))
    later = report("", NOW + 9, 20).after(twice)
    assert later == Report(ID, Checkpoint(NOW + 9, 20))
    assert end_of(next_move(view(reports={A: later, B: twice}))).ask == Ask(NOW, NOW + 1, 2, 2)


def test_who_succeeds_while_it_is_asked_has_succeeded() -> None:
    done = {key: replace(pod, phase="Succeeded") for key, pod in PODS.items() if key != PS}
    assert end_of(next_move(view(pods={**PODS, **done}))).outcome is Outcome.SUCCEEDED


def test_who_is_deleted_while_it_is_asked_is_not_waited_for() -> None:
    assert end_of(next_move(view(job=replace(JOB, deleting=True)))).outcome is Outcome.DELETED


def test_the_last_checkpoint_is_the_oldest_of_the_latest_ones() -> None:
    two = {A: report(at=NOW - 5, step=30), B: report(at=NOW - 9, step=20)}
    assert saved(RUNNING, JOB, two, NOW) == Checkpoint(NOW - 9, 20, attempt=3)
    assert saved(RUNNING, replace(JOB, saving=None), two, NOW) == saved(RUNNING, JOB, two, NOW), "asked or not"
    assert saved(RUNNING, JOB, {A: two[A]}, NOW) is None, "the other has none yet"
    ahead = {A: report(at=NOW + 99, step=30), B: report(at=NOW + 99, step=30)}
    assert saved(RUNNING, JOB, ahead, NOW) == Checkpoint(NOW, 30, attempt=3), "its clock is ahead"


def test_a_checkpoint_never_goes_back() -> None:
    last = Checkpoint(NOW, 30, attempt=3)
    assert Checkpoint(NOW + 1, 31, attempt=3).follows(last)
    assert Checkpoint(NOW - 500, 5, attempt=4).follows(last), "a later attempt went on from an older one"
    assert not Checkpoint(NOW + 1, 29, attempt=3).follows(last)
    assert not Checkpoint(NOW - 1, 31, attempt=3).follows(last)
    assert not Checkpoint(NOW + 1, 40, attempt=2).follows(last)
    assert not last.follows(last)


@pytest.mark.parametrize(
    ("saved_at", "answered", "seconds", "told"),
    [(None, 0, 1060, False), (NOW + 50, 1, 10, False), (NOW + 60, 2, 0, True), (RUNNING_AT - 5, 0, 1060, False)],
)
def test_an_interruption_costs_the_work_since_the_last_checkpoint(
    saved_at: float | None,
    answered: int,
    seconds: int,
    told: bool,  # noqa: FBT001
) -> None:
    end = End(DRAINED, Outcome.REQUEUE, ask=Ask(NOW, NOW + 60, 2, answered))
    over = replace(RUNNING, state=AttemptState.ENDING, end=end, ending_at=NOW + 60, saved_at=saved_at)
    found = interruption(over, 7)
    assert found is not None
    assert found.lost == Work(8 * seconds)
    assert (found.cause, found.saved_at, found.answered) == ("QueueDrained", saved_at, told)
    assert found.saved_step == (7 if saved_at else None)
    assert next_move(view(attempt=over, pods={})) == Move(
        "g", 3, AttemptState.ENDED, interruption=replace(found, saved_step=None)
    )


def test_what_came_of_asking_by_deletion_is_told_where_pods_report_at_all() -> None:
    by_deletion = replace(JOB, saving=Saving(grace_seconds=60))
    over = leaving(by_deletion)
    both = {A: report(at=NOW + 1), B: report(at=NOW + 2)}
    assert last_words(over, by_deletion, both, NOW + 3) == why(Reason.CHECKPOINTED, pods=2, seconds=3)
    missed = why(Reason.CHECKPOINT_MISSED, answered=1, pods=2, seconds=60)
    assert last_words(over, by_deletion, {**both, B: report(at=NOW - 1)}, NOW + 61) == missed
    assert last_words(over, by_deletion, {A: report(at=NOW + 1)}, NOW + 61) == missed
    assert last_words(over, by_deletion, {}, NOW + 61) is None, "it may save and not say so"
    assert last_words(leaving(), JOB, both, NOW + 3) is None, "it was told when they answered"


@pytest.mark.parametrize(
    ("phase", "code", "well"),
    [
        ("Succeeded", 0, True),
        ("Failed", 143, True),
        ("Failed", 137, False),
        ("Failed", 1, False),
        ("Failed", None, False),
    ],
)
def test_who_is_asked_by_deletion_and_reports_nothing_answers_by_its_exit_code(
    phase: str,
    code: int | None,
    well: bool,  # noqa: FBT001
) -> None:
    by_deletion = replace(JOB, saving=Saving(grace_seconds=60))
    over, ended = leaving(by_deletion), replace(PODS[A], phase=phase, exit_code=code)
    said = by_exit(over, ended, None)
    assert said is not None
    assert said == (report(ID) if well else Report())
    left = {A: said, B: report(at=NOW + 2)}
    assert (saved(over, by_deletion, left, NOW + 3) == Checkpoint(NOW, attempt=3)) is well
    outcome = last_words(over, by_deletion, left, NOW + 3)
    assert outcome is not None
    assert outcome.reason is (Reason.CHECKPOINTED if well else Reason.CHECKPOINT_MISSED)


def test_an_exit_code_says_nothing_of_who_reports_still_runs_or_is_not_asked_by_deletion() -> None:
    over, ended = (
        leaving(replace(JOB, saving=Saving(grace_seconds=60))),
        replace(PODS[A], phase="Failed", exit_code=143),
    )
    assert by_exit(over, ended, report(at=NOW - 30)) is None, "it would have said so"
    assert by_exit(over, PODS[A], None) is None
    assert by_exit(leaving(), ended, None) is None
    assert by_exit(RUNNING, ended, None) is None


def test_of_a_part_that_is_asked_by_deletion_only_its_pods_are_counted() -> None:
    job = replace(ELASTIC, saving=Saving(grace_seconds=60))
    going = shrinking(job)
    said = by_exit(going, replace(PODS[B], phase="Failed", exit_code=143), None)
    assert said is not None
    assert last_words(going, job, {B: said}, NOW + 3) == why(Reason.CHECKPOINTED, pods=1, seconds=3)
    assert last_words(going, job, {A: report(at=NOW + 1)}, NOW + 3) is None, "nothing was heard of those that go"


def test_what_ends_for_good_or_never_ran_is_no_interruption() -> None:
    over = replace(RUNNING, state=AttemptState.ENDING, ending_at=NOW, end=End(why(Reason.SUCCEEDED), Outcome.SUCCEEDED))
    assert interruption(over, None) is None
    assert interruption(replace(over, end=End(DRAINED, Outcome.REQUEUE), running_at=None), None) is None


def test_a_running_job_is_reminded_after_each_interval_without_a_checkpoint() -> None:
    job = replace(JOB, saving=replace(SAVING, interval_seconds=100))
    assert remind(RUNNING, job, None, RUNNING_AT + 99) is None
    assert remind(RUNNING, job, None, RUNNING_AT + 100) == Ask(RUNNING_AT + 100, RUNNING_AT + 160)
    assert remind(RUNNING, job, Ask(RUNNING_AT + 100, 0), RUNNING_AT + 199) is None
    assert remind(replace(RUNNING, saved_at=RUNNING_AT + 50), job, None, RUNNING_AT + 149) is None
    assert remind(leaving(), job, None, NOW) is None
    by_signal = replace(job, saving=Saving(interval_seconds=100))
    assert remind(RUNNING, by_signal, None, NOW) is None, "that would end it"
    assert remind(RUNNING, JOB, None, NOW) is None


def test_a_job_is_asked_once_when_its_user_wants_a_checkpoint() -> None:
    job = replace(JOB, save_asked_at=NOW - 1)
    ask = remind(RUNNING, job, None, NOW)
    assert ask == Ask(NOW - 1, NOW + 60)
    assert remind(RUNNING, job, None, NOW + 5) == Ask(NOW - 1, NOW + 65), "by the same name after a restart"
    assert remind(RUNNING, job, ask, NOW + 1) is None
    assert remind(replace(RUNNING, saved_at=NOW), job, None, NOW + 1) is None, "it has been made"
    assert remind(replace(RUNNING, running_at=NOW), job, None, NOW) is None, "it was wanted of an earlier attempt"


# A part of a gang goes

ELASTIC = replace(JOB, gang=gang("g", role("worker", 2, gpu=4, least=1), role("ps", 1, must_succeed=False)))
SHRUNK = why(Reason.SHRUNK, gone=1, before=3, after=2, job="team/h", queue="q", priority=5, cause="it goes first")


def shrinking(job: Job = ELASTIC) -> Attempt:
    part = last(RUNNING.whole, {"worker": 1})
    return RUNNING.shrinking(give_up(RUNNING, job, SHRUNK, part, NOW))


def part_view(**given: Any) -> View:
    return view(**{"job": ELASTIC, "attempt": shrinking(), **given})


def test_all_of_a_gang_is_asked_before_a_part_of_it_goes() -> None:
    assert shrinking().ask == shrinking().asking == Ask(NOW, NOW + 60, pods=2)
    assert asked(shrinking(), ELASTIC) == [A, B], "who stays saves together with who goes"
    assert deadline(shrinking(), ELASTIC) == NOW + 5, "its maxRunSeconds come before the answers"
    assert deadline(shrinking(), replace(ELASTIC, max_run_seconds=None)) == NOW + 60
    assert shrinking(replace(ELASTIC, saving=None)).ask is None
    by_signal = shrinking(replace(ELASTIC, saving=Saving(grace_seconds=60)))
    assert by_signal.ask == Ask(NOW, NOW + 60, pods=0)
    assert by_signal.asking is None, "only the part is told, by its deletion, and nobody is waited for"


@pytest.mark.parametrize(
    ("given", "answers"),
    [
        ({"reports": {A: report(ID), B: report(ID)}}, 2),
        ({"reports": {A: report(ID)}, "pods": {**PODS, B: replace(PODS[B], phase="Succeeded")}}, 2),
        ({"reports": {A: report(ID)}, "now": NOW + 60, "job": replace(ELASTIC, max_run_seconds=None)}, 1),
        ({"reports": {A: report(ID)}, "pods": {**PODS, B: replace(PODS[B], phase="Failed", exit_code=1)}}, 1),
        ({"reports": {A: report(ID)}, "pods": {A: PODS[A], PS: PODS[PS]}}, 1),
    ],
    ids=["all answer", "one that goes is done", "one is late", "one that goes dies of it", "one that goes is removed"],
)
def test_a_part_goes_when_all_have_answered_or_can_not_any_more(given: dict[str, Any], answers: int) -> None:
    over = Ask(NOW, min(given.get("now", NOW + 1), NOW + 60), 2, answers)
    assert next_move(part_view(**given)) == Move("g", 3, AttemptState.SHRINKING, asked=over)
    gone = {A: PODS[A], PS: PODS[PS]}
    after = replace(shrinking(), ask=None)
    assert next_move(part_view(attempt=after, pods=gone)) == Move("g", 3, AttemptState.RUNNING)
    assert next_move(part_view(attempt=after)) is None, "it has not gone yet"


def test_until_then_no_part_goes() -> None:
    assert next_move(part_view()) is None
    assert next_move(part_view(reports={A: report(ID)})) is None
    assert next_move(part_view(reports={A: report(ID), B: report("")})) is None
    fails = next_move(part_view(pods={**PODS, A: replace(PODS[A], phase="Failed", exit_code=1)}))
    assert end_of(fails).why.reason is Reason.POD_FAILED, "one that stays ends the gang"


def test_pods_that_are_done_meanwhile_have_nothing_to_save() -> None:
    role_of_three = replace(ELASTIC, gang=gang("g", role("worker", 3, gpu=1, least=1)))
    whole = replace(RUNNING, placements=(Placement("worker", "any", "n", 3, requests(gpu=1), CARD),))
    third = ("worker", 2)
    pods = {key: replace(PODS[A], name=f"{key}", index=key[1]) for key in (A, B, third)}
    attempt = whole.shrinking(give_up(whole, role_of_three, SHRUNK, last(whole.whole, {"worker": 1}), NOW))
    pods[A] = replace(pods[A], phase="Succeeded")
    given = {"job": role_of_three, "pods": pods}
    move = next_move(view(attempt=attempt, **given))
    assert move is not None
    assert move.done is not None, "what it held is given back at once"
    attempt = attempt.without(move.done)
    move = next_move(view(attempt=attempt, reports={B: report(ID), third: report(ID)}, **given))
    assert move is not None
    assert move.asked == Ask(NOW, NOW + 1, 3, 3)


def test_who_has_to_leave_a_node_meanwhile_saves_its_work_first() -> None:
    cause = why(Reason.NODE_FAULTY, node="n", problem="it is at fault")
    assert next_move(part_view(leave=cause)) is None
    assert end_of(next_move(part_view(attempt=replace(shrinking(), ask=None), leave=cause))).why == cause

"""How long a job may take to leave."""

from dataclasses import replace

from queuectl.control.world import World
from queuectl.core.checkpoint import leave, remind
from queuectl.core.grace import cut, of_pods
from queuectl.core.lifecycle import BackOff
from queuectl.model.checkpoint import Answer, Ask, Saving, Signal
from queuectl.model.lifecycle import Attempt, AttemptState
from queuectl.model.objects import Job, Queue
from queuectl.model.plan import Placement
from queuectl.model.reasons import Reason, why
from tests.support.builders import gang, role

RUNNING = Attempt("g", 1, AttemptState.RUNNING, 1, (Placement("worker", "any", "n", 1, ()),), 900.0, 1000.0)
SAVING = Saving(Signal.ANNOTATION, Answer.ANNOTATION, grace_seconds=600, interval_seconds=100)


def job(most: int | None, **pod: object) -> Job:
    templates = {"worker": {"spec": pod}}
    return Job(gang("g", role()), 1, "1", templates=templates, saving=SAVING, max_grace_seconds=most)


def test_a_job_is_given_what_it_asks_for_and_no_more_than_its_queue_allows() -> None:
    for most, seconds in ((None, 600), (3600, 600), (60, 60)):
        end = leave(RUNNING, job(most), why(Reason.QUEUE_DRAINED, queue="q"), 2000.0)
        assert end.ask == Ask(2000.0, 2000.0 + seconds, 1)
        assert remind(RUNNING, job(most), None, 2000.0) == Ask(2000.0, 2000.0 + seconds)


def test_so_are_its_pods_between_sigterm_and_sigkill() -> None:
    assert of_pods(job(60), "worker") == {}, "30 s are what a pod has that does not say"
    assert of_pods(job(10), "worker") == {"terminationGracePeriodSeconds": 10}
    assert of_pods(job(60, terminationGracePeriodSeconds=3600), "worker") == {"terminationGracePeriodSeconds": 60}
    assert of_pods(job(None, terminationGracePeriodSeconds=3600), "worker") == {}
    assert of_pods(job(60, terminationGracePeriodSeconds=20), "worker") == {}
    assert of_pods(job(10, terminationGracePeriodSeconds=0), "worker") == {}
    assert of_pods(job(60, terminationGracePeriodSeconds=None), "worker") == {}


def test_what_is_cut_is_told() -> None:
    assert cut(job(None)) is None
    assert cut(job(600)) is None
    assert str(cut(job(60))) == (
        "Queue q lets its jobs take 60 s to leave, which is what counts instead of spec.checkpoint.graceSeconds, 600 s."
    )
    told = cut(replace(job(60, terminationGracePeriodSeconds=90), saving=None))
    assert "terminationGracePeriodSeconds of role worker, 90 s" in str(told)
    assert cut(replace(job(10), saving=None)) is None, "it has asked for nothing"


def test_jobs_follow_their_queue_whichever_is_read_first() -> None:
    world = World(BackOff())
    queue, short, one = Queue("q"), Queue("q", max_grace_seconds=60), job(None)
    world.on_job(None, one)
    world.on_queue(None, short)
    assert world.jobs["g"].max_grace_seconds == 60
    newer = replace(one, resource_version="2")
    world.on_job(one, newer)
    assert world.jobs["g"].max_grace_seconds == 60
    world.restated.clear()
    world.on_queue(short, queue)
    assert world.jobs["g"].max_grace_seconds is None
    assert world.restated == {"g"}, "its status says so"
    world.on_queue(queue, short)
    world.on_queue(short, None)
    assert world.jobs["g"].max_grace_seconds is None

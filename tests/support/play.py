"""Play a scenario on a real control plane: nodes, queues, jobs and pods are there, the scenario's clock is here.

The clock stands still while anything moves. It goes on to the next instant when the controller has answered what was
asked of it after the last change, and nothing is on its way any more but what waits for the clock itself (a pod that
takes `startSeconds`, runs for `run`, or stops for `grace`). So what the verdict judges, the order of things and what
has come of each instant, does not depend on how fast the machine is. Only where limits of the controller itself may
pass (a start deadline, a back-off, `minRunSeconds` ...) real time counts: PACE of it for each of the scenario's seconds.
"""

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Awaitable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from queuectl.core.lifecycle import BackOff
from queuectl.core.limits import not_for
from queuectl.demo.observer import Observer
from queuectl.kube import decode
from queuectl.kube.client import MERGE_PATCH, ApiError, KubeClient
from queuectl.kube.names import (
    API,
    ASK,
    ATTEMPT_LABEL,
    JOB_LABEL,
    REPORT,
    jobs_path,
    pods_path,
)
from queuectl.local.nodes import node_manifest
from queuectl.local.prepare import create_nodes
from queuectl.model.plan import PodKey
from queuectl.model.reasons import Reason
from queuectl.simulate.clockwork import EVICTED, OVERTAKEN, PREEMPTED, REQUEUED, SHRUNK, Entry, Run, State
from queuectl.simulate.form import EventForm, JobForm, NodeForm, Scenario, WantForm, edited
from queuectl.simulate.verdict import differences
from tests.support import ledger, manifests
from tests.support.agenda import Action, Agenda
from tests.support.commands import Commands
from tests.support.conditions import set_condition
from tests.support.eventually import eventually
from tests.support.observer import observing
from tests.support.seen import (
    SIMULATED,
    Object,
    Seen,
    has_answered,
    has_ended,
    is_asked,
    is_ending,
    is_ready,
    is_starting,
    is_stopping,
    key_of,
    start_of,
    status_of,
    told,
)
from tests.support.stage import STAGE_LABEL, Controller, Stage

PACE = 0.25  # real seconds for each of a scenario with limits that the controller keeps; those are as much shorter
REST_SECONDS = 90.0  # until all has come to rest after an instant
LATE_SECONDS = 20.0  # until what is wanted of an instant shows; the clock stands still meanwhile
LOOK_SECONDS = 0.2
QUIET_CYCLES = 5  # at the end, of those in which nobody may be evicted
MARKER = "marker"  # a held job: that its change is answered shows that the controller has heard of all before it
_numbers = itertools.count(1)
_FOR_NOBODY = {
    Reason.QUOTA_TAKEN_BACK.code: EVICTED,
    Reason.QUEUE_DRAINED.code: EVICTED,
    Reason.SHRUNK_FOR_QUOTA.code: SHRUNK,
    Reason.GROWTH_FAILED.code: SHRUNK,
}
_HISTORY = "SELECT id, workload_uid, attempt, kind, message FROM event WHERE workload_uid = ANY(:uids) AND id > :last ORDER BY id"


async def perform(
    kube: KubeClient, kubeconfig: Path, database_url: str, folder: Path, scenarios: Mapping[str, Scenario]
) -> dict[str, Run]:
    """Play scenarios of one policy side by side and return what became of each.

    Each has nodes, queues and a namespace of its own; they share the controller and thereby its restarts. In the end
    all jobs are deleted. Raises AssertionError when a gang was partial, room was given away twice, or is not free.
    """
    policy = next(iter(scenarios.values())).policy
    back_off = BackOff()
    env = {
        "QUEUECTL_FAIR_SHARING": ",".join(policy.fair_sharing),
        "QUEUECTL_USAGE_HALF_LIFE": str(policy.usage_half_life_seconds * PACE),
        "QUEUECTL_SUSPECT_FIRST": str(policy.suspect_seconds * PACE),
        "QUEUECTL_BACK_OFF_FIRST": str(back_off.first * PACE),
        "QUEUECTL_BACK_OFF_LONGEST": str(back_off.longest * PACE),
    }
    controller = Controller(kubeconfig, database_url, folder, "scenarios", env)
    restarting = asyncio.Lock()

    async def restart() -> None:
        async with restarting:
            controller.kill()
            controller.start()
            await controller.until_leading()

    seen_jobs, seen_pods = Seen(kube, jobs_path()), Seen(kube, pods_path())
    stages = [Stage(kube, kubeconfig, database_url, folder, f"scenario-{next(_numbers)}") for _ in scenarios]
    plays = [
        Play(scenario, stage, restart, seen_jobs, seen_pods)
        for scenario, stage in zip(scenarios.values(), stages, strict=True)
    ]
    try:
        for stage in stages:
            await stage.open()
        await restart()
        async with seen_jobs.kept(), seen_pods.kept(), observing(stages[0], everywhere=True) as observer:
            await asyncio.gather(*(play.run() for play in plays))
            for play in plays:
                play.compare(observer)
        await asyncio.gather(*(play.clear() for play in plays))
        await ledger.until_free(stages[0], everywhere=True)
    finally:
        controller.stop()
        for stage in stages:
            await stage.close()
    return {name: play.result for name, play in zip(scenarios, plays, strict=True)}


class Play:
    """One scenario on its way.

    Its namespace `default` is the stage's own. Other names are the stage's, a dash, theirs; jobs and users keep theirs.
    """

    def __init__(self, scenario: Scenario, stage: Stage, restart: Action, jobs: Seen, pods: Seen) -> None:
        """Write down what is to happen. ``restart`` ends the controller as a crash would, and starts it."""
        self.result = Run()
        self._scenario = scenario
        self._stage = stage
        self._restart = restart
        self._seen_jobs, self._seen_pods = jobs, pods
        self._agenda = Agenda()
        self._forms = {name: form for form in scenario.jobs for name in form.names}
        self._nodes = {name: form for form in scenario.nodes for name in form.names}
        self._queues = {form.name: form for form in scenario.queues}
        self._early: dict[str, Object] = {}  # jobs that had to be created before the play began, by name
        self._uids: dict[str, str] = {}  # of the jobs that were ever submitted, by name
        self._jobs: dict[str, Object] = {}  # as last seen
        self._pods: dict[str, list[Object]] = {}  # as last seen, by job
        self._since: dict[tuple[str, str], float] = {}  # when attempts began to run, by job and number
        self._asked = 0
        self._last_event = 0
        self._held: set[tuple[str, int]] = set()  # attempts whose room was ever more than a promise
        for event in scenario.events:
            self._agenda.at(event.at, partial(self._happen, event))
        for form in scenario.jobs:
            for name in form.names:
                self._agenda.at(form.at, partial(self._submit, form, name))
        for want in scenario.want:
            for when in {want.at, *(want.started_by or {}).values()} - {None}:
                self._agenda.look_at(when)  # type: ignore[arg-type]
        self._timed = any(
            form.start_deadline_seconds or form.max_run_seconds or form.save_grace for form in scenario.jobs
        ) or any(event.fail for event in scenario.events)
        for queue in scenario.queues:
            rules = queue.preemption
            limits = rules and (rules.wait_seconds or rules.min_run_seconds)
            self._timed = self._timed or bool(limits or queue.max_grace_seconds)
        self._began = 0.0

    async def run(self) -> Run:
        """Play to the end: ``until``, or when nothing is left to happen."""
        await self._set_up()
        self._began = time.monotonic()
        while self._agenda and (self._scenario.until is None or self._agenda.next <= self._scenario.until):
            await self._until_due()
            while actions := self._agenda.due():
                await _next_second()  # the API server keeps whole seconds, and what comes later has to be newer
                for action in actions:
                    await action()
                if not await self._rest():
                    return self.result
            await self._look()
        for _ in range(QUIET_CYCLES):
            await self._ask()
        await self._read_history()
        for want in self._scenario.want:
            if want.at is not None:
                self.result.looks.setdefault(want.at, self._states())
        return self.result

    def compare(self, observer: Observer) -> None:
        """Hold what the ledger says of moves against the pods that an observer saw: no job began anew in secret."""
        seen = Counter(uid for uid, _ in observer.attempts)
        requeued = Counter(entry.job for entry in self.result.of(REQUEUED))
        for name, uid in self._uids.items():
            if seen[uid] > 1 + requeued[name]:
                self.result.faults.append(
                    f"{name} had pods in {seen[uid]} attempts, and was requeued {requeued[name]} times"
                )

    async def clear(self) -> None:
        """Delete all jobs and see them go."""
        for job in await self._stage.jobs():
            meta = job["metadata"]
            await self._quietly(self._stage.delete_job(meta["name"], namespace=meta["namespace"]))

        async def gone() -> bool:
            for pod in await self._stage.pods():
                if is_stopping(pod):
                    await self._remove_pod(pod)
            return not await self._stage.jobs()

        await eventually(gone, "all jobs are gone")

    # What users, admins and machines do

    async def _set_up(self) -> None:
        stage = self._stage
        await create_nodes(stage.client, [self._node(form, name) for name, form in self._nodes.items()])
        labels = {form.name: form.labels for form in self._scenario.namespaces}
        for name in sorted({form.namespace for form in self._scenario.jobs} | labels.keys()):
            full = self._namespace(name)
            if full not in stage.namespaces:
                await stage.add_namespace(full)
            await self._patch(f"/api/v1/namespaces/{full}", {"metadata": {"labels": labels.get(name, {})}})
        selectors = {}
        for manifest in self._scenario.objects():
            name = manifest["metadata"]["name"] = self._full(manifest["metadata"]["name"])
            spec = manifest["spec"]
            if manifest["kind"] == "ResourceFlavor":
                spec["nodeLabels"] = {**spec.get("nodeLabels", {}), STAGE_LABEL: stage.name}
            else:
                self._rename(spec)
                spec.pop("maxWaiting", None)
                selectors[name] = spec.pop("namespaceSelector", None)
            await stage.create(manifest)
        # The API server refuses jobs whose namespace a queue does not take, unless they came before it was so.
        for name, form in self._forms.items():
            if self._is_foreign(form, labels.get(form.namespace, {})):
                self._early[name] = await self._create(form, name, hold=True)
        for name, selector in selectors.items():
            await self._patch(f"{API}/queues/{name}", {"spec": {"namespaceSelector": selector}})
        await stage.create(manifests.queue(self._full(MARKER)))
        await stage.create(manifests.job(MARKER, namespace=stage.namespace, queue=self._full(MARKER), hold=True))
        await self._ask()

    def _node(self, form: NodeForm, name: str) -> Object:
        labels = {"kubernetes.io/hostname": name, **form.labels, STAGE_LABEL: self._stage.name}
        manifest = node_manifest(
            self._full(name), gpus=form.gpus, cpu=str(form.cpu), memory=str(form.memory), pods=form.pods, labels=labels
        )
        for field in ("capacity", "allocatable"):
            manifest["status"][field] |= {resource: str(amount) for resource, amount in form.resources.items()}
        return manifest

    def _is_foreign(self, form: JobForm, labels: Mapping[str, str]) -> bool:
        """Tell whether a job's queue does not take jobs of its namespace, which has these labels."""
        manifest = self._queues[form.queue].manifest()
        manifest["metadata"]["resourceVersion"] = "1"
        return not_for(decode.queue(msgspec.json.encode(manifest)).value, form.namespace, labels) is not None

    async def _submit(self, form: JobForm, name: str) -> None:
        job = self._early.get(name)
        if job is None:
            job = await self._create(form, name)
        elif not form.hold:
            await self._stage.patch_job(name, {"spec": {"hold": False}}, namespace=self._namespace(form.namespace))
        self._uids[name] = job["metadata"]["uid"]
        self._log(name, "Submitted", f"queue {form.queue}")

    async def _create(self, form: JobForm, name: str, **more: Any) -> Object:
        manifest = form.manifest(name)
        manifest["metadata"]["namespace"] = self._namespace(form.namespace)
        manifest["spec"] |= {"queue": self._full(form.queue), **more}
        self._paced(manifest["spec"], "startDeadlineSeconds", "maxRunSeconds")
        self._paced(manifest["spec"].get("checkpoint", {}), "graceSeconds")
        annotations = {
            f"{SIMULATED}/never-ready": "true" if form.start_seconds else None,
            f"{SIMULATED}/stop-after": "1000h" if form.grace else None,
        }
        for role in manifest["spec"]["roles"]:
            role["template"]["metadata"] = {"annotations": {key: value for key, value in annotations.items() if value}}
        return await (self._stage.submit_as(form.user, manifest) if form.user else self._stage.create(manifest))

    async def _happen(self, event: EventForm) -> None:
        stage, target = self._stage, event.target
        match event.verb:
            case "finish" | "fail":
                await self._end_pods(target, failed=event.verb == "fail")
            case "delete":
                await stage.delete_job(target, namespace=self._namespace(self._forms[target].namespace))
            case "hold" | "release":
                namespace = self._namespace(self._forms[target].namespace)
                await stage.patch_job(target, {"spec": {"hold": event.verb == "hold"}}, namespace=namespace)
            case "defrag":
                cli = Commands(self._stage.kubeconfig, self._namespace(self._forms[target].namespace))
                await cli("defrag", target, "--apply", "--no-wait", "--database-url", stage.database_url)
            case "node_down" | "node_up" | "node_fault" | "node_healed" | "cordon" | "uncordon":
                await self._turn(event.verb, target)
            case "set_quota" | "set_stop_policy":
                await self._edit_queue(event)
            case "controller_restart":
                await self._restart()
            case _:
                raise NotImplementedError(event.verb)
        self._log("", "Event", f"{event.verb} {target}")

    async def _turn(self, verb: str, target: str) -> None:
        client, path = self._stage.client, f"/api/v1/nodes/{self._full(target)}"
        match verb:
            case "node_down":
                await client.request("DELETE", path)
            case "node_up":
                await create_nodes(client, [self._node(self._nodes[target], target)])
            case "node_fault" | "node_healed":
                status = str(verb == "node_fault")
                await set_condition(client, self._full(target), "KernelDeadlock", status, "Played.")
            case _:
                await self._patch(path, {"spec": {"unschedulable": verb == "cordon"}})

    async def _edit_queue(self, event: EventForm) -> None:
        if event.set_quota is not None:
            form = edited(self._queues[event.queue], event.set_quota)
            self._queues[form.name] = form
            spec = form.manifest()["spec"]
            self._rename(spec)
            await self._patch(f"{API}/queues/{self._full(form.name)}", {"spec": {"quotas": spec["quotas"]}})
        if event.set_stop_policy is not None:
            edit = event.set_stop_policy
            await self._patch(
                f"{API}/queues/{self._full(edit.queue)}", {"spec": {"stopPolicy": edit.stop_policy.value}}
            )

    async def _end_pods(self, job: str, *, failed: bool = False) -> None:
        """End the pods that the job waits for, or one with a failure."""
        self._observe()
        spec = self._jobs[job]["spec"] if job in self._jobs else {"roles": []}
        needed = {role["name"] for role in spec["roles"] if role.get("mustSucceed", True)}
        pods = [pod for pod in self._current(job) if key_of(pod)[0] in needed and not has_ended(pod)]
        code = self._forms[job].exit_code if failed else 0
        annotations = {f"{SIMULATED}/run-seconds": "0", f"{SIMULATED}/exit-code": str(code)}
        for pod in pods[:1] if failed else pods:
            await self._annotate(pod, annotations)

    async def _fail(self, job: str, attempt: str) -> None:
        self._observe()
        if self._attempt(job) == attempt:
            await self._end_pods(job, failed=True)

    async def _get_ready(self, job: str, attempt: str) -> None:
        for pod in self._pods.get(job, ()):
            if pod["metadata"]["labels"][ATTEMPT_LABEL] == attempt:
                await self._annotate(pod, {f"{SIMULATED}/never-ready": None})

    async def _remove_pod(self, pod: Object) -> None:
        meta = pod["metadata"]
        await self._quietly(self._stage.delete_pod(meta["name"], namespace=meta["namespace"], at_once=True))

    # Time

    async def _until_due(self) -> None:
        """Set the clock to what is next; at its pace where real time counts."""
        while self._timed and (left := self._began + self._agenda.next * PACE - time.monotonic()) > 0:
            self._agenda.now = max(self._agenda.now, self._agenda.next - left / PACE)
            self._observe()
            await self._read_history()
            await asyncio.sleep(min(left, LOOK_SECONDS))
        self._agenda.now = max(self._agenda.now, self._agenda.next)

    def _paced(self, spec: Object, *limits: str) -> None:
        """Shorten the limits that the controller keeps."""
        for limit in limits:
            if self._timed and spec.get(limit):
                spec[limit] = math.ceil(spec[limit] * PACE)

    async def _rest(self) -> bool:
        """Wait until all that this instant sets off has happened."""
        limit = time.monotonic() + REST_SECONDS
        before: object = None
        while (now := await self._ask()) != before or self._moving():
            before = now
            if time.monotonic() > limit:
                on_the_way = "; ".join(self._moving()) or "statuses change and change"
                self.result.faults.append(f"{self._agenda.now:g} s: no rest within {REST_SECONDS:g} s: {on_the_way}")
                return False
        await self._read_history()
        return True

    async def _ask(self) -> object:
        """Have the controller answer a change of the marker; return all that may move, as seen then."""
        self._asked += 1
        patch = {"spec": {"ttlSecondsAfterFinished": self._asked}}
        generation = (await self._stage.patch_job(MARKER, patch))["metadata"]["generation"]

        async def answered() -> bool:
            self._observe()
            marker = self._jobs.get(MARKER, {})
            return bool(status_of(marker).get("observedGeneration") == generation)

        await eventually(answered, f"the controller answers {self._stage.name}", seconds=REST_SECONDS)
        return {name: told(job) for name, job in self._jobs.items() if name != MARKER}, {
            pod["metadata"]["uid"]: pod["metadata"]["resourceVersion"] for pods in self._pods.values() for pod in pods
        }

    def _observe(self) -> None:
        """Look at jobs and pods, and write down what the clock is to do to them."""
        self._jobs = {job["metadata"]["name"]: job for job in self._seen_jobs.of(self._stage.namespaces)}
        self._pods = {}
        for pod in self._seen_pods.of(self._stage.namespaces):
            self._pods.setdefault(pod["metadata"]["labels"][JOB_LABEL], []).append(pod)
        for name, form in self._forms.items():
            status, current = status_of(self._jobs.get(name, {})), self._current(name)
            attempt = str(status.get("attempt"))
            bound = [pod for pod in current if pod["spec"].get("nodeName")]
            wanted = sum(place["pods"] for place in status.get("assignments", ()))
            if form.start_seconds and is_starting(status) and len(bound) == wanted > 0:
                ready = partial(self._get_ready, name, attempt)
                self._agenda.once(form.start_seconds, ready, *start_of(name, current))
            for seconds, keys in form.pod_ends.items() if status.get("phase") == "Running" else ():
                what = ("run", name, attempt, f"{seconds}")
                self._agenda.once(seconds, partial(self._succeed, name, attempt, keys), *what)
            if form.fails is not None and status.get("phase") == "Running":
                self._agenda.once(form.fails, partial(self._fail, name, attempt), "fail", name, attempt)
            if form.checkpoints and status.get("phase") == "Running":
                self._save_in_time(name, attempt, form.checkpoints)
            for pod in current:
                self._save_when_asked(pod, form.saves)
            for pod in self._pods.get(name, ()):
                if form.grace and is_stopping(pod):
                    self._agenda.once(form.grace, partial(self._remove_pod, pod), "stop", pod["metadata"]["name"])

    def _save_when_asked(self, pod: Object, seconds: float | None) -> None:
        """Have a pod that is asked to save its work do so, in so many seconds; never without."""
        ask = pod["metadata"].get("annotations", {}).get(ASK)
        if ask and seconds is not None:
            name = msgspec.json.decode(ask)["id"]
            self._agenda.once(seconds, partial(self._save, [pod], name), "save", pod["metadata"]["name"], ask)

    def _save_in_time(self, job: str, attempt: str, every: float) -> None:
        """Have a running job save its work at its next time, if anything else is still to happen then."""
        since = self._since.setdefault((job, attempt), self._agenda.now)
        number = int((self._agenda.now - since) // every) + 1

        async def act() -> None:
            if self._attempt(job) == attempt:
                await self._save(self._current(job), None, number)

        self._agenda.meanwhile(since + number * every, act, "save", job, attempt, str(number))

    async def _save(self, pods: Iterable[Object], ask: str | None, step: int | None = None) -> None:
        report = msgspec.json.encode({"ask": ask, "step": step, "at": time.time()}).decode()
        for pod in pods:
            await self._annotate(pod, {REPORT: report})

    async def _succeed(self, job: str, attempt: str, keys: Collection[PodKey]) -> None:
        self._observe()
        if self._attempt(job) == attempt:
            for pod in self._current(job):
                if key_of(pod) in keys and is_stopping(pod):
                    await self._remove_pod(pod)
                elif key_of(pod) in keys and not has_ended(pod):
                    await self._annotate(pod, {f"{SIMULATED}/run-seconds": "0"})

    def _moving(self) -> list[str]:
        """Name what is on its way without waiting for the clock."""
        return [f"{name} is {why}" for name, job in self._jobs.items() if name != MARKER and (why := self._moves(job))]

    def _moves(self, job: Object) -> str:
        name, status, pods = job["metadata"]["name"], status_of(job), self._pods.get(job["metadata"]["name"], ())
        stopping = [pod["metadata"]["name"] for pod in pods if is_stopping(pod)]
        starting = self._agenda.waits(*start_of(name, self._current(name)))
        running = sum(not has_ended(pod) for pod in self._current(name))
        held = sum(place["pods"] for place in status.get("assignments", ()))
        ways = {
            "about to end": any(is_ending(pod) for pod in pods),
            "stopping": any(not self._agenda.waits("stop", pod) for pod in stopping),
            "being deleted": is_stopping(job) and not stopping,
            "not looked at yet": status.get("observedGeneration") != job["metadata"]["generation"] and not stopping,
            "giving back what its pods held": status.get("phase") == "Running" and held > running,
            "starting": is_starting(status) and not starting,
            "being asked to save": status.get("reason") == "Checkpointing" and not all(map(is_asked, pods)),
            "about to leave": status.get("reason") == "Checkpointing" and any(map(has_answered, pods)),
            "ending": status.get("phase") == "Stopping" and not stopping,
        }
        return next((way for way, holds in ways.items() if holds), "")

    # What is seen

    async def _look(self) -> None:
        """Keep the states of this instant, as soon as they are as wanted."""
        wants = [want for want in self._scenario.want if want.at == self._agenda.now]
        started = [
            {job: by}
            for want in self._scenario.want
            for job, by in (want.started_by or {}).items()
            if by == self._agenda.now
        ]
        wanted = self._scenario.model_copy(
            update={"want": [*wants, *(WantForm.model_validate({"startedBy": each}) for each in started)]}
        )
        limit = time.monotonic() + LATE_SECONDS
        while wanted.want:
            late = time.monotonic() > limit
            if late:
                await self._ask()  # what was to be told before is told now, however slow all this is
            self._observe()
            await self._read_history()
            self.result.looks[self._agenda.now] = self._states()
            if late or not differences(wanted, self.result):
                return
            await asyncio.sleep(LOOK_SECONDS)

    def _states(self) -> dict[str, State]:
        return {name: self._state(name) for name in self._uids}

    def _state(self, name: str) -> State:
        if name not in self._jobs:
            return State("Stopping", "Deleted", "it is gone", 0)
        status = status_of(self._jobs[name])
        up = status.get("phase") == "Running"
        ready = sum(is_ready(pod) and not (up and is_stopping(pod)) for pod in self._current(name))
        return State(status.get("phase", "Pending"), status.get("reason", "none"), status.get("message", ""), ready)

    def _current(self, job: str) -> list[Object]:
        """Return the pods of the job's latest attempt."""
        attempt = self._attempt(job)
        return [pod for pod in self._pods.get(job, ()) if pod["metadata"]["labels"][ATTEMPT_LABEL] == attempt]

    def _attempt(self, job: str) -> str:
        """Return the number of the job's latest attempt."""
        return str(status_of(self._jobs.get(job, {})).get("attempt"))

    async def _read_history(self) -> None:
        """Take in what the ledger has recorded of the jobs since."""
        names = {uid: name for name, uid in self._uids.items()}
        for row in await ledger.rows(self._stage, _HISTORY, uids=list(names), last=self._last_event):
            self._last_event = row["id"]
            attempt, kind = (row["workload_uid"], row["attempt"]), row["kind"]
            kind = PREEMPTED if kind == Reason.MOVED.code else kind
            if kind == Reason.ADMITTED.code:
                self._held.add(attempt)
            elif kind in _FOR_NOBODY:
                kind = _FOR_NOBODY[kind]
            elif kind == PREEMPTED and attempt not in self._held:
                kind = OVERTAKEN
            self._log(names[row["workload_uid"]], kind, row["message"])

    # Inside

    def _full(self, name: str) -> str:
        return f"{self._stage.name}-{name}"

    def _namespace(self, name: str) -> str:
        return self._stage.namespace if name == "default" else self._full(name)

    def _rename(self, queue: Object) -> None:
        """Have a queue's spec refer to the names that its parent and flavors have here, and its limits pass in time."""
        if queue.get("parent"):
            queue["parent"] = self._full(queue["parent"])
        self._paced(queue, "maxGraceSeconds")
        self._paced(queue.get("preemption", {}), "waitSeconds", "minRunSeconds")
        for quota in queue.get("quotas") or ():
            quota["flavor"] = self._full(quota["flavor"])

    def _log(self, job: str, what: str, why: str) -> None:
        self.result.timeline.append(Entry(self._agenda.now, job, what, why))

    async def _annotate(self, pod: Object, annotations: Mapping[str, str | None]) -> None:
        path = pods_path(pod["metadata"]["namespace"], pod["metadata"]["name"])
        await self._quietly(self._patch(path, {"metadata": {"annotations": annotations}}))

    async def _patch(self, path: str, body: Object) -> None:
        await self._stage.client.request("PATCH", path, body=body, content_type=MERGE_PATCH)

    @staticmethod
    async def _quietly(request: Awaitable[object]) -> None:
        try:
            await request
        except ApiError as error:
            if error.status != 404:
                raise


async def _next_second() -> None:
    await asyncio.sleep(1 - time.time() % 1)

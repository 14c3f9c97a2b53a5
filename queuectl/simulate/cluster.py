"""A cluster in virtual time: nodes that come and go, pods that are created, bound, run and stop."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from queuectl.control.avoided import Avoidance
from queuectl.control.world import World
from queuectl.core.checkpoint import asked
from queuectl.core.lifecycle import View, can_go, coming, holding, still_asked
from queuectl.kube import decode
from queuectl.kube.names import pod_name
from queuectl.kube.pods import nodes_of
from queuectl.model import gpus
from queuectl.model.checkpoint import Ask, Checkpoint, Report
from queuectl.model.devices import Listed, Slice, qualified
from queuectl.model.lifecycle import UNDER_WAY, Attempt, AttemptState, Move, Step
from queuectl.model.objects import DeviceKind, Flavor, Job, MoveRequest, Namespace, Node, Place, Pod
from queuectl.model.plan import PodKey
from queuectl.model.reasons import Reason, why
from queuectl.model.resources import parse_quantity
from queuectl.simulate.form import GPU, EventForm, JobForm, NodeForm, QueueForm, Scenario, WindowForm, edited

Later = Callable[[float, Callable[[], None]], None]  # seconds from now, what then happens


class Cluster:
    """What the API server would show, and to whom: the world of the controller that leads."""

    def __init__(self, scenario: Scenario, later: Later) -> None:
        """Set up nodes, flavors and queues."""
        self._later = later
        self._version = 0
        self._world: World | None = None
        self._pods: dict[tuple[str, int, str, int], Pod] = {}
        self._forms: dict[str, JobForm] = {}
        self._queue_forms = {form.name: form for form in scenario.queues}
        self._known = {name: _node(form, name) for form in scenario.nodes for name in form.names}
        self._nodes = dict(self._known)
        self._flavors = {form.name: decode.flavor(_bytes(form.manifest())).value for form in scenario.flavors}
        self._queues = {form.name: self._queue(form) for form in scenario.queues}
        self._namespaces = [Namespace(form.name, form.labels) for form in scenario.namespaces]
        self._silent: set[str] = set()  # nodes of which nothing is heard
        self.jobs: dict[str, Job] = {}
        self._windows: list[WindowForm] = []  # that are announced and have not ended
        self._open: list[WindowForm] = []  # those of them that have begun

    def connect(self, world: World) -> None:
        """Show everything to a new leader's world."""
        self._world = world
        for flavor in self._flavors.values():
            world.on_flavor(None, flavor)
        for namespace in self._namespaces:
            world.on_namespace(None, namespace)
        for queue in self._queues.values():
            world.on_queue(None, queue)
        for node in self._known.values():
            for flavor in self._flavors.values():
                if flavor.devices and all(node.labels.get(key) == value for key, value in flavor.node_labels):
                    world.on_slice(None, _slice(node, flavor, flavor.devices))
        for node in self._nodes.values():
            world.on_node(None, node)
        self._tell_windows()
        for job in self.jobs.values():
            world.on_job(None, job)
        for pod in self._pods.values():
            world.on_pod(None, pod)

    @property
    def world(self) -> World:
        """The leader's world."""
        if self._world is None:
            raise LookupError("nobody leads")
        return self._world

    # What users and admins do

    def submit(self, form: JobForm, name: str, now: float) -> None:
        """Create a job; its uid is its name."""
        manifest = form.manifest(name)
        manifest["metadata"] |= {
            "uid": name, "generation": 1, "resourceVersion": self._next_version(),
            "creationTimestamp": datetime.fromtimestamp(now, UTC).isoformat(),
        }  # fmt: skip
        self._forms[name] = form
        self._set_job(name, decode.job(_bytes(manifest)).value)

    def happen(self, event: EventForm, now: float) -> bool:
        """Let an event happen; False when there is nothing that it could happen to."""
        match event.verb:
            case "node_down" | "node_up" | "node_silent" | "node_fault" | "node_healed" | "cordon" | "uncordon":
                return self._turn(event.verb, event.target, now)
            case "drain":
                return self._drain(event.target, event.at)
            case "finish" | "fail":
                return self._stop(event.target, failed=event.verb == "fail")
            case "delete":
                return self._edit(event.target, lambda job: replace(job, deleting=True))
            case "hold" | "release":
                hold = event.verb == "hold"
                return self._edit(
                    event.target,
                    lambda job: replace(job, gang=replace(job.gang, hold=hold), generation=job.generation + 1),
                )
            case "set_quota" if event.set_quota is not None:
                self._set_queue(edited(self._queue_forms[event.set_quota.queue], event.set_quota))
            case "set_stop_policy" if event.set_stop_policy is not None:
                form = self._queue_forms[event.set_stop_policy.queue]
                self._set_queue(form.model_copy(update={"stop_policy": event.set_stop_policy.stop_policy}))
        return True

    def announce(self, window: WindowForm, now: float) -> bool:
        """Let maintenance be announced, take its nodes and give them back; False when it is over already."""
        if window.end <= now:
            return False
        self._windows.append(window)
        self._tell_windows()
        self._later(max(0.0, window.start - now), lambda: self._begin(window))
        self._later(window.end - now, lambda: self._end(window))
        return True

    def _begin(self, window: WindowForm) -> None:
        self._open.append(window)
        self._tell_windows()

    def _end(self, window: WindowForm) -> None:
        self._open.remove(window)
        self._windows.remove(window)
        self._tell_windows()

    def _tell_windows(self) -> None:
        """Have nobody go onto nodes of open windows, who is there leave, and the controller know of all windows."""
        taken: dict[str, float] = {}
        for window in sorted(self._windows, key=lambda window: window.start, reverse=True):
            taken |= dict.fromkeys(window.nodes, window.start)
        self.world.nodes.take_at(taken)
        nodes = {node for window in self._open for node in window.nodes}
        told = {node: why(Reason.NODE_MAINTENANCE, node=node, problem="its window has begun") for node in nodes}
        self.world.nodes.avoid(
            "window", {node: Avoidance("it is in maintenance", leave) for node, leave in told.items()}
        )

    def ask(self, request: MoveRequest, of: Collection[str] | None = None) -> None:
        """Have those jobs bear a request that are to move, or only some of them."""
        for name in dict(request.moves) if of is None else of:
            self._edit(name, lambda job: replace(job, move=request))

    def answer(self, name: str) -> None:
        """Have a job bear no request any more."""
        self._edit(name, lambda job: replace(job, move=None))

    def forget(self, name: str) -> None:
        """Let a deleted job's object and pods go, for the controller has let go of it."""
        job = self.jobs.pop(name)
        for key in [key for key in self._pods if key[0] == name]:
            self._remove_pod(key)
        self.world.on_job(job, None)

    # What the controller does

    def carry_out(self, step: Step, view: View) -> Move | None:
        """Carry out a step and return what it came to."""
        match step:
            case Step.CREATE:
                self._create(view.attempt, nodes_of(view.attempt))
                return Move(view.attempt.uid, view.attempt.number, AttemptState.CREATED)
            case Step.UNGATE:
                # If not, the next move ends the attempt.
                if self._ungate(view, {key: node for key, (node, _) in nodes_of(view.attempt).items()}):
                    return Move(view.attempt.uid, view.attempt.number, AttemptState.UNGATED)
            case Step.GROW:
                self._grow(view)
            case Step.ASK | Step.SHRINK if view.attempt.asking:
                self._ask(view, view.attempt.asking)
            case Step.SHRINK | Step.REMOVE:
                self._remove(view)
        return None

    def started(self, attempt: Attempt) -> None:
        """Have the pods of a job of which all are ready succeed, or one fail, when their time has come."""

        def then(action: Callable[[], object]) -> None:
            current = self.world.attempts.get(attempt.uid)
            if current is not None and current.number == attempt.number:
                action()

        form = self._forms[attempt.uid]
        for seconds, keys in form.pod_ends.items():
            self._later(seconds, lambda keys=keys: then(lambda: self.succeed(attempt.uid, keys)))  # type: ignore[misc]
        if form.fails is not None:
            self._later(form.fails, lambda: then(lambda: self._stop(attempt.uid, failed=True)))

    def succeed(self, name: str, keys: Collection[PodKey]) -> None:
        """Have these pods of a job's attempt succeed, by role and index; those that are there and run."""
        for pod in self._of(name, self.world.attempts[name].number):
            if (pod.role, pod.index) in keys and not pod.ended and pod.node not in self._silent:
                self._set_pod(replace(pod, phase="Succeeded", ready=False, exit_code=0, requests=()))

    def checkpoints(self, uid: str) -> float | None:
        """Return how often a job saves its work."""
        return self._forms[uid].checkpoints

    def _grow(self, view: View) -> None:
        """Create the pods that come, and let them go once the others have saved their work."""
        attempt, nodes = view.attempt, coming(view.attempt)
        self._create(attempt, nodes)
        there = {(pod.role, pod.index): pod for pod in self._of(attempt.uid, attempt.number)}
        view = replace(view, pods=there)
        ask = still_asked(view)
        if ask is None:
            self._ungate(view, nodes)
            return
        self._ask(view, ask)
        seconds = self._forms[attempt.uid].saves
        at = ask.until if seconds is None else min(ask.until, ask.at + seconds)

        def go_on() -> None:
            now = self.world.view(attempt.uid, at)
            if now is not None and (now.attempt.number, now.attempt.state) == (attempt.number, AttemptState.GROWING):
                self._grow(now)

        self._later(max(0.0, at - view.now), go_on)

    def _ask(self, view: View, ask: Ask) -> None:
        """Have pods that are asked save their work, as fast as their job does."""
        attempt, job = view.attempt, view.job
        seconds = self._forms[attempt.uid].saves
        if job is None or seconds is None:
            return
        name, at = ask.id(attempt.number), ask.at + seconds

        def answer() -> None:
            for pod in self._of(attempt.uid, attempt.number):
                if (pod.role, pod.index) in asked(attempt, job) and not pod.ended:
                    self._set_pod(replace(pod, report=Report(name, Checkpoint(at))))

        self._later(max(0.0, at - view.now), answer)

    def _create(self, attempt: Attempt, wanted: Collection[PodKey]) -> None:
        job = self.jobs[attempt.uid]
        for role, index in wanted:
            name = pod_name(job.gang.name, role, attempt.number, index)
            if (attempt.uid, attempt.number, role, index) not in self._pods:
                self._set_pod(
                    Pod(
                        uid=f"pod-{name}",
                        namespace=job.gang.namespace,
                        name=name,
                        resource_version=self._next_version(),
                        gated=True,
                        workload=attempt.uid,
                        attempt=attempt.number,
                        role=role,
                        index=index,
                    )
                )

    def _ungate(self, view: View, nodes: Mapping[PodKey, str]) -> bool:
        """Let pods go if all are there and their places good, and tell whether they did."""
        attempt = view.attempt
        if not can_go(view, nodes):
            return False
        asks = {placement.role: placement.requests for placement in attempt.placements}
        wait = self._forms[attempt.uid].start_seconds
        for key, node in nodes.items():
            if view.pods[key].gated:
                bound = replace(view.pods[key], gated=False, node=node, phase="Running", requests=asks[key[0]])
                self._set_pod(replace(bound, ready=not wait))
        if wait:
            self._later(wait, lambda: self._get_ready(attempt))
        return True

    def _get_ready(self, attempt: Attempt) -> None:
        for pod in self._of(attempt.uid, attempt.number):
            if not pod.ended and not pod.deleting:
                self._set_pod(replace(pod, ready=True))

    def _remove(self, view: View) -> None:
        grace = self._forms[view.attempt.uid].grace
        for pod in holding(view):
            if pod.deleting:
                continue
            key = _key(pod)
            # Nothing runs of a pod that is not bound, and nobody is left to stop one on a node that is gone.
            gone = not pod.node or view.places.get(pod.node) is Place.GONE
            if gone or (not grace and pod.node not in self._silent):
                self._remove_pod(key)
                continue
            self._set_pod(replace(pod, deleting=True, stops_by=view.now + grace))
            self._later(grace, lambda key=key: self._stopped(key))  # type: ignore[misc]

    # Inside

    def _turn(self, verb: str, name: str, now: float = 0.0) -> bool:
        before = self._nodes.get(name)
        was_silent = name in self._silent
        if verb in {"node_down", "node_up"}:  # whatever else is done to it, nothing is heard of it
            self._silent.discard(name)
        if verb == "node_down":
            after = self._nodes.pop(name, None) and None
        elif verb == "node_up":
            again = replace(self._known[name], created_at=now, uid=f"{name}-{now}") if before is None else before
            after = self._nodes[name] = replace(again, ready=True, unready_since=None)
        elif verb == "node_silent":
            after = before and replace(before, ready=False, unready_since=now)
            if after is not None:
                self._silent.add(name)
                self._nodes[name] = after
        elif before is not None and verb in {"node_fault", "node_healed"}:
            faults = ("condition KernelDeadlock is True",) if verb == "node_fault" else ()
            after = self._nodes[name] = replace(before, faults=faults)
        elif before is not None:
            after = self._nodes[name] = replace(before, unschedulable=verb == "cordon")
        else:
            after = None
        self.world.on_node(before, after) if before or after else None
        for key, pod in list(self._pods.items()) if was_silent and name not in self._silent else ():
            if pod.node == name and pod.stops_by is not None and pod.stops_by <= now:
                self._remove_pod(key)
        return before != after

    def _drain(self, name: str, now: float) -> bool:
        """Cordon a node and evict the pods there, each of which takes its time to stop."""
        there = [pod for pod in self._pods.values() if pod.node == name and not pod.ended and not pod.deleting]
        cordoned = self._turn("cordon", name)
        for pod in there:
            grace, key = self._forms[pod.workload].grace, _key(pod)
            self._set_pod(replace(pod, deleting=True, disrupted="evicted", told_at=now, stops_by=now + grace))
            self._later(grace, lambda key=key: self._remove_pod(key))  # type: ignore[misc]
        return cordoned or bool(there)

    def _stopped(self, key: tuple[str, int, str, int]) -> None:
        """Remove a pod whose time to stop is over, if its node can be heard."""
        pod = self._pods.get(key)
        if pod is not None and pod.node not in self._silent:
            self._remove_pod(key)

    def _edit(self, name: str, change: Callable[[Job], Job]) -> bool:
        job = self.jobs.get(name)
        if job is None:
            return False
        self._set_job(name, replace(change(job), resource_version=self._next_version()))
        return True

    def _stop(self, name: str, *, failed: bool) -> bool:
        """End the pods that the job waits for, or one with a failure."""
        attempt, job = self.world.attempts.get(name), self.jobs.get(name)
        if attempt is None or job is None or attempt.state not in UNDER_WAY:
            return False
        needed = {role.name for role in job.gang.roles if role.must_succeed}
        pods = [pod for pod in self._of(name, attempt.number) if pod.role in needed and not pod.ended]
        if not failed:
            self.succeed(name, [(pod.role, pod.index) for pod in pods])
        for pod in pods[:1] if failed else ():
            code = self._forms[name].exit_code
            ended = replace(pod, phase="Failed", ready=False, exit_code=code, requests=())
            self._set_pod(replace(ended, exits=(("main", code),)))
        return True

    def _of(self, name: str, attempt: int) -> list[Pod]:
        return list(self.world.pods.get((name, attempt), {}).values())

    def _queue(self, form: QueueForm) -> Any:
        manifest = form.manifest()
        manifest["metadata"] |= {"resourceVersion": self._next_version()}
        return decode.queue(_bytes(manifest)).value

    def _set_queue(self, form: QueueForm) -> None:
        self._queue_forms[form.name] = form
        before, self._queues[form.name] = self._queues[form.name], self._queue(form)
        self.world.on_queue(before, self._queues[form.name])

    def _set_job(self, name: str, job: Job) -> None:
        before, self.jobs[name] = self.jobs.get(name), job
        self.world.on_job(before, job)

    def _set_pod(self, pod: Pod) -> None:
        key = _key(pod)
        before, self._pods[key] = self._pods.get(key), pod
        self.world.on_pod(before, pod)

    def _remove_pod(self, key: tuple[str, int, str, int]) -> None:
        pod = self._pods.pop(key, None)
        if pod is not None:
            self.world.on_pod(pod, None)

    def _next_version(self) -> str:
        self._version += 1
        return str(self._version)


def _key(pod: Pod) -> tuple[str, int, str, int]:
    return pod.workload, pod.attempt, pod.role, pod.index


def _slice(node: Node, flavor: Flavor, kind: DeviceKind) -> Slice:
    """Return what a driver would list of a node: as many devices as it has GPUs, connected as the flavor says."""
    wanted = {qualified(name, kind.driver): value for name, value in kind.attributes}
    levels = {qualified(level.attribute, kind.driver): level.gpus for level in flavor.inside if level.attribute}
    devices = tuple(
        Listed(
            f"gpu-{number}",
            {qualified(kind.identity, kind.driver): f"{node.name}-{number}", **wanted}
            | {attribute: str(number // gpus) for attribute, gpus in levels.items()},
        )
        for number in range(node.allocatable.get(kind.resource, 0))
    )
    return Slice(f"{node.name}-{flavor.name}", node.name, kind.driver, node.name, 1, 1, devices)


def _node(form: NodeForm, name: str) -> Node:
    given = {GPU: form.gpus, "cpu": form.cpu, "memory": form.memory, "pods": form.pods, **form.resources}
    allocatable = {resource: parse_quantity(resource, amount) for resource, amount in given.items()}
    labels = {"kubernetes.io/hostname": name, **form.labels}
    return Node(name, labels=labels, allocatable=allocatable, gpus=gpus.read(labels))


def _bytes(manifest: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(manifest)

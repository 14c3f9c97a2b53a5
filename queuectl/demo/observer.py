"""An independent observer: it watches the API server by itself and says where gangs or room were not respected.

It knows nothing of the controller or its ledger. Two things make it fair to a system of several watches:

* Facts of one kind (pods) are taken in the order of the API server. Facts of another kind (a gang's size, a queue's
  quota, a node's room) reach it over another watch, so a suspicion is judged ``lag`` seconds later, by the most
  generous of what was in force around that moment.
* Room that is taken away from running pods (a node shrank) and a deadline that has just passed are no instant
  violations: they become one when nothing was done about them for ``grace`` seconds.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping

from queuectl.demo import observed
from queuectl.demo.observed import Attempt, AttemptKey, Gang, History, Pod
from queuectl.demo.watch import Object, Watch
from queuectl.kube.client import ApiError, ApiUnreachableError, KubeClient
from queuectl.kube.names import API, jobs_path, pods_path
from queuectl.model.resources import CARDS, format_quantity, is_extended

LAG_SECONDS = 2.0
GRACE_SECONDS = 10.0
LOOK_SECONDS = 0.25
SETTLE_SECONDS = 60.0


class Observer:
    """Watches pods, nodes, jobs, queues and flavors; ``partial_gangs`` and ``over_bookings`` are sentences.

    A partial gang is an attempt of which a pod was ungated while not all of its gang existed, or that kept ungated
    pods with fewer than all bound past its start deadline (counted from its first pod); of an elastic gang, fewer
    than it must have; where lost pods may be replaced, for longer than that may take. An over-booking is an instant at which a node's bound, unfinished pods asked for more than it
    has, or the ungated, unfinished pods of a queue and of those below it for more than they own together and may
    borrow. (What others keep for themselves by a lending limit is not looked at.)
    """

    def __init__(
        self, client: KubeClient, *, namespace: str = "", lag: float = LAG_SECONDS, grace: float = GRACE_SECONDS
    ) -> None:
        """Prepare. With ``namespace``, only gangs of that one are judged; nodes are judged by everybody's pods."""
        self.partial_gangs: list[str] = []
        self.over_bookings: list[str] = []
        self.pods: dict[str, Pod] = {}
        self.attempts: dict[AttemptKey, Attempt] = {}  # ever seen
        self.gangs: dict[str, Gang] = {}  # ever seen, by uid
        self.nodes: dict[str, History] = {}  # allocatable
        self.peak_gpus = 0
        self.most_pods_on_a_node = 0
        self._client = client
        self._namespace = namespace
        self._lag = lag
        self._grace = grace
        self._quotas: dict[str, History] = {}  # nominal
        self._borrowing: dict[str, History] = {}  # how much more, where that is limited
        self._parents: dict[str, str] = {}
        self._node_labels: dict[str, Mapping[str, str]] = {}
        self._flavors: dict[str, Mapping[str, str]] = {}
        self._on_node: dict[str, set[str]] = {}
        self._suspicions: list[tuple[float, Callable[[], None]]] = []
        self._said: set[object] = set()  # what need not be said again
        self._crowded_since: dict[str, float] = {}  # node
        self._answers_since: float | None = None
        self._gpu_seconds = 0.0
        self._counted_at = time.monotonic()
        self._gpus = 0
        self._watches = [
            self._watch("/api/v1/nodes", self._on_node_object),
            self._watch(f"{API}/resourceflavors", self._on_flavor),
            self._watch(f"{API}/queues", self._on_queue),
            self._watch(jobs_path(namespace), self._on_job),
            Watch(client, pods_path(), self._on_pods, self._on_pod),
        ]

    async def run(self) -> None:
        """Observe until cancelled."""
        async with asyncio.TaskGroup() as group:
            for watch in self._watches:
                group.create_task(watch.run())
            while True:
                await self._look()
                await asyncio.sleep(LOOK_SECONDS)

    async def ready(self) -> None:
        """Wait until everything that exists has been seen; from here on nothing is missed."""
        for watch in self._watches:
            await watch.listed.wait()

    async def settled(self) -> None:
        """Wait until what has happened so far is judged. Raises TimeoutError when the API server doesn't answer."""
        async with asyncio.timeout(SETTLE_SECONDS):
            judged = asyncio.Event()
            self._suspect(judged.set)
            await judged.wait()

    def gpus_on(self, node: str) -> int:
        """Return how many GPUs the node's pods hold."""
        return sum(self.pods[uid].gpus for uid in self._on_node.get(node, ()))

    def gpus_of(self, queue: str) -> int:
        """Return how many GPUs the queue's ungated pods hold."""
        return sum(pod.gpus for pod in self.pods.values() if pod.uses_quota and pod.queue == queue)

    def gpu_seconds(self) -> float:
        """Return the integral of all GPUs held by bound pods, since the start."""
        self._count()
        return self._gpu_seconds

    def whole_gangs_succeeded(self) -> int:
        """Return how many gangs had all pods that they must have seen to succeed, in one attempt."""
        return len(
            {
                uid
                for (uid, _), attempt in self.attempts.items()
                if uid in self.gangs and len(attempt.succeeded) >= self.gangs[uid].pods
            }
        )

    # What the watches tell

    def _watch(self, path: str, on_event: Callable[[Object, bool], None]) -> Watch:
        """Watch a kind of which an object that vanished unseen does no harm: it just is not used any more."""

        def on_list(items: list[Object]) -> None:
            for item in items:
                on_event(item, False)  # noqa: FBT003 - present

        return Watch(self._client, path, on_list, on_event)

    def _on_node_object(self, item: Object, gone: bool) -> None:  # noqa: FBT001
        name = item["metadata"]["name"]
        if gone:
            self._node_labels.pop(name, None)  # what it had stays known, for late news of its pods
            return
        self._node_labels[name] = item["metadata"].get("labels") or {}
        self.nodes.setdefault(name, History()).put(time.monotonic(), observed.allocatable(item))

    def _on_flavor(self, item: Object, gone: bool) -> None:  # noqa: FBT001
        if not gone:
            self._flavors[item["metadata"]["name"]] = item["spec"].get("nodeLabels") or {}

    def _on_queue(self, item: Object, gone: bool) -> None:  # noqa: FBT001
        name, now = item["metadata"]["name"], time.monotonic()
        self._quotas.setdefault(name, History()).put(now, {} if gone else observed.quotas(item))
        self._borrowing.setdefault(name, History()).put(now, {} if gone else observed.quotas(item, "borrowingLimit"))
        self._parents[name] = "" if gone else item["spec"].get("parent") or ""

    def _on_job(self, item: Object, gone: bool) -> None:  # noqa: FBT001
        if not gone:
            self.gangs[item["metadata"]["uid"]] = observed.gang(item)

    def _on_pods(self, items: list[Object]) -> None:
        """Take in a list: who was ungated before whom, and when, nobody knows, so only sums can be judged."""
        listed = {pod.uid: pod for pod in map(observed.pod, items)}
        for uid in self.pods.keys() - listed.keys():
            self._set(self.pods[uid], None)
        for uid, pod in listed.items():
            self._set(self.pods.get(uid), pod)

    def _on_pod(self, item: Object, gone: bool) -> None:  # noqa: FBT001
        pod = observed.pod(item)
        old = self.pods.get(pod.uid)
        self._set(old, None if gone else pod)
        if gone:
            return
        if pod.attempt and not pod.gated and (old is None or old.gated) and self._is_ours(item):
            self._ungated(pod, pod.attempt)
        if pod.holds and (old is None or not old.node):
            self._bound(pod)

    def _is_ours(self, item: Object) -> bool:
        return not self._namespace or item["metadata"]["namespace"] == self._namespace

    def _set(self, old: Pod | None, new: Pod | None) -> None:
        """Replace what is known of one pod."""
        self._count()
        if old is not None:
            del self.pods[old.uid]
            self._on_node.get(old.node, set()).discard(old.uid)
            self._gpus -= old.gpus if old.holds else 0
            if old.attempt:
                self.attempts[old.attempt].pods.pop(old.uid, None)
        if new is None:
            return
        self.pods[new.uid] = new
        if new.holds:
            on_node = self._on_node.setdefault(new.node, set())
            on_node.add(new.uid)
            self._gpus += new.gpus
            self.peak_gpus = max(self.peak_gpus, self._gpus)
            self.most_pods_on_a_node = max(self.most_pods_on_a_node, len(on_node))
        if new.attempt:
            attempt = self.attempts.setdefault(new.attempt, Attempt(time.monotonic()))
            attempt.pods[new.uid] = new
            attempt.most = max(attempt.most, len(attempt.pods))
            if new.phase == "Succeeded":
                attempt.succeeded.add(new.uid)

    def _count(self) -> None:
        now = time.monotonic()
        self._gpu_seconds += self._gpus * (now - self._counted_at)
        self._counted_at = now

    # Suspicions at an instant, judged a little later

    def _ungated(self, pod: Pod, key: AttemptKey) -> None:
        attempt = self.attempts[key]
        existing, most = len(attempt.pods), attempt.most
        self._suspect(lambda: self._judge_ungating(key, pod.name, existing, most))
        now = time.monotonic()
        # Quota is promised before the first pod is created; what was cut since then is not the gang's fault.
        promised = min(now, attempt.first_seen) - self._lag
        for queue in self._upwards(pod.queue):
            for (flavor, resource), asked in self._asked(queue).items():
                limit = self._limit(queue, flavor, resource, now)
                if limit is None or asked <= limit:
                    self._said.discard(("queue", queue, flavor, resource))
                else:
                    self._suspect(
                        lambda q=queue, f=flavor, r=resource, a=asked: self._judge_quota(q, f, r, a, promised)  # type: ignore[misc]
                    )

    def _judge_ungating(self, key: AttemptKey, pod: str, existing: int, most: int) -> None:
        gang = self.gangs.get(key[0])
        if gang is None or existing >= gang.pods:
            return
        ever = f" ({most} had existed)" if most > existing else ""
        self._say_partial(
            key, f"{pod} was ungated when {existing} of {gang.pods} pods of its gang existed{ever}", gang.name
        )

    def _upwards(self, queue: str) -> list[str]:
        """Return the queue and those above it."""
        found = [queue]
        while (parent := self._parents.get(found[-1])) and parent not in found:
            found.append(parent)
        return found

    def _asked(self, queue: str) -> dict[tuple[str, str], int]:
        """Return what the ungated pods of the queue and of those below it ask for by (flavor, resource).

        Where the flavor of some pods isn't clear, flavor "" stands for all flavors together.
        """
        result: Counter[tuple[str, str]] = Counter()
        total: Counter[tuple[str, str]] = Counter()
        unclear = False
        for pod in self.pods.values():
            if not pod.uses_quota or queue not in self._upwards(pod.queue):
                continue
            quotas = self._quotas.get(pod.queue, History()).latest
            limited = {resource for _, resource in quotas}
            flavor = self._flavor(pod, {flavor for flavor, _ in quotas})
            unclear = unclear or not flavor
            for resource, amount in pod.requests.items():
                # Where GPUs are counted by card, their names have no quota of their own.
                if resource in limited or (is_extended(resource) and CARDS not in limited):
                    total["", resource] += amount
                    if flavor:
                        result[flavor, resource] += amount
        return result | total if unclear else result

    def _limit(self, queue: str, flavor: str, resource: str, since: float) -> int | None:
        """Return the most that the queue could use at some time since then; None where only its parent limits it."""
        below = [self._quotas[name] for name in self._quotas if queue in self._upwards(name)]
        owned = sum(
            max((_quota(amounts, flavor, resource) for amounts in history.since(since)), default=0) for history in below
        )
        if not self._parents.get(queue):
            return owned
        cells = [cell for cell in self._quotas[queue].latest if cell[1] == resource and flavor in {"", cell[0]}]
        borrowing = self._borrowing[queue].since(since)
        if not cells or any(cell not in amounts for amounts in borrowing for cell in cells):
            return None
        return owned + max(_quota(amounts, flavor, resource) for amounts in borrowing)

    def _flavor(self, pod: Pod, candidates: set[str]) -> str:
        """Return the one of the queue's flavors that the pod's node is of; empty when that is not clear."""
        labels = self._node_labels.get(pod.target)
        if len(candidates) == 1:
            return next(iter(candidates))
        if labels is None:
            return ""
        fitting = [f for f in candidates if f in self._flavors and self._flavors[f].items() <= labels.items()]
        return fitting[0] if len(fitting) == 1 else ""

    def _judge_quota(self, queue: str, flavor: str, resource: str, asked: int, promised: float) -> None:
        quota = self._limit(queue, flavor, resource, promised)
        if quota is not None and asked > quota and ("queue", queue, flavor, resource) not in self._said:
            self._said.add(("queue", queue, flavor, resource))
            where = f" in flavor {flavor}" if flavor else ""
            self.over_bookings.append(
                f"queue {queue}: ungated pods asked for {format_quantity(resource, asked)} {resource}{where}, "
                f"its quota is {format_quantity(resource, quota)}"
            )

    def _bound(self, pod: Pod) -> None:
        moment = time.monotonic()
        has = self.nodes.get(pod.node, History()).latest
        for resource, asked in self._used(pod.node).items():
            if asked <= has.get(resource, 0):
                self._said.discard(("node", pod.node, resource))
            else:
                self._suspect(lambda r=resource, a=asked: self._judge_node(pod.node, r, a, moment - self._lag))  # type: ignore[misc]

    def _used(self, node: str) -> Counter[str]:
        result: Counter[str] = Counter()
        for uid in self._on_node.get(node, ()):
            result.update(self.pods[uid].requests)
        return result

    def _judge_node(self, node: str, resource: str, asked: int, since: float) -> None:
        known = self.nodes[node].since(since) if node in self.nodes else []
        if not known:
            return  # bound to a node that never was
        has = max(amounts.get(resource, 0) for amounts in known)
        if asked > has and ("node", node, resource) not in self._said:
            self._said.add(("node", node, resource))
            self.over_bookings.append(
                f"node {node}: its pods asked for {format_quantity(resource, asked)} {resource}, "
                f"it has {format_quantity(resource, has)}"
            )

    # What must not last

    async def _look(self) -> None:
        """Judge what is due, unless the API server was away until just now: then the watches may still be behind."""
        try:
            await self._client.request_raw("GET", "/readyz")
        except (ApiUnreachableError, ApiError):
            self._answers_since = None
            return
        now = time.monotonic()
        self._answers_since = self._answers_since or now
        if now - self._answers_since >= self._lag:
            due = [judge for at, judge in self._suspicions if at <= now]
            self._suspicions = [(at, judge) for at, judge in self._suspicions if at > now]
            for judge in due:
                judge()
        if now - self._answers_since >= self._grace:
            self._look_for_late_gangs(now)
            self._look_for_crowded_nodes(now)

    def _look_for_late_gangs(self, now: float) -> None:
        for key, attempt in self.attempts.items():
            gang = self.gangs.get(key[0])
            if gang is None or not attempt.pods or now < attempt.first_seen + gang.start_deadline:
                continue
            bound = len(attempt.succeeded.union(pod.uid for pod in attempt.pods.values() if pod.node))
            going_on = any(not (p.gated or p.deleting or p.finished) for p in attempt.pods.values())
            if not going_on or bound >= gang.pods:
                attempt.short_since = None
                continue
            attempt.short_since = attempt.short_since or now
            if now - attempt.short_since >= self._grace + gang.repair:
                self._say_partial(
                    key,
                    f"{bound} of {gang.pods} pods were bound {now - attempt.first_seen:.0f} s after the first was seen, "
                    f"and startDeadlineSeconds is {gang.start_deadline:g}",
                    gang.name,
                )

    def _look_for_crowded_nodes(self, now: float) -> None:
        for node in self._node_labels:
            has = self.nodes[node].latest
            used = self._used(node)
            if all(amount <= has.get(resource, 0) for resource, amount in used.items()):
                self._crowded_since.pop(node, None)
            elif now - self._crowded_since.setdefault(node, now) >= self._grace:
                for resource, amount in used.items():
                    self._judge_node(node, resource, amount, now)

    def _suspect(self, judge: Callable[[], None]) -> None:
        self._suspicions.append((time.monotonic() + self._lag, judge))

    def _say_partial(self, key: AttemptKey, what: str, gang: str) -> None:
        """Count an attempt once, however many of its pods it is about."""
        if ("gang", key) not in self._said:
            self._said.add(("gang", key))
            self.partial_gangs.append(f"{gang}, attempt {key[1]}: {what}")


def _quota(amounts: Mapping[tuple[str, str], int], flavor: str, resource: str) -> int:
    """Return a queue's quota of a flavor's resource; with flavor "", of all flavors together."""
    return sum(amount for (f, r), amount in amounts.items() if r == resource and flavor in {"", f})

"""Gangs of real processes on nodes that die, and all that can interrupt them.

With INTERRUPTIONS_SILENCE=1 also nodes of which nothing is heard for longer than the control plane waits.
"""

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path

from queuectl.kube.client import MERGE_PATCH, ApiError
from queuectl.kube.names import INDEX_LABEL, pods_path
from queuectl.local.agent.node import REAL
from queuectl.local.controlplane import Running
from queuectl.local.prepare import nodes_are_ready
from tests.support import ledger, manifests
from tests.support.accounts import Gang, kill
from tests.support.eventually import eventually
from tests.support.real import Agent
from tests.support.scene import Choice, Claim, Scene
from tests.support.stage import Object, Stage
from tests.support.verdict import ATTEMPTS, EVENTS, Attempt, Interruption, Verdict, attempt_of
from tests.trainer import recurrence

GPUS = 4  # of each node
SPARE = 2  # nodes
PAUSE = 0.1  # seconds of a step
EVERY = (10, 40, 150)  # steps between two checkpoints
SIGNALS = ("SigTerm", "Annotation", "HTTP", "Exec")
URGENT = ((1, 4), (2, 4), (3, 4), (4, 2), (6, 1))  # pods, and GPUs of each
GRACE_SECONDS = 60
HOME = "/training"
PORT = 7461  # each pod has an address of its own
MOST_DOWN = 2  # nodes at one time
MOST_URGENT = 2  # gangs at one time
SILENT_SECONDS = 70.0
LIMIT_SECONDS = 300.0


class Chaos:
    """Gangs, nodes, a controller, and what is done to them."""

    def __init__(self, stage: Stage, running: Running, folder: Path, draw: random.Random) -> None:
        self.gangs: dict[str, Gang] = {}
        self.done: list[Interruption] = []
        self.choices: list[Choice] = []
        self.claims: list[Claim] = []
        self._stage = stage
        self._running = running
        self._folder = folder
        self._draw = draw
        self._agents: dict[str, Agent] = {}
        self._all_agents: list[Agent] = []
        self._urgent: list[str] = []
        self._later: set[asyncio.Task[None]] = set()
        self._down = 0
        # Nodes are lost on purpose: they are to be used again.
        self._controller = stage.controller(env={"QUEUECTL_SUSPECT_FIRST": "0"})

    # The stage

    async def open(self, gangs: int, *, steps: int) -> None:
        """Have the gangs run, on a few nodes more than they need."""
        stage = self._stage
        for number in range(gangs):
            name = f"gang-{number}"
            home = self._folder / "homes" / name
            home.mkdir(parents=True)
            self.gangs[name] = Gang(
                name,
                home,
                pods=1 + number % 3,
                gpus=self._draw.choice((1, 1, 2)),
                every=self._draw.choice(EVERY),
                steps=steps,
                hasty=number % 2 == 1,
            )
        needed = sum(gang.pods * gang.gpus for gang in self.gangs.values())
        nodes = -(-needed // GPUS) + SPARE
        flavor = f"{stage.name}-real"
        await stage.create(manifests.flavor(flavor, nodeLabels={REAL: "true"}))
        self._quota = nodes * GPUS
        quota = manifests.quota(self._quota, flavor=flavor)
        await stage.create(manifests.queue(stage.name, quotas=[quota], preemption={"withinQueue": "LowerPriority"}))
        await self._let_pods_report()
        for number in range(nodes):
            self._start_node(f"{stage.name}-real-{number}")
        await nodes_are_ready(stage.client, list(self._agents))
        self._controller.start()
        for number, gang in enumerate(self.gangs.values()):
            await stage.create(self._job(gang, SIGNALS[number % len(SIGNALS)]))
        await self._until_running(len(self.gangs))

    async def close(self) -> None:
        for task in self._later:
            task.cancel()
        for agent in self._all_agents:
            agent.end(signal.SIGKILL)
        for node in (await self._stage.client.request("GET", "/api/v1/nodes"))["items"]:
            if REAL in node["metadata"]["labels"]:
                await self._stage.client.request("DELETE", f"/api/v1/nodes/{node['metadata']['name']}")

    async def over(self) -> None:
        """Let all that was broken be mended, and all jobs come to their end."""
        await asyncio.gather(*self._later)
        for name in self._urgent:
            await self._stage.until_phase(name, "Succeeded", seconds=LIMIT_SECONDS)
        for gang in self.gangs.values():
            (gang.home / "fast").touch()
        for name in self.gangs:
            await self._stage.until_phase(name, "Succeeded", seconds=LIMIT_SECONDS)

    # Interruptions

    async def interrupt(self) -> None:
        """Interrupt something; most times when all run again, sometimes in the midst of it."""
        if self._draw.random() < 0.7:
            await self._controller_leads()
            await self._until_running(len(self.gangs) * 3 // 4)
        await asyncio.sleep(self._draw.random())
        kinds: dict[str, Callable[[], Awaitable[Interruption | None]]] = {
            "preempt": self._preempt, "delete pod": self._delete_pod, "remove pod": self._remove_pod,
            "crash": self._crash, "kill node": self._kill_node, "restart node": self._restart_node,
            "cordon": self._cordon, "drain": self._drain, "kill controller": self._kill_controller,
        }  # fmt: skip
        if os.environ.get("INTERRUPTIONS_SILENCE"):
            kinds["silence node"] = self._silence_node
        while True:
            what = self._draw.choice(list(kinds))
            done = await kinds[what]()
            if done is not None:
                self.done.append(done)
                say(f"{len(self.done)}. {done}")
                return
            await asyncio.sleep(0.2)

    async def _preempt(self) -> Interruption | None:
        stage, name = self._stage, f"urgent-{len(self._urgent)}"
        phases = [
            ((await stage.get_job(each)) or {}).get("status", {}).get("phase") for each in self._urgent[-MOST_URGENT:]
        ]
        if phases and "Succeeded" not in phases and len(phases) == MOST_URGENT:
            return None
        pods, gpus = self._draw.choice(URGENT)
        job = stage.job(name, pods, gpus, priority=5)
        seconds = self._draw.choice(("1", "3"))
        job["spec"]["roles"][0]["template"]["spec"]["containers"][0]["command"] = ["sleep", seconds]
        self._urgent.append(name)
        before = await Scene.look(stage)
        uid = (await stage.create(job))["metadata"]["uid"]
        done = Interruption("preempt for", name, time.time())
        if (at := await self._claims(uid)) is not None:
            after = await Scene.look(stage)
            self.claims.append(Claim.of(name, uid, before, after))
            if before.is_calm(after, uid):
                self.choices.append(Choice(name, uid, pods, gpus, at, self._quota, before, after))
        return done

    async def _claims(self, uid: str) -> float | None:
        """Return when room was claimed for a workload, if that is soon; None when it got room without a victim."""
        query = "SELECT kind, at FROM event WHERE workload_uid = :uid AND attempt = 1 ORDER BY id LIMIT 1"
        for _ in range(50):
            for row in await ledger.rows(self._stage, query, uid=uid):
                return row["at"].timestamp() if row["kind"] == "WaitingForVictims" else None
            await asyncio.sleep(0.1)
        return None

    async def _delete_pod(self) -> Interruption | None:
        pod = await self._any_pod()
        if pod is None:
            return None
        await self._request("DELETE", pods_path(self._stage.namespace, pod["metadata"]["name"]))
        return Interruption("delete pod", pod["metadata"]["name"], time.time())

    async def _remove_pod(self) -> Interruption | None:
        pod = await self._any_pod()
        if pod is None:
            return None
        path = pods_path(self._stage.namespace, pod["metadata"]["name"])
        done = Interruption("remove pod", pod["metadata"]["name"], time.time(), {attempt_of(pod)})
        await self._request("DELETE", path, {"gracePeriodSeconds": 0})
        return done

    async def _crash(self) -> Interruption | None:
        pod = await self._any_pod()
        if pod is None:
            return None
        job, number = attempt_of(pod)
        pid = self.gangs[job].pid(int(pod["metadata"]["labels"][INDEX_LABEL]), number)
        if pid is None:
            return None
        kill(pid, signal.SIGKILL)
        return Interruption("crash", pod["metadata"]["name"], time.time(), {(job, number)})

    async def _kill_node(self) -> Interruption | None:
        if self._down >= MOST_DOWN:
            return None
        name = self._draw.choice(sorted(self._agents))
        comes_back = self._draw.random() < 0.5
        what = "kill node" if comes_back else "replace node"
        done = Interruption(what, name, time.time(), await self._on(name))
        agent = self._agents.pop(name)
        self._down += 1
        first, second = (self._end(agent), self._request("DELETE", f"/api/v1/nodes/{name}"))
        if self._draw.random() < 0.5:
            first, second = second, first
        await first
        await second
        again = name if comes_back else f"{name}-x"
        self._do_later(self._draw.uniform(0, 8), lambda: self._node_comes(again))
        return done

    async def _restart_node(self) -> Interruption | None:
        name = self._draw.choice(sorted(self._agents))
        done = Interruption("restart node", name, time.time(), await self._on(name))
        agent = self._agents[name]
        await self._end(agent)
        await asyncio.sleep(self._draw.choice((0.0, 1.0)))
        agent.start()
        return done

    async def _silence_node(self) -> Interruption | None:
        """End a node and leave the control plane to find that out; it comes back late."""
        if self._down >= MOST_DOWN:
            return None
        name = self._draw.choice(sorted(self._agents))
        done = Interruption("silence node", name, time.time(), await self._on(name))
        await self._end(self._agents.pop(name))
        self._down += 1
        self._do_later(SILENT_SECONDS, lambda: self._node_comes(name))
        return done

    async def _cordon(self) -> Interruption | None:
        name = self._draw.choice(sorted(self._agents))
        await self._close_node(name)
        return Interruption("cordon", name, time.time())

    async def _drain(self) -> Interruption | None:
        name = self._draw.choice(sorted(self._agents))
        await self._close_node(name)
        for pod in await self._stage.pods():
            if pod["spec"].get("nodeName") == name and pod["status"]["phase"] == "Running":
                meta = {"name": pod["metadata"]["name"], "namespace": self._stage.namespace}
                body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta}
                await self._request("POST", pods_path(self._stage.namespace, meta["name"]) + "/eviction", body)
        return Interruption("drain", name, time.time())

    async def _kill_controller(self) -> Interruption | None:
        await self._controller_leads()
        await asyncio.to_thread(self._controller.kill)

        async def again() -> None:
            self._controller.start()

        self._do_later(self._draw.choice((0.0, 1.0, 3.0)), again)
        return Interruption("kill controller", "", time.time())

    # Inside

    async def _close_node(self, name: str) -> None:
        async def open_again() -> None:
            await self._request("PATCH", f"/api/v1/nodes/{name}", {"spec": {"unschedulable": None}})

        await self._request("PATCH", f"/api/v1/nodes/{name}", {"spec": {"unschedulable": True}})
        self._do_later(self._draw.uniform(1, 6), open_again)

    async def _node_comes(self, name: str) -> None:
        self._start_node(name)
        self._down -= 1

    def _start_node(self, name: str) -> None:
        folder = self._folder / "nodes" / name
        folder.mkdir(parents=True, exist_ok=True)
        agent = self._agents[name] = Agent(self._running, folder, [name], gpus=GPUS)
        self._all_agents.append(agent)
        agent.start()

    async def _end(self, agent: Agent) -> None:
        await asyncio.to_thread(agent.end, signal.SIGKILL)

    def _do_later(self, seconds: float, what: Callable[[], Awaitable[None]]) -> None:
        async def wait() -> None:
            await asyncio.sleep(seconds)
            await what()

        self._later.add(asyncio.create_task(wait()))

    async def _controller_leads(self) -> None:
        async def runs() -> bool:
            return self._controller.running

        await eventually(runs, "the controller is started again")
        await self._controller.until_leading()

    async def _until_running(self, count: int) -> None:
        async def look() -> bool:
            up = Counter[str]()
            for pod in await self._stage.pods():
                if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]:
                    up[attempt_of(pod)[0]] += 1
            running = [name for name in await self._phases("Running") if up[name] == self.gangs[name].pods]
            return len(running) + len(await self._phases("Succeeded")) >= count

        await eventually(look, f"{count} gangs run", seconds=LIMIT_SECONDS)

    async def _phases(self, phase: str) -> list[str]:
        return [
            job["metadata"]["name"]
            for job in await self._stage.jobs()
            if job["metadata"]["name"] in self.gangs and job.get("status", {}).get("phase") == phase
        ]

    async def _any_pod(self) -> Object | None:
        """Return a pod of a gang that runs."""
        running = await self._phases("Running")
        if not running:
            return None
        pods = [
            p for p in await self._stage.pods(self._draw.choice(sorted(running))) if p["status"]["phase"] == "Running"
        ]
        return self._draw.choice(pods) if pods else None

    async def _on(self, node: str) -> set[Attempt]:
        """Return who has a pod there that has not ended."""
        return {
            attempt_of(pod)
            for pod in await self._stage.pods()
            if pod["spec"].get("nodeName") == node and pod["status"]["phase"] in {"Pending", "Running"}
        }

    async def _request(self, method: str, path: str, body: Object | None = None) -> None:
        kind = MERGE_PATCH if method == "PATCH" else "application/json"
        try:
            await self._stage.client.request(method, path, body=body, content_type=kind)
        except ApiError as error:
            if error.status != 404:
                raise

    async def _let_pods_report(self) -> None:
        rbac, meta = "rbac.authorization.k8s.io", {"name": "tells", "namespace": self._stage.namespace}
        rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}
        await self._stage.create({"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": meta, "rules": [rule]})
        who = {
            "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": self._stage.namespace}],
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": "tells"},
        }
        await self._stage.create({"apiVersion": f"{rbac}/v1", "kind": "RoleBinding", "metadata": meta, **who})

    def _job(self, gang: Gang, how: str) -> Object:
        checkpoint: Object = {"path": f"{HOME}/checkpoints", "signal": how, "graceSeconds": GRACE_SECONDS}
        if how == "HTTP":
            checkpoint["http"] = {"port": PORT}
        if how == "Exec":
            checkpoint["exec"] = {"command": ["python", "-m", "queuectl.trainer"]}
        root = str(Path(recurrence.__file__).parents[2])
        address = {"name": "QUEUECTL_CHECKPOINT_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        env: list[Object] = [{"name": "PYTHONPATH", "value": root}]
        if how in {"HTTP", "Exec"}:
            env += [{"name": "QUEUECTL_CHECKPOINT_PORT", "value": str(PORT)}, address]
        pod = {
            "serviceAccountName": "default",
            "volumes": [{"name": "home", "hostPath": {"path": str(gang.home)}}],
            "terminationGracePeriodSeconds": GRACE_SECONDS,
        }
        job = self._stage.job(gang.name, gang.pods, gang.gpus, pod=pod, checkpoint=checkpoint, backoffLimit=100)
        command = ["python", "-I", "-S", recurrence.__file__, HOME, "--steps", str(gang.steps)]
        command += ["--every", str(gang.every), "--pause", str(PAUSE), *(["--patience", "0"] if gang.hasty else [])]
        container = job["spec"]["roles"][0]["template"]["spec"]["containers"][0]
        container |= {"command": command, "env": env, "volumeMounts": [{"name": "home", "mountPath": HOME}]}
        return job

    async def judge(self) -> None:
        """See that all came to what it had to, and that nobody lost or gave way for nothing."""
        for gang in self.gangs.values():
            assert gang.result() == recurrence.result(gang.steps, gang.pods), gang.name
        rows = await ledger.rows(self._stage, ATTEMPTS, namespace=self._stage.namespace)
        verdict = Verdict(rows, self.done, self._outages())
        for name, gang in self.gangs.items():
            verdict.judge(gang)
            status = (await self._stage.get_job(name) or {})["status"]
            assert status.get("lostSeconds", 0) == next(row["lost"] for row in rows if row["name"] == name)
        events = await ledger.rows(self._stage, EVENTS, namespace=self._stage.namespace)
        verdict.judge_evictions(events)
        for claim in self.claims:
            claim.judge([pod for pod in await self._stage.pods(claim.name) if attempt_of(pod)[1] == 1])
        for choice in self.choices:
            say(choice.judge())
        for what, count in (*Counter(done.what for done in self.done).items(), *verdict.sums.items()):
            say(f"{count:6} {what}")

    def _outages(self) -> list[tuple[float, float]]:
        """Return from when to when no controller led."""
        lines = [json.loads(line) for line in self._controller.log.read_text().splitlines() if '"in sync"' in line]
        leads = [datetime.fromisoformat(line["timestamp"]).timestamp() for line in lines]
        killed = [done.at for done in self.done if done.what == "kill controller"]
        return [(at, min((lead for lead in leads if lead > at), default=time.time())) for at in killed]


def say(text: str) -> None:
    """Have it in the output."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()

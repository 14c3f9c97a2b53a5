"""How fast whole gangs start: by the controller, and by a bare client that knows where they go."""

import asyncio
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import psycopg

from queuectl.kube import decode, pods
from queuectl.kube.client import JSON_PATCH, KubeClient
from queuectl.kube.names import jobs_path, pods_path
from queuectl.store.embedded import EmbeddedPostgres
from tests.bench.load import NAMESPACE, Load
from tests.bench.plane import Plane, Write, count_writes, cpu_seconds, fresh_plane, machine_seconds, peak_memory
from tests.bench.sightings import watching
from tests.support.eventually import eventually
from tests.support.stage import Controller

CONNECTIONS = (8, 32, 128)
POOL = 64  # requests under way of one client; its connection pool holds 100
SUBMITTERS = 32
LEDGER = ("cycle", "advance")
TROUBLES = ("step_failures_total", "terms_lost_total", "refused_admissions_total", "ended_attempts_total")
REPORTER = "queuectl.dev/controller"


@dataclass
class Run:
    """What one run measured. Times in seconds, memory in bytes; latencies are per gang, from its submission."""

    kind: str
    all_bound: float = 0.0  # since the first create
    all_running: float = 0.0
    bound: list[float] = field(default_factory=list)
    running: list[float] = field(default_factory=list)
    writes: dict[str, int] = field(default_factory=dict)  # all writing requests that the API server has counted
    own_writes: dict[str, int] = field(default_factory=dict)  # those of the controller, or of the bare client
    refused: dict[str, int] = field(default_factory=dict)  # of `writes`
    cpu: dict[str, float] = field(default_factory=dict)  # process → CPU seconds, until the last status was written
    others_share: float = 0.0  # of the machine's CPU time in use, what none of these processes used
    memory: int = 0  # the controller's peak
    ledger: dict[str, int] = field(default_factory=dict)  # transactions
    attempts: int = 0  # of all gangs; more than gangs when some were started anew
    troubles: dict[str, int] = field(default_factory=dict)  # the controller's own counts of what went wrong


Start = Callable[[], Awaitable[Mapping[str, float]]]  # returns gang → when it was submitted


async def by_controller(load: Load) -> Run:
    """A controller of its own Postgres, durable as shipped, gets all jobs as fast as a client can create them."""
    run = Run("controller")
    async with fresh_plane(load) as plane, AsyncExitStack() as stack:
        server = EmbeddedPostgres(plane.folder / "postgres")
        url = await asyncio.to_thread(server.start)
        stack.push_async_callback(asyncio.to_thread, server.stop)
        controller = Controller(plane.kubeconfig, url, plane.folder, "bench", {"QUEUECTL_LEASE_SECONDS": "6"})
        stack.push_async_callback(asyncio.to_thread, controller.stop)
        controller.start()

        async def in_sync() -> bool:
            assert controller.running, controller.log.read_text()[-2000:]
            return controller.says('"in sync"')

        await eventually(in_sync, "the controller is in sync", seconds=60)
        process = psutil.Process(controller.pid)
        postgres = psutil.Process(_postmaster(plane.folder / "postgres"))
        before = _transactions(url), _counts(controller.url)

        async def submit() -> Mapping[str, float]:
            submitted: dict[str, float] = {}
            slots = asyncio.Semaphore(SUBMITTERS)

            async def create(name: str) -> None:
                async with slots:
                    at = time.monotonic()
                    made = await plane.client.request("POST", jobs_path(NAMESPACE), body=load.job(name))
                    submitted[made["metadata"]["uid"]] = at

            async with asyncio.TaskGroup() as group:
                for name in load.names():
                    group.create_task(create(name))
            return submitted

        try:
            await _measure(run, load, plane, submit, {"controller": process, "postgres": postgres})
        except (TimeoutError, AssertionError, psutil.NoSuchProcess) as error:
            raise RuntimeError(
                f"not all pods run; the controller says:\n{controller.log.read_text()[-3000:]}"
            ) from error
        run.memory = peak_memory(process)
        after = _transactions(url), _counts(controller.url)
        counts = {name: after[1][name] - before[1].get(name, 0) for name in after[1]}
        run.ledger = {kind: counts.get(f"ledger_transaction_duration_seconds_count {kind}", 0) for kind in LEDGER}
        run.ledger["all"] = after[0] - before[0]
        run.troubles = {name: n for name, n in counts.items() if n and name.split()[0] in TROUBLES}
        jobs = (await plane.client.request("GET", jobs_path(NAMESPACE)))["items"]
        run.attempts = sum(job["status"]["attempt"] for job in jobs)
        run.own_writes = await _of_the_controller(plane.client, load, run.writes)
    return run


async def by_bare_client(load: Load, connections: int) -> Run:
    """Create the same pods gated and ungate each gang once it is whole; the place is known, nothing is written down."""
    run = Run(f"bare {connections}")
    async with fresh_plane(load) as plane, AsyncExitStack() as stack:
        count = -(-connections // POOL)
        clients = [await stack.enter_async_context(await KubeClient.open(str(plane.kubeconfig))) for _ in range(count)]
        slots: asyncio.Queue[KubeClient] = asyncio.Queue()
        for number in range(connections):
            slots.put_nowait(clients[number % count])
        gangs = asyncio.Semaphore(max(8, connections // 4))  # a gang is finished before the next is begun

        async def send(method: str, path: str, **request: Any) -> bytes:
            client = await slots.get()
            try:
                return await client.request_raw(method, path, **request)
            finally:
                slots.put_nowait(client)

        async def start(name: str, number: int) -> None:
            job, attempt = load.placed(name, number)
            async with gangs:
                wanted = load.bare_pods(job, attempt).values()
                answers = await asyncio.gather(*(send("POST", pods_path(NAMESPACE), body=pod) for pod in wanted))
                made = [decode.pod(answer).value for answer in answers]
                nodes = pods.nodes_of(attempt)
                patches = {
                    pod.name: pods.ungate_patch(job, pod.role, nodes[pod.role, pod.index][0], pod.uid) for pod in made
                }
                await asyncio.gather(
                    *(
                        send("PATCH", pods_path(NAMESPACE, name), body=patch, content_type=JSON_PATCH)
                        for name, patch in patches.items()
                    )
                )

        async def start_all() -> Mapping[str, float]:
            # All are wanted at once, as the controller's are: their clocks start together.
            began = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for number, name in enumerate(load.names()):
                    group.create_task(start(name, number))
            return dict.fromkeys(load.names(), began)

        await _measure(run, load, plane, start_all, {})
        run.own_writes = {name: run.writes[name] for name in ("POST pods", "PATCH pods")}
    return run


async def _measure(run: Run, load: Load, plane: Plane, start: Start, own: Mapping[str, psutil.Process]) -> None:
    processes = {"bench": psutil.Process(), **plane.processes, **own}

    def cpu() -> dict[str, float]:
        return {name: cpu_seconds(p, children=name == "postgres") for name, p in processes.items()}

    async with watching(plane.client, load) as sightings, asyncio.timeout(load.limit):
        (counted, refused), used, machine = await count_writes(plane.client), cpu(), machine_seconds()
        began = time.monotonic()
        submitted = await start()
        await sightings.all_ready.wait()
        if "controller" in own:
            await eventually(lambda: _told_running(plane.client, load), "every status says Running", seconds=60)
        run.cpu = {name: seconds - used[name] for name, seconds in cpu().items()}
        everything = machine_seconds() - machine
        run.others_share = max(0.0, 1 - sum(run.cpu.values()) / everything) if everything else 0.0
        now, refused_now = await count_writes(plane.client)
    run.refused = _named(refused_now - refused)
    run.writes = _named(now - counted)
    bound, ready = sightings.bound(), sightings.ready()
    run.all_bound, run.all_running = max(bound.values()) - began, max(ready.values()) - began
    run.bound = sorted(at - submitted[gang] for gang, at in bound.items())
    run.running = sorted(at - submitted[gang] for gang, at in ready.items())


def _named(writes: Counter[Write]) -> dict[str, int]:
    return {" ".join(write): count for write, count in sorted(writes.items())}


async def _told_running(client: KubeClient, load: Load) -> bool:
    jobs = (await client.request("GET", jobs_path(NAMESPACE)))["items"]
    return load.gangs == sum(bool(job.get("status", {}).get("phase") == "Running") for job in jobs)


async def _of_the_controller(client: KubeClient, load: Load, writes: Mapping[str, int]) -> dict[str, int]:
    """Return the writes that none but the controller makes, and of the events those that bear its name."""
    told = (await client.request("GET", f"/apis/events.k8s.io/v1/namespaces/{NAMESPACE}/events"))["items"]
    own = {
        write: count
        for write, count in writes.items()
        if re.fullmatch(r"\w+ (pods|(trainingjobs|queues|priorityclasses)(/status)?)", write)
    }
    own["POST trainingjobs"] -= load.gangs  # the submitting client's
    own["POST events"] = sum(event.get("reportingController") == REPORTER for event in told)
    return {write: count for write, count in own.items() if count}


def _transactions(url: str) -> int:
    """Return how many transactions Postgres has committed in the ledger's database, whoever's."""
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(
            "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
        ).fetchone()
    return int(row[0]) if row else 0


def _counts(url: str) -> dict[str, int]:
    """Return the controller's own counters, by name and the value of their label."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        f"{name} {label}".strip(): int(float(count))
        for name, label, count in re.findall(r'^queuectl_(\w+)(?:\{\w+="([^"]*)"\})? (\S+)$', text, re.MULTILINE)
    }


def _postmaster(folder: Path) -> int:
    return int((folder / "data" / "postmaster.pid").read_text().splitlines()[0])

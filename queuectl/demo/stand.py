"""What the demo starts and ends: a control plane with a node agent, and a controller with its embedded Postgres, in one folder.

Everything that runs is recorded in the folder as soon as it runs, so that a later call ends what a killed demo left.
"""

import http.client
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from filelock import FileLock, Timeout

from queuectl.local import controlplane, process
from queuectl.local.errors import LocalError
from queuectl.local.process import Process
from queuectl.store.embedded import EmbeddedPostgres

CONTROLLER_SECONDS = 60.0  # to its first answer, the making of its database included
CONTROLLER_STOP_SECONDS = 30.0  # it stops its Postgres before it ends


def default_state() -> Path:
    """Return XDG_STATE_HOME/queuectl/demo, or ~/.local/state/queuectl/demo."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "queuectl" / "demo"


class Stand:
    """The demo's processes and files; a context manager that keeps other demos off the folder. Calls block."""

    def __init__(self, state: Path) -> None:
        """Start nothing yet."""
        self.state = state.expanduser().absolute()
        self._control_plane = self.state / "control-plane"
        self._ledger = self.state / "ledger"
        self._record = self.state / "demo.json"
        self._controller: Process | None = None
        self._lock = FileLock(self.state / ".demo.lock")

    @property
    def kubeconfig(self) -> Path:
        """Where the kubeconfig is."""
        return controlplane.kubeconfig(self._control_plane)

    @property
    def trainings(self) -> Path:
        """Where trainings have their files."""
        return self.state / "trainings"

    @property
    def log(self) -> Path:
        """What the controller says."""
        return self.state / "controller.log"

    def __enter__(self) -> Self:
        """Take the folder. Raises LocalError when another demo has it."""
        try:
            self.state.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock.acquire(blocking=False)
        except Timeout as error:
            raise LocalError(f"Another demo uses {self.state}; wait for it, or name another folder.") from error
        except OSError as error:
            raise LocalError(f"The folder {self.state} can't be used: {error}; name another one.") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go of the folder."""
        self._lock.release()

    def kept(self) -> bool:
        """Tell whether a demo was left running here on purpose, and still does."""
        record = self._read()
        return bool(record.get("kept")) and self._recalled() is not None

    def start_control_plane(self, *, real_nodes: int) -> Sequence[str]:
        """Start a fresh control plane with so many nodes that run processes; return their names. Raises LocalError."""
        return controlplane.up(self._control_plane, real_nodes=real_nodes).real_nodes

    def start_controller(self) -> None:
        """Start a controller and wait until it is ready. Raises LocalError with the end of its log."""
        # What the user has set is for another cluster and another database.
        theirs = [name for name in os.environ if name.startswith("QUEUECTL_")]
        foreign = ["DATABASE_URL", "KUBECONFIG", "KUBERNETES_SERVICE_HOST", *theirs]
        command = ["env", *(part for name in foreign for part in ("-u", name)), "QUEUECTL_LOG_FORMAT=json"]
        command += [sys.executable, "-m", "queuectl", "controller", "--port", "0"]
        command += ["--kubeconfig", str(self.kubeconfig), "--data", str(self._ledger)]
        self._controller = process.spawn(command, log=self.log, cwd=self.state)
        self._write(kept=False)
        deadline = time.monotonic() + CONTROLLER_SECONDS
        while not self._controller_is_ready():
            self.check()
            if time.monotonic() > deadline:
                raise LocalError(f"The controller isn't ready after {CONTROLLER_SECONDS:g} s{self._tail()}")
            time.sleep(process.POLL_SECONDS)

    def check(self) -> None:
        """Raise LocalError when the controller has ended."""
        if self._controller is None or not process.is_alive(self._controller):
            raise LocalError(f"The controller ended on its own{self._tail()}")

    def keep(self) -> None:
        """Leave everything running when this process ends."""
        self._write(kept=True)

    def end(self, *, delete: bool = True) -> None:
        """End everything that was started in this folder, by whomever; with `delete`, remove its files too.

        Nothing to end is no error. Raises LocalError if a process survives SIGKILL.
        """
        controller = self._controller or self._recalled()
        if controller is not None:
            process.end([controller], seconds=CONTROLLER_STOP_SECONDS)
        if (self._ledger / "postgres").is_dir():
            server = EmbeddedPostgres(self._ledger / "postgres")
            server.stop()  # a killed controller leaves it
            server.kill()  # should it not have obeyed
        controlplane.down(self._control_plane, delete=delete)
        self._record.unlink(missing_ok=True)
        if delete:
            for path in self.state.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != ".demo.lock":
                    path.unlink()

    def _controller_is_ready(self) -> bool:
        lines = self.log.read_text(errors="replace").splitlines()
        served = [line.removeprefix("serving http://") for line in lines if line.startswith("serving http://")]
        if not served:
            return False
        connection = http.client.HTTPConnection(served[-1], timeout=5)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _tail(self) -> str:
        return f"; the end of {self.log}:\n{process.tail(self.log)}"

    def _recalled(self) -> Process | None:
        known = self._read().get("controller")
        found = Process(**known) if known else None
        return found if found and process.is_alive(found) else None

    def _read(self) -> dict[str, Any]:
        try:
            record: dict[str, Any] = json.loads(self._record.read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return record

    def _write(self, *, kept: bool) -> None:
        controller = asdict(self._controller) if self._controller else None
        self._record.write_text(json.dumps({"controller": controller, "kept": kept}))

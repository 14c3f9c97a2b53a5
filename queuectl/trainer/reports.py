"""How a trainer tells what it has saved: in its pod's annotation and its container's termination message.

Nothing here raises in training: what can't be told is logged, and the checkpoint is there all the same.
"""

import http.client
import json
import logging
import os
import ssl
import threading
from collections.abc import Mapping
from pathlib import Path

ANNOTATION = "queuectl.dev/checkpoint"
LINE = "queuectl-checkpoint: "
FAILURE = "queuectl-not-saved: "
MOST_BYTES = 4096  # of a termination message, of which the kubelet shows the end
TRIES = 6  # one after the other's failure: 1 s, 2 s, 4 s ... apart
REQUEST_SECONDS = 5.0
_PASSING, _SERVERS_FAULT = (http.HTTPStatus.CONFLICT, http.HTTPStatus.TOO_MANY_REQUESTS), 500
_SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_TERMINATION_LOG = "/dev/termination-log"

log = logging.getLogger("queuectl.trainer")


class Reports:
    """All the ways to tell that this process has."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Find out by the environment which there are."""
        self._message = TerminationMessage(environment)
        self._annotation = PodAnnotation(environment)

    def saved(self, report: str) -> None:
        """Tell of a checkpoint."""
        self._message.saved(report)
        self._annotation.send(report)

    def not_saved(self, why: str) -> None:
        """Tell of a save that failed."""
        self._message.not_saved(why)

    def close(self, seconds: float) -> None:
        """Send what is not sent yet, within that time."""
        if not self._annotation.flush(seconds):
            log.warning("the last report was not sent")
        self._annotation.close()


class TerminationMessage:
    """The lines of ours in the container's termination message: the last report, and why a save failed since."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Where no path is given by QUEUECTL_TERMINATION_LOG, only a file that is there is written."""
        path = environment.get("QUEUECTL_TERMINATION_LOG") or _TERMINATION_LOG
        given = "QUEUECTL_TERMINATION_LOG" in environment
        self._path = Path(path) if given or Path(path).is_file() else None
        self._report = ""

    def saved(self, report: str) -> None:
        """Write the report in place of the one before."""
        self._report = LINE + report
        self._write([self._report])

    def not_saved(self, why: str) -> None:
        """Write why nothing was saved, beside the last report."""
        self._write([FAILURE + " ".join(why.split())[:500], *([self._report] if self._report else [])])

    def _write(self, ours: list[str]) -> None:
        if self._path is None:
            return
        try:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                others = os.pread(handle, MOST_BYTES, 0).decode(errors="replace").splitlines()
                kept = [line for line in others if not line.startswith((LINE, FAILURE))]
                text = "".join(f"{line}\n" for line in [*kept, *ours]).encode()[-MOST_BYTES:]
                os.pwrite(handle, text, 0)  # at no moment is it empty
                os.ftruncate(handle, len(text))
            finally:
                os.close(handle)
        except OSError as error:
            log.warning("the termination message can't be written: %s", error)


class PodAnnotation:
    """The annotation of this process's own pod, written by a thread of its own with the pod's service account.

    Only the last report counts: one that has not been sent when the next comes is not sent any more.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Find QUEUECTL_POD, and its service account in QUEUECTL_SERVICE_ACCOUNT or where Kubernetes mounts it."""
        self._pod = environment.get("QUEUECTL_POD", "")
        self._folder = Path(environment.get("QUEUECTL_SERVICE_ACCOUNT") or _SERVICE_ACCOUNT)
        self._host = environment.get("KUBERNETES_SERVICE_HOST", "")
        self._port = environment.get("KUBERNETES_SERVICE_PORT", "443")
        self._changed = threading.Condition()
        self._report: str | None = None  # to be sent
        self._busy = False
        self._closed = False
        self._told = False  # that there is no service account
        self._thread: threading.Thread | None = None

    def send(self, report: str) -> None:
        """Have it sent soon; outside a pod nothing is done, and that there is no service account is logged once."""
        if not (self._pod and self._host):
            return
        token = self._folder / "token"
        if not token.is_file():
            if not self._told:
                log.warning(
                    "the annotation of pod %s is not written: there is no token of a service account, %s",
                    self._pod,
                    token,
                )
            self._told = True
            return
        with self._changed:
            if self._closed:
                return
            self._report = report
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="queuectl-reports", daemon=True)
                self._thread.start()

    def flush(self, seconds: float) -> bool:
        """Wait until the last report is sent or given up, that long at most; tell whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._report is None and not self._busy, seconds)

    def close(self) -> None:
        """Let the thread end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (report := self._next()) is not None:
            for tries in range(TRIES):
                again, why = self._patch(report)
                if why is None:
                    break
                log.warning("the annotation of pod %s is not written: %s", self._pod, why)
                if not again or self._newer(within=2.0**tries):
                    break

    def _next(self) -> str | None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._report is not None or self._closed)
            report, self._report = self._report, None
            self._busy = report is not None
            return report

    def _newer(self, *, within: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._report is not None or self._closed, within)

    def _patch(self, report: str) -> tuple[bool, str | None]:
        """Return whether it is worth another try, and what went wrong, None if nothing."""
        try:
            token = (self._folder / "token").read_text().strip()
            namespace = (self._folder / "namespace").read_text().strip()
            trust = ssl.create_default_context(cafile=str(self._folder / "ca.crt"))
            connection = http.client.HTTPSConnection(
                self._host.strip("[]"), int(self._port), timeout=REQUEST_SECONDS, context=trust
            )
            try:
                connection.request(
                    "PATCH",
                    f"/api/v1/namespaces/{namespace}/pods/{self._pod}",
                    json.dumps({"metadata": {"annotations": {ANNOTATION: report}}}),
                    {"Authorization": f"Bearer {token}", "Content-Type": "application/merge-patch+json"},
                )
                answer = connection.getresponse()
                if answer.status == http.HTTPStatus.OK:
                    return False, None
                body = answer.read(500).decode(errors="replace")
                return (
                    answer.status in _PASSING or answer.status >= _SERVERS_FAULT,
                    f"{answer.status} {answer.reason}: {body}",
                )
            finally:
                connection.close()
        except (OSError, http.client.HTTPException, ValueError) as error:
            return True, repr(error)

"""Who asks a trainer to save: a file that the downward API writes, an HTTP request, SIGTERM.

Asks have an id, so that one which is heard twice is answered twice and saved for once.
"""

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType
from typing import Any

MOST_ASKS = 16  # waiting at one time, and answers remembered
MOST_BYTES = 4096  # of an ask
MOST_REQUESTS = 32  # at one time
MOST_SECONDS = 86_400.0  # that a request may wait
READ_SECONDS = 10.0

log = logging.getLogger("queuectl.trainer")


@dataclass(frozen=True, slots=True)
class Ask:
    """Somebody's wish for a checkpoint; `deadline` in Unix seconds: then nobody waits for it any more."""

    id: str
    deadline: float

    @classmethod
    def parsed(cls, text: bytes) -> "Ask":
        """Read `{"id": "2-1", "deadline": 1800000000}`. Raises ValueError for anything else."""
        try:
            found = json.loads(text)
            ask = cls(found["id"], float(found["deadline"]))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f'an ask is {{"id": text, "deadline": Unix seconds}}, not {text[:100]!r}') from error
        if not isinstance(ask.id, str) or not ask.id:
            raise ValueError(f"the id of an ask is some text, not {ask.id!r}")
        return ask


class Asks:
    """The asks that wait for a checkpoint. May be used from several threads."""

    def __init__(self, file: Path | None = None) -> None:
        """`file` is where the downward API shows the pod's ask, if it does."""
        self.file = file
        self.told_to_stop = False
        """SIGTERM has come."""
        self._lock = threading.Lock()
        self._open: dict[str, tuple[Ask, Future[str]]] = {}
        self._answered: dict[str, str] = {}
        self._seen: tuple[int, int] | None = None  # inode and time of modification of what was read of `file`
        self._of_file = ""

    def __bool__(self) -> bool:
        """Tell whether any ask waits."""
        return bool(self._open)

    def waiting(self) -> tuple[Ask, ...]:
        """Return those that wait."""
        with self._lock:
            return tuple(ask for ask, _ in self._open.values())

    def look(self) -> None:
        """See whether the file has changed: one `stat` if not. What is no ask there is logged."""
        if self.file is None:
            return
        try:
            found = self.file.stat()
        except OSError:
            return  # not there yet
        if (found.st_ino, found.st_mtime_ns) == self._seen:
            return
        try:
            text = self.file.read_bytes()
            ask = Ask.parsed(text) if text.strip() else None
        except (OSError, ValueError) as error:
            log.warning("the file of asks, %s, is no good: %s", self.file, error)
            ask = None
        self._seen = (found.st_ino, found.st_mtime_ns)
        with self._lock:
            if self._of_file and (ask is None or ask.id != self._of_file):
                self._open.pop(self._of_file, None)  # withdrawn
            self._of_file = ask.id if ask else ""
        if ask:
            self.add(ask)

    def add(self, ask: Ask) -> "Future[str]":
        """Return what will be the report that answers `ask`, at once if it was answered before."""
        with self._lock:
            if ask.id not in self._open:
                future: Future[str] = Future()
                if ask.id in self._answered:
                    future.set_result(self._answered[ask.id])
                    return future
                self._open[ask.id] = ask, future
            return self._open[ask.id][1]

    def answer(self, asks: tuple[Ask, ...], report: Callable[[str], str]) -> None:
        """Answer `asks`, each with the report for its id."""
        with self._lock:
            for ask in asks:
                _, future = self._open.pop(ask.id, (ask, None))
                self._answered[ask.id] = report(ask.id)
                while len(self._answered) > MOST_ASKS:
                    del self._answered[next(iter(self._answered))]
                if future:
                    future.set_result(self._answered[ask.id])

    def failed(self, error: BaseException) -> None:
        """Tell all that wait that nothing was saved. That of the file is heard again, others may ask again."""
        with self._lock:
            for _, future in self._open.values():
                future.set_exception(OSError(f"not saved: {error}"))
            self._open.clear()
            self._seen = None

    def hear_sigterm(self) -> Callable[[], None]:
        """Take SIGTERM as an ask to save and stop, then do what was done before if that is a function.

        Returns what undoes it. Python lets only the main thread do this; elsewhere it is logged.
        """
        process, before = os.getpid(), signal.getsignal(signal.SIGTERM)

        def handler(number: int, frame: FrameType | None) -> None:
            if os.getpid() != process:  # a child, such as a data loader's worker, that was forked
                signal.signal(number, before if before is not None else signal.SIG_DFL)
                os.kill(os.getpid(), number)
                return
            self.told_to_stop = True
            if callable(before):
                before(number, frame)

        def undo() -> None:
            if signal.getsignal(signal.SIGTERM) is handler:
                signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)

        try:
            signal.signal(signal.SIGTERM, handler)
        except ValueError as error:
            log.warning("SIGTERM will not be heard: %s", error)
            return lambda: None
        return undo


class Server(ThreadingHTTPServer):
    """Take asks by POST; answer 200 with the report once it is saved, else say why not."""

    daemon_threads = True

    def __init__(self, host: str, port: int, asks: Asks) -> None:
        """Listen at an address, if none is given at all; port 0 takes any (`server_port` tells which).

        Raises OSError when it is taken.
        """
        self.asks = asks
        self._free = threading.Semaphore(MOST_REQUESTS)
        both = ":" in host or (not host and socket.has_dualstack_ipv6())
        self.address_family = socket.AF_INET6 if both else socket.AF_INET
        super().__init__((host, port), _Handler)
        threading.Thread(target=self.serve_forever, name="queuectl-asks", daemon=True).start()

    def close(self, seconds: float) -> None:
        """Hear nothing more, and let what is being answered be answered, within that time each."""
        self.shutdown()
        self.server_close()
        if all(self._free.acquire(timeout=seconds / MOST_REQUESTS) for _ in range(MOST_REQUESTS)):
            self._free.release(MOST_REQUESTS)

    def server_bind(self) -> None:
        """At all addresses take IPv4, too."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Drop what comes while too many requests wait."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Count a request until it is answered."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Log it: that somebody hangs up is no matter of the training's."""
        log.debug("a request of %s ended badly: %r", client_address, sys.exception())


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = READ_SECONDS

    def do_POST(self) -> None:
        try:
            length = int(self.headers.get("Content-Length") or 0)
            ask = Ask.parsed(self.rfile.read(min(max(length, 0), MOST_BYTES)))
        except ValueError as error:
            self._reply(400, json.dumps({"error": str(error)}))
            return
        if len(self.server.asks.waiting()) >= MOST_ASKS:
            self._reply(503, json.dumps({"error": f"{MOST_ASKS} asks wait already"}))
            return
        try:
            seconds = min(max(ask.deadline - time.time(), 0.0), MOST_SECONDS)
            self._reply(200, self.server.asks.add(ask).result(seconds))
        except TimeoutError:
            self._reply(504, json.dumps({"error": "nothing was saved before the deadline"}))
        except (OSError, ValueError) as error:
            self._reply(503, json.dumps({"error": str(error)}))

    def _reply(self, status: int, body: str) -> None:
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        log.debug(format, *args)

"""Exporters of GPUs' metrics: which pods they are, and what they show of errors."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from queuectl.kube.informer import Item
from queuectl.model.faults import Xid

READ_SECONDS = 5.0  # for one of them
MAX_BYTES = 2**23  # of what one shows
MAX_SHOWN = 1000  # errors of one node
DEFAULT_PORT = 9400
MAX_XID = 1000  # more are values that stand for none

# dcgm-exporter's: the last XID of each GPU, how many of each there were in its window of time, and how many ever.
_LAST, _COUNTS = "DCGM_FI_DEV_XID_ERRORS", ("DCGM_EXP_XID_ERRORS_COUNT", "DCGM_EXP_XID_ERRORS_TOTAL")
_STARTS = tuple(f"{name}{{".encode() for name in (_LAST, *_COUNTS))


class Exporter(msgspec.Struct, frozen=True):
    """A pod that shows the metrics of its node's GPUs, by HTTP."""

    node: str
    ip: str
    port: int
    runs: bool

    @property
    def url(self) -> str:
        """Where it shows them."""
        return f"http://{f'[{self.ip}]' if ':' in self.ip else self.ip}:{self.port}/metrics"


class _Meta(msgspec.Struct, rename="camel"):
    name: str
    namespace: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None


class _Spec(msgspec.Struct, rename="camel"):
    node_name: str = ""
    containers: list[dict[str, Any]] = []


class _Status(msgspec.Struct):
    phase: str = ""
    pod_ip: str = msgspec.field(default="", name="podIP")


class _Pod(msgspec.Struct):
    metadata: _Meta
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


_decode_pod = msgspec.json.Decoder(_Pod).decode


def exporter(raw: msgspec.Raw | bytes) -> Item[Exporter]:
    """Decode a pod of an exporter."""
    seen = _decode_pod(raw)
    meta, status = seen.metadata, seen.status
    ports = [port for container in seen.spec.containers for port in container.get("ports") or ()]
    named = [port for port in ports if port.get("name") == "metrics"]
    port = next((port["containerPort"] for port in (*named, *ports)), DEFAULT_PORT)
    runs = status.phase == "Running" and bool(status.pod_ip) and meta.deletion_timestamp is None
    value = Exporter(seen.spec.node_name, status.pod_ip, port, runs)
    return Item(f"{meta.namespace}/{meta.name}", meta.resource_version, value)


def xids(text: bytes) -> list[Xid]:
    """Return the errors of GPUs in what an exporter shows. Raises ValueError when it is no such text.

    Only their lines are parsed, and of these not those that tell of none: it shows some hundred others.
    """
    lines = [line for line in text.splitlines() if line.startswith(_STARTS) and not line.endswith(b" 0")]
    if len(lines) > MAX_SHOWN:
        raise ValueError(f"it shows {len(lines)} errors of GPUs; at most {MAX_SHOWN} are read")
    found = []
    for family in text_string_to_metric_families("\n".join((*(line.decode() for line in lines), ""))):
        for sample in family.samples:
            value = sample.value
            if not 0 < value < float("inf"):  # nan, too
                continue
            last = sample.name == _LAST
            code = int(value) if last else _number(sample.labels.get("xid"))
            if 0 < code < MAX_XID:
                found.append(_xid(sample.name, sample.labels, code, 1 if last else int(value)))
    return found


def _xid(metric: str, labels: Mapping[str, str], code: int, level: int) -> Xid:
    namespace = labels.get("namespace") or labels.get("pod_namespace")
    pod = labels.get("pod") or labels.get("pod_name")
    uuid = " ".join(filter(None, (labels.get("UUID"), labels.get("GPU_I_ID"))))
    return Xid(metric, labels.get("gpu", "?"), uuid, code, level, f"{namespace}/{pod}" if namespace and pod else "")


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0


class UnreadableError(Exception):
    """An exporter could not be read, or shows nothing that can be. Says why, in words."""


class Reader:
    """Reads exporters. Use it as a context manager. It knows no proxy, cookie or credential."""

    async def __aenter__(self) -> Self:
        """Open the client."""
        self._session = aiohttp.ClientSession(
            # The caller bounds how many are read at once; kept connections to thousands would be too many.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=READ_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all connections."""
        await self._session.close()

    async def read(self, exporter: Exporter) -> list[Xid]:
        """Return the errors of GPUs that an exporter shows. Raises UnreadableError."""
        try:
            async with self._session.get(exporter.url, allow_redirects=False) as response:
                if response.status != 200:  # noqa: PLR2004
                    raise UnreadableError(f"GET {exporter.url} gives {response.status}")
                text = bytearray()
                async for chunk in response.content.iter_any():
                    text += chunk
                    if len(text) > MAX_BYTES:
                        raise UnreadableError(f"GET {exporter.url} gives more than {MAX_BYTES} bytes")
            return xids(bytes(text))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnreadableError(f"GET {exporter.url}: {error or type(error).__name__}") from error
        except ValueError as error:
            raise UnreadableError(f"GET {exporter.url}: its metrics can't be read: {error}") from error

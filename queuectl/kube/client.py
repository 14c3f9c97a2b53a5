"""One connection to the API server: kubernetes-asyncio's configuration, TLS and authentication, raw JSON bodies.

The generated client is not used beyond that: it returns error responses without raising, has no timeouts of
its own and rebuilds every object through slow model classes.
"""

import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import msgspec
import yaml
from multidict import CIMultiDict

from queuectl.kube.library import (
    KUBE_CONFIG_DEFAULT_LOCATION,
    ConfigException,
    Configuration,
    RESTClientObject,
    load_incluster_config,
    load_kube_config,
)

JSON = "application/json"
JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"

CONNECTIONS = 1200  # at once; most are for commands in pods, which may take long
REQUEST_SECONDS = 30.0  # one request, answer included
CONNECT_SECONDS = 5.0
READ_BYTES = 2**21  # of a stream read ahead
OUTPUT_BYTES = 4096  # of a command's output that are kept, the last ones
QUIET_SECONDS = 150.0  # a watch without event or bookmark for so long is dead; bookmarks come each minute

_STDOUT, _STATUS = 1, 3  # channels of an exec
_EXEC_PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")  # the second for API servers that know no other
_SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount/token"
# What the API server puts around what rules and policies of ours say, which name the field and the remedy.
_AROUND = re.compile(
    r"^.* is forbidden: ValidatingAdmissionPolicy 'queuectl-[^']*' with binding '[^']*' denied request: "
    r'|^\w+\.queuectl\.dev "[^"]*" is invalid: |Invalid value: "object": '
)
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class ApiUnreachableError(Exception):
    """The API server did not answer, or with a 5xx or 429: trying again later makes sense."""


class ApiError(Exception):
    """The API server refused a request."""

    def __init__(self, status: int, reason: str, message: str, details: Mapping[str, Any] | None = None) -> None:
        """Keep the HTTP status, and reason, message and details of the Status object."""
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.details = details or {}


class _Request(TypedDict, total=False):
    params: Mapping[str, str] | None
    body: object
    content_type: str
    accept: str


class KubeClient:
    """Requests to one API server. Make it with ``open``; close it, or use it as a context manager."""

    def __init__(
        self,
        configuration: Configuration,
        kubeconfig: str | None,
        context: str | None,
        headers: CIMultiDict[str] | None = None,
    ) -> None:
        """Make a client; ``open`` is the way to get one. ``headers`` go out with every request."""
        self._configuration = configuration
        configuration.connection_pool_maxsize = CONNECTIONS
        self._tls = RESTClientObject(configuration)
        self._kubeconfig = kubeconfig
        self._context = context
        self._host: str = (configuration.host or "").rstrip("/")
        # The library's session looks for a proxy and for a .netrc anew, in a thread, with every request.
        self._session = aiohttp.ClientSession(
            connector=self._tls.pool_manager.connector,
            connector_owner=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
            proxy=configuration.proxy or _proxy_of_environment(self._host),
            read_bufsize=READ_BYTES,
        )

    @classmethod
    async def open(cls, kubeconfig: str | None = None, *, context: str | None = None) -> Self:
        """Read the kubeconfig named, else $KUBECONFIG or ~/.kube/config, else the pod's service account.

        Raises ApiUnreachableError when none of them can be read.
        """
        configuration = await _load(kubeconfig, context)
        return cls(configuration, kubeconfig, context, _impersonation(kubeconfig, context))

    @property
    def host(self) -> str:
        """The API server's address."""
        return self._host

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()
        await self._tls.close()

    async def __aenter__(self) -> Self:
        """Return the client itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all connections."""
        await self.close()

    async def request(self, method: str, path: str, **given: Unpack[_Request]) -> Any:
        """Send one request and return the decoded answer.

        Raises ApiError for a 4xx and ApiUnreachableError for everything that may pass.
        """
        return _decode(await self.request_raw(method, path, **given) or b"null")

    async def request_raw(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: object = None,
        content_type: str = JSON,
        accept: str = JSON,
    ) -> bytes:
        """Send one request and return the answer's bytes; a body of ``bytes`` goes out as it is."""
        data = body if isinstance(body, bytes) else None if body is None else _encode(body)
        timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS, sock_connect=CONNECT_SECONDS)
        for last_try in (False, True):
            headers = await self._headers(accept)
            if data is not None:
                headers["Content-Type"] = content_type
            try:
                async with self._session.request(
                    method, self._host + path, params=params, data=data, headers=headers, timeout=timeout
                ) as response:
                    answer = await response.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise ApiUnreachableError(f"{self._host}: {error or type(error).__name__}") from error
            if response.status == 401 and not last_try:  # noqa: PLR2004 - a short-lived credential ran out
                await self._renew()
                continue
            raise_for_status(response.status, answer)
            return answer
        raise AssertionError

    async def execute(self, path: str, command: Sequence[str], *, container: str = "") -> tuple[int, str]:
        """Run a command in a container, by the ``exec`` of a pod; return its exit code and the end of its output.

        There is no limit of time; cancelling it closes the connection. Raises as ``request`` does.
        """
        params = [("stdout", "true"), ("stderr", "true"), *(("command", part) for part in command)]
        params += [("container", container)] if container else []
        output, status = b"", b""
        try:
            headers = await self._headers("*/*")  # a kubelet, which may see them, has no JSON to offer
            async with self._session.ws_connect(
                self._host + path, params=params, headers=headers, protocols=_EXEC_PROTOCOLS
            ) as socket:
                async for message in socket:
                    if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                        continue
                    if message.data[0] == _STDOUT:
                        output = (output + message.data[1:])[-OUTPUT_BYTES:]
                    elif message.data[0] == _STATUS:
                        status = (status + message.data[1:])[-OUTPUT_BYTES:]
        except aiohttp.WSServerHandshakeError as error:
            raise_for_status(error.status, error.message.encode())
            raise ApiUnreachableError(f"{self._host}: {error.message}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiUnreachableError(f"{self._host}: {error or type(error).__name__}") from error
        return _exit_code(status), output.decode(errors="replace")

    @asynccontextmanager
    async def stream(self, path: str, *, params: Mapping[str, str]) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a watch; the value is an iterator of its lines, of any length.

        Raises as ``request`` does; ends without error when the server ends the watch.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=QUIET_SECONDS)
        try:
            async with self._session.get(
                self._host + path, params=params, headers=await self._headers(JSON), timeout=timeout
            ) as response:
                if response.status >= 400:  # noqa: PLR2004
                    raise_for_status(response.status, await response.read())
                yield _lines(response.content)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiUnreachableError(f"{self._host}: {error or type(error).__name__}") from error

    async def _headers(self, accept: str) -> dict[str, str]:
        headers = {"Accept": accept, "User-Agent": "queuectl"}
        settings = await self._configuration.auth_settings()
        return headers | {part["key"]: part["value"] for part in settings.values()}

    async def _renew(self) -> None:
        self._configuration = await _load(self._kubeconfig, self._context)


def _exit_code(status: bytes) -> int:
    """Return the exit code that the last message of an ``exec`` tells. Raises ApiUnreachableError when it was lost."""
    try:
        told = _decode(status)
        if told["status"] == "Success":
            return 0
        causes = (told.get("details") or {}).get("causes") or ()
        code = next((cause["message"] for cause in causes if cause.get("reason") == "ExitCode"), None)
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise ApiUnreachableError("the connection ended before the command did") from error
    if code is None:
        raise ApiError(500, told.get("reason") or "", told.get("message") or "the command was not run")
    return int(code)


async def _load(kubeconfig: str | None, context: str | None) -> Configuration:
    configuration = Configuration()
    try:
        if _in_cluster(kubeconfig):
            load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            await load_kube_config(config_file=kubeconfig, context=context, client_configuration=configuration)
    except (ConfigException, OSError, TimeoutError) as error:
        raise ApiUnreachableError(
            f"no usable kubeconfig: {error}; name one with --kubeconfig or $KUBECONFIG"
        ) from error
    return configuration


def _in_cluster(kubeconfig: str | None) -> bool:
    return kubeconfig is None and "KUBECONFIG" not in os.environ and Path(_SERVICE_ACCOUNT).exists()


def _impersonation(kubeconfig: str | None, context: str | None) -> CIMultiDict[str]:
    """Return the headers of the user whom the kubeconfig's context acts as; the library doesn't know of these."""
    headers = CIMultiDict[str]()
    if _in_cluster(kubeconfig):
        return headers
    files = [Path(file).expanduser() for file in (kubeconfig or KUBE_CONFIG_DEFAULT_LOCATION).split(os.pathsep) if file]
    found = [yaml.safe_load(file.read_text(encoding="utf-8")) or {} for file in files if file.exists()]
    named = context or next((config["current-context"] for config in found if config.get("current-context")), "")
    contexts = (entry for config in found for entry in config.get("contexts") or ())
    chosen = next((entry.get("context") or {} for entry in contexts if entry.get("name") == named), {})
    users = (entry for config in found for entry in config.get("users") or ())
    user = next((entry.get("user") or {} for entry in users if entry.get("name") == chosen.get("user")), {})
    if user.get("as"):
        headers.add("Impersonate-User", user["as"])
        for group in user.get("as-groups") or ():
            headers.add("Impersonate-Group", group)
    return headers


def _proxy_of_environment(host: str) -> str | None:
    url = urlsplit(host)
    return None if not url.hostname or proxy_bypass(url.hostname) else getproxies().get(url.scheme)


def raise_for_status(status: int, answer: bytes) -> None:
    """Raise ApiError for an answer that refuses, ApiUnreachableError for one that may be another later."""
    if status < 400:  # noqa: PLR2004
        return
    try:
        problem = _decode(answer)
    except msgspec.DecodeError:
        problem = {}
    if not isinstance(problem, dict):
        problem = {}
    message = problem.get("message") or answer[:500].decode(errors="replace") or f"HTTP {status}"
    message = _AROUND.sub("", message)
    if status >= 500 or status == 429:  # noqa: PLR2004
        raise ApiUnreachableError(f"HTTP {status}: {message}")
    raise ApiError(status, problem.get("reason") or "", message, problem.get("details"))


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    rest = bytearray()
    async for chunk in content.iter_any():
        rest += chunk
        if b"\n" in chunk:
            *lines, tail = bytes(rest).split(b"\n")
            rest = bytearray(tail)
            for line in lines:
                if line:
                    yield line

"""Maintenance of a stage's nodes, and what is seen of it."""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from queuectl.kube.client import MERGE_PATCH, ApiError
from queuectl.kube.maintenance import DONE, MARK, PATH
from queuectl.kube.names import API_VERSION
from tests.support.eventually import LIMIT_SECONDS, eventually
from tests.support.stage import STAGE_LABEL, Object, Stage


class Maintenance:
    """One NodeMaintenance, of all nodes of the stage unless told otherwise."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.name = f"{stage.name}-maintenance"
        self.path = f"{PATH}/{self.name}"

    async def begin(self, **spec: Any) -> None:
        which = {} if "nodes" in spec else {"nodeSelector": {STAGE_LABEL: self._stage.name}}
        body = {"apiVersion": API_VERSION, "kind": "NodeMaintenance", "metadata": {"name": self.name}}
        body["spec"] = which | spec
        await self._stage.client.request("POST", PATH, body=body, params={"fieldValidation": "Strict"})

    async def status(self) -> Object:
        found: Object = await self._stage.client.request("GET", self.path)
        return found.get("status") or {}

    async def nodes(self) -> dict[str, Object]:
        return {node["name"]: node for node in (await self.status()).get("nodes") or ()}

    async def phases(self) -> Counter[str]:
        return Counter(node["phase"] for node in (await self.nodes()).values())

    async def until(self, phase: str, *, seconds: float = LIMIT_SECONDS) -> Object:
        """Wait until it is in a phase as a whole."""

        async def look() -> Object | None:
            status = await self.status()
            return status if status.get("phase") == phase else None

        return await self._waited(look, f"{self.name} is {phase}", seconds)

    async def until_node(self, phase: str, name: str = "", says: str = "", *, seconds: float = LIMIT_SECONDS) -> Object:
        """Wait until a node is in a phase, and says so; return how far it is."""

        async def look() -> Object | None:
            for node in (await self.nodes()).values():
                if node["phase"] == phase and name in {"", node["name"]} and says in node.get("message", ""):
                    return node
            return None

        return await self._waited(look, f"node {name} is {phase} {says}", seconds)

    async def _waited(self, look: Callable[[], Awaitable[Object | None]], what: str, seconds: float) -> Object:
        try:
            return await eventually(look, what, seconds=seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{await self.status()}\n{self._stage.logs()}") from None

    async def done(self, node: str) -> None:
        await self.patch_node(node, {"metadata": {"annotations": {DONE: "yes"}}})

    async def patch_node(self, node: str, body: Object) -> None:
        await self._stage.client.request("PATCH", f"/api/v1/nodes/{node}", body=body, content_type=MERGE_PATCH)

    async def node(self, name: str) -> Object:
        found: Object = await self._stage.client.request("GET", f"/api/v1/nodes/{name}")
        return found

    async def until_cordoned(self, name: str) -> None:
        async def look() -> bool:
            return bool((await self.node(name))["spec"].get("unschedulable"))

        await eventually(look, f"node {name} is cordoned")

    async def until_as_before(self, *cordoned: str) -> None:
        """Wait until nothing is left on the stage's nodes but the cordons of these."""

        async def look() -> bool:
            params = {"labelSelector": f"{STAGE_LABEL}={self._stage.name}"}
            items = (await self._stage.client.request("GET", "/api/v1/nodes", params=params))["items"]
            return all(
                bool(item["spec"].get("unschedulable")) == (item["metadata"]["name"] in cordoned)
                and not {MARK, DONE} & (item["metadata"].get("annotations") or {}).keys()
                for item in items
            )

        await eventually(look, "nodes are as before")

    async def end(self) -> None:
        try:
            await self._stage.client.request("DELETE", self.path)
        except ApiError as error:
            if error.status != 404:
                raise


@asynccontextmanager
async def maintenance_of(stage: Stage) -> AsyncIterator[Maintenance]:
    result = Maintenance(stage)
    try:
        yield result
    finally:
        await result.end()

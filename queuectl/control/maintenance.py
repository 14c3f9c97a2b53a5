"""Carries maintenance of nodes out: writes how far it has come, and then does what follows from that.

It keeps nothing: a controller that takes over reads the same from the objects, and does the same.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import structlog

from queuectl.control import metrics
from queuectl.control.world import World
from queuectl.core import maintenance as core
from queuectl.kube import maintenance as kube
from queuectl.kube.client import ApiError, ApiUnreachableError
from queuectl.kube.events import NAMESPACE, event
from queuectl.kube.names import API_VERSION
from queuectl.kube.writes import Writer
from queuectl.model.maintenance import Maintenance, NodePhase, NodeState, Progress, There

LOOK_SECONDS = 1.0  # between two looks, when nothing happens that tells of itself
PACE_SECONDS = 0.1  # at least
_ALARMING = {"NodeDrainBlocked", "NodeUpgradeFailed", "NodeTestFailed"}

log = structlog.get_logger()


class Maintainer:
    """Carries it out for one leader's term."""

    def __init__(
        self, world: World, writer: Writer, identity: str, wake: Callable[[], None], now: Callable[[], float]
    ) -> None:
        """Prepare; ``run`` starts it. ``wake`` is called when other nodes are avoided than before."""
        self._world = world
        self._upkeep = world.upkeep
        self._writer = writer
        self._identity = identity
        self._wake = wake
        self._now = now

    def say(self) -> dict[str, There]:
        """Say which nodes are avoided, as the objects are; return all nodes, and who is there."""
        there = self._upkeep.say(self._world, self._now())
        if self._world.changes:
            self._wake()
        return there

    async def run(self) -> None:
        """Go on until cancelled."""
        while True:
            self._upkeep.changed.clear()
            await self.look()
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._upkeep.changed.wait()
            except TimeoutError:
                pass
            await asyncio.sleep(PACE_SECONDS)

    async def look(self) -> None:
        """Write how far everything has come, and do what follows from that; what can't be done is left to the next look."""
        there = self.say()
        if there:
            await self._tell(there)
            await self._do(self.say())
        self._show()

    async def _tell(self, there: dict[str, There]) -> None:
        """Write how far each maintenance has come; what follows from it waits until that is written."""
        for one in self._upkeep.oldest_first():
            owner = core.owners(self._upkeep.maintenances.values(), self._upkeep.nodes)
            refused = {test.node: test for test in self._upkeep.refused.values() if test.maintenance == one.uid}
            tests = refused | self._upkeep.tests_of(one)
            told = core.progress(one, there, owner, tests, self._now())
            status = kube.status(one, told, self._now())
            if status != one.status:
                await self._tried(self._write(one, told, status), maintenance=one.name)

    async def _write(self, one: Maintenance, told: Progress, status: dict[str, Any]) -> None:
        written = await self._writer.patch_maintenance_status(one, status)
        known = self._upkeep.maintenances.get(one.name)
        if known is not None and int(known.resource_version) < int(written.resource_version):
            self._upkeep.maintenances[one.name] = written
        for state in _news(one, told):
            log.info(
                "node under maintenance", maintenance=one.name, node=state.name, phase=state.phase, why=state.message
            )
            await self._event(one, state.reason, f"{state.name}: {state.message}")
        if told.phase is not one.phase:
            log.info("maintenance", maintenance=one.name, phase=told.phase, why=str(told.why))
            await self._event(one, told.why.code, str(told.why))

    async def _event(self, one: Maintenance, reason: str, note: str) -> None:
        who = {"apiVersion": API_VERSION, "kind": "NodeMaintenance", "name": one.name, "uid": one.uid}
        alarming = reason in _ALARMING or reason == "MaintenanceHalted"
        body = event(who, reason, note, identity=self._identity, now=self._now(), warning=alarming)
        await self._tried(self._writer.create_event(NAMESPACE, body), event=reason)

    async def _do(self, there: dict[str, There]) -> None:
        """Do what follows from the statuses as they are written."""
        work = [self._tried(one, maintenance=name) for name, one in self._due(there)]
        await asyncio.gather(*work)

    def _due(self, there: dict[str, There]) -> Iterator[tuple[str, Coroutine[Any, Any, object]]]:
        maintenances = self._upkeep.maintenances
        owner = core.owners(maintenances.values(), self._upkeep.nodes)
        for name in owner.keys() | self._upkeep.noted:
            one = maintenances.get(owner.get(name, ""))
            node = self._upkeep.nodes.get(name)
            if one is None and node is not None:
                one = maintenances.get(node.mark.maintenance)
            state = next((state for state in one.states if state.name == name), None) if one else None
            if node is None or (state is None and name in owner):
                continue  # gone, or it is not written yet that the maintenance has it
            want = core.wanted(one, state)
            if not core.is_as_wanted(node, want):
                yield want.maintenance, self._writer.make_node(name, want)
        for one in maintenances.values():
            tests, phases = self._upkeep.tests_of(one), {state.name: state.phase for state in one.states}
            for name in core.to_test(one, one.states, there):
                if name not in tests:
                    yield one.name, self._create_test(one, name)
            for name, test in tests.items():
                if phases.get(name) in {NodePhase.RELEASED, NodePhase.SKIPPED}:
                    yield one.name, self._writer.remove_test(test)

    async def _create_test(self, one: Maintenance, node: str) -> None:
        try:
            await self._writer.create_test(one, node)  # what becomes of it is for the watch alone to show
        except ApiError as error:
            self._upkeep.refused[one.uid, node] = kube.refused_test(one, node, error.message)
            raise

    async def _tried(self, work: Coroutine[Any, Any, object], **about: str) -> None:
        """Do it, or leave it to the next look."""
        try:
            await work
        except ApiError as error:
            if error.status not in {404, 409}:  # it has changed since it was read
                log.warning("maintenance not carried out", error=error.message, **about)
        except ApiUnreachableError as error:
            log.warning("maintenance not carried out", error=str(error), **about)

    def _show(self) -> None:
        metrics.MAINTENANCE.clear()
        for one in self._upkeep.maintenances.values():
            for phase, count in Counter(state.phase for state in one.states).items():
                metrics.MAINTENANCE.labels(one.name, phase.value).set(count)


def _news(one: Maintenance, told: Progress) -> Iterator[NodeState]:
    """Yield the nodes of which there is something to tell."""
    before = {state.name: (state.phase, state.reason) for state in one.states}
    for state in told.states:
        if state.phase is not NodePhase.PENDING and before.get(state.name) != (state.phase, state.reason):
            yield state

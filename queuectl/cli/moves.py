"""Asking for the moves of a proposal, and waiting for what comes of it."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Self

from queuectl.cli.change import For, each, reached, until
from queuectl.cli.errors import CommandError, Exit, report
from queuectl.cli.jobs import phase_of
from queuectl.cli.render import resource_name
from queuectl.cli.session import Session, say
from queuectl.core.defrag import Proposal
from queuectl.kube import moves
from queuectl.kube.client import MERGE_PATCH, KubeClient
from queuectl.kube.names import MOVE, MOVE_REFUSED, jobs_path
from queuectl.model.objects import MoveRequest

VALID_SECONDS = 120.0  # of a request; the leader decides anew within that time or not at all


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and the uids of the jobs that are to move, by namespace and name."""

    client: KubeClient
    request: MoveRequest
    movers: dict[str, str]

    @classmethod
    def of(cls, client: KubeClient, proposal: Proposal, within: float) -> Self:
        """Make a request of a proposal. ``within``: seconds of running after which it must have paid."""
        gang, those = proposal.gang, [move.gang for move in proposal.moves]
        request = MoveRequest(
            uid=gang.uid,
            job=f"{gang.namespace}/{gang.name}",
            moves=tuple(sorted((one.uid, one.attempt) for one in those)),
            within=within,
            until=round(time.time() + VALID_SECONDS, 3),
        )
        return cls(client, request, {one.name: one.uid for one in those})

    async def ask(self) -> int:
        """Mark all jobs that are to move, or none, with the user's own rights; return the exit code."""
        annotations = {MOVE: moves.annotation(self.request), MOVE_REFUSED: None}

        async def mark(**params: str) -> int:
            async def one(name: str) -> None:
                body = {"metadata": {"uid": self.movers[name], "annotations": annotations}}
                path = jobs_path(*name.split("/"))
                await self.client.request("PATCH", path, params=params, body=body, content_type=MERGE_PATCH)

            return await each(list(self.movers), one)

        code = await mark(dryRun="All") or await mark()
        if not code:
            say(f"asked for {', '.join(self.movers)} to make room for {self.request.job}")
        return code

    async def wait(self, limit: float) -> int:
        """Wait until the job runs for which room was to be made, or nobody moves for it; return the exit code."""
        runs, no = asyncio.create_task(self._runs(limit)), asyncio.create_task(self._is_refused(limit))
        try:
            await asyncio.wait({runs, no}, return_when=asyncio.FIRST_COMPLETED)
            if not runs.done() and no.exception() is None:
                return report(CommandError(no.result(), Exit.REFUSED))
            job = await runs  # that a job was deleted that moves is no answer
        except CommandError as error:
            return report(error)
        finally:
            for task in (runs, no):
                task.cancel()
            await asyncio.gather(runs, no, return_exceptions=True)
        say(f"{resource_name(job)} {phase_of(job)}")
        return Exit.DONE

    async def _runs(self, limit: float) -> dict[str, Any]:
        namespace, name = self.request.job.split("/")
        return await until(Session(self.client, namespace), name, lambda job: reached(job, For.RUNNING), limit)

    async def _is_refused(self, limit: float) -> str:
        """Return why, once that is so."""

        def answer(job: dict[str, Any]) -> str | None:
            return moves.refusal(job["metadata"].get("annotations") or {}, self.request.until)

        namespace, name = next(iter(self.movers)).split("/")
        job = await until(Session(self.client, namespace), name, lambda job: answer(job) is not None, limit)
        return answer(job) or ""

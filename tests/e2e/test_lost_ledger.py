"""A ledger that is lost, or restored from before."""

from pathlib import Path

import yaml

from queuectl.local.controlplane import Running
from tests.support.databases import Databases
from tests.support.eventually import eventually
from tests.support.stage import Stage


async def test_a_lost_ledger_runs_nothing_twice(stage: Stage, postgres: Databases) -> None:
    """What has ended stays ended, and pods of the past don't pass for those of a new attempt."""
    await stage.nodes(2)
    await stage.queue(16)
    first = stage.controller()
    first.start()
    await stage.submit("ended", 1, 8, run_seconds=1)
    await stage.submit("runs", 1, 8)
    ended = await stage.until_phase("ended", "Succeeded")
    await stage.until_phase("runs", "Running")
    first.kill()
    with postgres.migrated() as fresh:
        second = stage.controller("b", env={"DATABASE_URL": fresh})
        second.start()
        runs = await stage.until_job("runs", lambda s: s["attempt"] == 2 and s["phase"] == "Running", "runs anew")
        assert runs["status"]["attempt"] == 2
        assert await stage.get_job("ended") == ended
        assert {pod["metadata"]["name"] for pod in await stage.pods("ended")} == {"ended-worker-1-0"}
        second.stop()


async def test_no_controller_acts_beside_one_that_leads_by_another_ledger(
    stage: Stage, postgres: Databases, control_plane: Running, tmp_path: Path
) -> None:
    """Also if they are installed in different namespaces."""
    config = yaml.safe_load(control_plane.kubeconfig.read_text())
    config["contexts"][0]["context"]["namespace"] = "elsewhere"
    elsewhere = tmp_path / "elsewhere.yaml"
    elsewhere.write_text(yaml.safe_dump(config))
    await stage.nodes(2)
    await stage.queue(16)
    first = stage.controller()
    first.start()
    await stage.submit("runs", 2, 8)
    await stage.until_phase("runs", "Running")
    before = {pod["metadata"]["uid"] for pod in await stage.pods("runs")}
    with postgres.migrated() as fresh:
        second = stage.controller("b", env={"DATABASE_URL": fresh}, kubeconfig=elsewhere)
        second.start()

        async def says_so() -> bool:
            return "leads this cluster by another ledger" in second.log.read_text()

        await eventually(says_so, "it says so")
        assert "removing a pod" not in second.log.read_text()
        assert {pod["metadata"]["uid"] for pod in await stage.pods("runs")} == before
        first.stop()  # on purpose: then the other may
        await stage.until_job("runs", lambda s: s["attempt"] == 2 and s["phase"] == "Running", "runs anew")
        second.stop()

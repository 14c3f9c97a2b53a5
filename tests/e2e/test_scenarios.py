"""Scenarios on a real control plane, judged as in virtual time.

SCENARIOS="a.yaml b.yaml" in the environment has these files played instead of those of the project.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from queuectl.cli.documents import read as read_documents
from queuectl.kube.client import KubeClient
from queuectl.local.controlplane import Running
from queuectl.simulate.clockwork import Run
from queuectl.simulate.form import Scenario, read
from queuectl.simulate.verdict import differences
from tests.support.databases import Databases
from tests.support.play import perform

FOLDER = Path(__file__).parents[1] / "scenarios"
# Not here: those of many pods, and those that turn on a few seconds of the controller's own time limits.
PROJECT = [
    "ceiling", "claim_and_cut", "claim_dropped", "elastic_split", "fair_share", "gpu_driver", "gpu_memory",
    "gpu_models_apart", "gpu_shared", "gpu_slices", "held_room", "never_fits", "partial", "preempts_in_vain", "priority", "priority_order", "racks", "quota_cut_in_cohort", "quota_lowered", "reclaim", "restart",
    "waiting_is_enough",
]  # fmt: skip
FILES = os.environ.get("SCENARIOS", "").split() or [str(FOLDER / f"{name}.yaml") for name in PROJECT]


@pytest.fixture(scope="module")
async def played(
    request: pytest.FixtureRequest,
    kube: KubeClient,
    control_plane: Running,
    postgres: Databases,
    tmp_path_factory: pytest.TempPathFactory,
) -> Mapping[str, tuple[Scenario, Run]]:
    """Play all that tests were chosen of, those of one policy side by side; they take no longer than the longest."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    files = [str(item.callspec.params["file"]) for item in items if item.path == request.path]
    scenarios = {file: read(read_documents([file])[0].data) for file in files}
    result: dict[str, tuple[Scenario, Run]] = {}
    for policy in {scenario.policy.model_dump_json() for scenario in scenarios.values()}:
        chosen = {file: each for file, each in scenarios.items() if each.policy.model_dump_json() == policy}
        with postgres.migrated() as url:
            runs = await perform(kube, control_plane.kubeconfig, url, tmp_path_factory.mktemp("play"), chosen)
        result |= {file: (chosen[file], run) for file, run in runs.items()}
    return result


@pytest.mark.parametrize("file", FILES, ids=lambda file: Path(file).stem)
async def test_it_ends_as_wanted(file: str, played: Mapping[str, tuple[Scenario, Run]]) -> None:
    scenario, run = played[file]
    found = differences(scenario, run)
    lines = [f"{entry.at:g} s: {entry.job} {entry.what}: {entry.why}" for entry in run.timeline]
    assert not found, "\n".join([*found, *lines])

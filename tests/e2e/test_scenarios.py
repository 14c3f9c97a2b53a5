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
# Not here: those of many pods, those that turn on a few seconds of the controller's own time
# limits, and elastic_split_grown: which of two equal gangs gets the last place is a matter of milliseconds.
PROJECT = [
    "ceiling", "claim_and_cut", "claim_dropped", "claims_and_cut", "defrag", "elastic_grows", "elastic_grows_in_vain",
    "elastic_split", "elastic_taken_back", "fair_share", "gpu_driver", "gpu_memory", "gpu_models_apart",
    "gpu_shared", "gpu_slices", "held_room", "leaving_is_enough", "limits_per_namespace", "limits_per_user",
    "least_lost", "least_lost_in_turn", "least_lost_peers", "lost_node", "lost_node_other_rack", "lost_node_replaced",
    "lost_node_spare", "namespaces", "never_fits", "node_faulty", "partial", "partly_done", "partly_done_claim", "preempts_in_vain",
    "priority", "priority_order", "quota_cut_in_cohort", "quota_lowered", "racks", "reclaim", "restart",
    "saves_and_succeeds", "saves_for_nobody", "saves_in_time",
    "waiting_is_enough",
]  # fmt: skip
FILES = os.environ.get("SCENARIOS", "").split() or [str(FOLDER / f"{name}.yaml") for name in PROJECT]
DOCUMENTS = {document.source: document.data for document in read_documents(FILES)}


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
    sources = [str(item.callspec.params["source"]) for item in items if item.path == request.path]
    scenarios = {source: _scenario(source) for source in sources}
    result: dict[str, tuple[Scenario, Run]] = {}
    for policy in {scenario.policy.model_dump_json() for scenario in scenarios.values()}:
        chosen = {source: each for source, each in scenarios.items() if each.policy.model_dump_json() == policy}
        with postgres.migrated() as url:
            runs = await perform(kube, control_plane.kubeconfig, url, tmp_path_factory.mktemp("play"), chosen)
        result |= {source: (chosen[source], run) for source, run in runs.items()}
    return result


def _scenario(source: str) -> Scenario:
    try:
        return read(DOCUMENTS[source])
    except ValueError as error:
        raise ValueError(f"{source} is not a scenario:\n{error}") from error


@pytest.mark.parametrize("source", DOCUMENTS, ids=lambda source: Path(source).name.removesuffix(".yaml"))
async def test_it_ends_as_wanted(source: str, played: Mapping[str, tuple[Scenario, Run]]) -> None:
    scenario, run = played[source]
    found = differences(scenario, run)
    lines = [f"{entry.at:g} s: {entry.job} {entry.what}: {entry.why}" for entry in run.timeline]
    assert not found, "\n".join([*found, *lines])

"""The flavor of the quickstart takes the simulated nodes, and not those that look into no image."""

import re
from pathlib import Path

import yaml

from queuectl.local.agent.node import manifest
from queuectl.local.nodes import node_manifest

DOCS = Path(__file__).parents[2] / "docs"


def labels(page: str) -> dict[str, str]:
    """Return the labels of the only flavor on a page."""
    blocks = re.findall(r"```yaml\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    objects = [each for block in blocks for each in yaml.safe_load_all(block)]
    [found] = [each["spec"]["nodeLabels"] for each in objects if each["kind"] == "ResourceFlavor"]
    return dict(found)


def test_jobs_of_the_quickstart_and_those_for_processes_are_kept_apart() -> None:
    simulated, real = node_manifest("node-0001")["metadata"]["labels"], manifest("real-0001", 8)["metadata"]["labels"]
    assert labels("quickstart.md").items() <= simulated.items()
    assert not labels("quickstart.md").items() <= real.items()
    assert labels("local.md").items() <= real.items()
    assert not labels("local.md").items() <= simulated.items()

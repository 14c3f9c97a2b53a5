"""What the demo plays: the window's jobs and queues as objects, on a compressed clock."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from queuectl.demo.window import TraceJob
from queuectl.kube.names import API_VERSION

GPU = "nvidia.com/gpu"
FLAVOR = "simulated"
NAMESPACE = "default"
NODES = 16
GPUS_PER_NODE = 8
MODEL = "NVIDIA-H100-80GB-HBM3"
COMPRESSION = 240  # seconds of the trace in one of the demo
SHORTEST_RUN = 2.0
LONGEST_RUN = 12.0  # seconds; else one job of the window would run for six minutes
SMALLEST_QUOTA = 3
START_DEADLINE_SECONDS = 60

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cue:
    """A job and when it is submitted, in seconds from the start."""

    at: float
    name: str
    queue: str
    gpus: int
    run_seconds: float


def cues(window: Sequence[TraceJob], speed: float) -> list[Cue]:
    """Return the window's jobs on the demo's clock, `speed` times faster than usual."""
    first = window[0].submit
    return [
        Cue(
            at=(job.submit - first) / COMPRESSION / speed,
            name=job.name,
            queue=job.vc,
            gpus=job.gpus,
            run_seconds=min(max(job.duration / COMPRESSION, SHORTEST_RUN), LONGEST_RUN) / speed,
        )
        for job in window
    ]


def quotas(window: Sequence[TraceJob]) -> dict[str, int]:
    """Return GPUs by queue, as tight as can be: each virtual cluster's largest gang, and a few for single GPUs."""
    result: dict[str, int] = {}
    for job in window:
        result[job.vc] = max(result.get(job.vc, SMALLEST_QUOTA), job.gpus)
    return dict(sorted(result.items(), key=lambda item: (-item[1], item[0])))


def admin_objects(quota: Mapping[str, int]) -> list[Manifest]:
    """Return the flavor and the queues; in these, nobody passes a big gang that waits."""
    flavor = _object("ResourceFlavor", FLAVOR, {"nodeLabels": {"nvidia.com/gpu.product": MODEL}})
    return [
        flavor,
        *(
            _object(
                "Queue",
                queue,
                {"order": "StrictFIFO", "quotas": [{"flavor": FLAVOR, "resource": GPU, "nominal": gpus}]},
            )
            for queue, gpus in quota.items()
        ),
    ]


def job_object(cue: Cue) -> Manifest:
    """Return the TrainingJob: one pod of one GPU for each GPU of the gang."""
    container = {"name": "main", "image": "training", "resources": {"limits": {GPU: 1}}}
    template = {
        "metadata": {"annotations": {"local.queuectl.dev/run-seconds": f"{cue.run_seconds:.2f}"}},
        "spec": {"containers": [container]},
    }
    job = _object(
        "TrainingJob",
        cue.name,
        {
            "queue": cue.queue,
            "startDeadlineSeconds": START_DEADLINE_SECONDS,
            "roles": [{"name": "worker", "replicas": cue.gpus, "template": template}],
        },
    )
    job["metadata"]["namespace"] = NAMESPACE
    return job


def _object(kind: str, name: str, spec: Manifest) -> Manifest:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}

"""Every metric, named in one place. Names follow Kueue's where the meaning is the same."""

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_WAITS = (0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 3600, 4 * 3600, 24 * 3600, 7 * 24 * 3600)

LEADING = Gauge("queuectl_leading", "1 while this controller leads, else 0.")
PENDING = Gauge("queuectl_pending_workloads", "Workloads that wait, held ones included.", ["queue"])
ACTIVE = Gauge("queuectl_reserving_active_workloads", "Workloads that hold a reservation.", ["queue"])
QUOTA = Gauge("queuectl_queue_nominal_quota", "Nominal quota, in base units.", ["queue", "flavor", "resource"])
USAGE = Gauge("queuectl_queue_resource_reservation", "Reserved amount, in base units.", ["queue", "flavor", "resource"])
HISTORY = Gauge(
    "queuectl_queue_usage_history",
    "What the queue has held on average, weighted by QUEUECTL_USAGE_HALF_LIFE, in base units.",
    ["queue", "flavor", "resource"],
)
WAIT_REASONS = Gauge("queuectl_pending_reasons", "Workloads that wait for a reason.", ["reason"])
SUSPECT = Gauge("queuectl_suspect_nodes", "Nodes on which something bad happened to gangs lately.")
AVOIDED = Gauge("queuectl_suspect_nodes_avoided", "Those of them onto which no new gang goes.")
SUSPECT_TIMES = Gauge(
    "queuectl_suspect_node_times", "How often in a row a node is suspect; at most 100 nodes.", ["node"]
)
OFFENCES = Counter("queuectl_node_offences", "What happened to gangs that speaks against their nodes.", ["reason"])
ADMITTED = Counter("queuectl_admitted_workloads", "Admissions.", ["queue"])
ENDED = Counter("queuectl_ended_attempts", "Attempts that ended, by reason.", ["reason"])
LOST = Counter("queuectl_lost_gpu_seconds", "GPU-seconds of work that interruptions cost, by reason.", ["reason"])
ADMISSION_WAIT = Histogram(
    "queuectl_admission_wait_time_seconds", "Seconds from submission to admission.", ["queue"], buckets=_WAITS
)
READY_WAIT = Histogram(
    "queuectl_ready_wait_time_seconds", "Seconds from admission until all pods are ready.", ["queue"], buckets=_WAITS
)
PLAN_SECONDS = Histogram("queuectl_plan_duration_seconds", "Seconds that the core took for a cycle.", buckets=_SECONDS)
LEDGER_SECONDS = Histogram(
    "queuectl_ledger_transaction_duration_seconds", "Seconds of a ledger transaction.", ["kind"], buckets=_SECONDS
)
REFUSED = Counter("queuectl_refused_admissions", "Admissions that the ledger refused since the plan was out of date.")
MAINTENANCE = Gauge("queuectl_maintenance_nodes", "Nodes of a NodeMaintenance.", ["maintenance", "phase"])
STEP_FAILURES = Counter("queuectl_step_failures", "Steps that must be tried again.", ["step"])
FAULTY_NODES = Gauge("queuectl_faulty_nodes", "Nodes that are avoided for a fault.")
EXPORTER_FAILURES = Counter("queuectl_exporter_failures", "Exporters of GPUs' metrics that could not be read.")
TERMS_LOST = Counter("queuectl_terms_lost", "Terms of leadership that ended early, by cause.", ["cause"])


def forget() -> None:
    """Drop what only a leader knows, so that no two controllers tell of the same queue."""
    for number in (LEADING, SUSPECT, AVOIDED, FAULTY_NODES):
        number.set(0)
    for gauge in (SUSPECT_TIMES, PENDING, ACTIVE, QUOTA, USAGE, HISTORY, WAIT_REASONS, MAINTENANCE):
        gauge.clear()

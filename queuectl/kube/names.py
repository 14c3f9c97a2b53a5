"""Names that queuectl gives to things in the API server."""

GROUP = "queuectl.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
API = f"/apis/{GROUP}/{VERSION}"
DEVICES_API = "/apis/resource.k8s.io/v1"
EXTENDED_RESOURCE_CLAIM = "resource.kubernetes.io/extended-resource-claim"  # KEP-5004
GATE = f"{GROUP}/gang"
FINALIZER = f"{GROUP}/ledger"
CHANGED_BY = f"{GROUP}/changed-by"
CHANGE_WHY = f"{GROUP}/change-why"
PREEMPTIBLE = f"{GROUP}/preemptible"
SUBMITTED_BY = f"{GROUP}/submitted-by"
MOVE = f"{GROUP}/move"
MOVE_BY = f"{GROUP}/move-asked-by"
MOVE_REFUSED = f"{GROUP}/move-refused"
DEFAULT_QUEUE = f"{GROUP}/default-queue"
RESTRICTED_LABEL = f"{GROUP}/restricted"
ASK = f"{GROUP}/checkpoint-ask"  # of a pod: that it is to save its work
REPORT = f"{GROUP}/checkpoint"  # of a pod: what it has saved
FORGIVEN = f"{GROUP}/forgiven"  # of a node: when an admin forgave what had happened on it
SUSPECT = f"{GROUP}/Suspect"  # a condition of a node: gangs have met with something bad on it
SAVE_ASKED = f"{GROUP}/checkpoint-requested"  # of a job: when its user asked for a checkpoint
WORKLOAD_LABEL = f"{GROUP}/workload-uid"
ATTEMPT_LABEL = f"{GROUP}/attempt"
ROLE_LABEL = f"{GROUP}/role"
INDEX_LABEL = f"{GROUP}/index"
JOB_LABEL = f"{GROUP}/job"
QUEUE_LABEL = f"{GROUP}/queue"


def jobs_path(namespace: str = "", name: str = "") -> str:
    """Return the path of all TrainingJobs, those of a namespace, or one."""
    path = f"{API}/namespaces/{namespace}/trainingjobs" if namespace else f"{API}/trainingjobs"
    return f"{path}/{name}" if name else path


def pods_path(namespace: str = "", name: str = "") -> str:
    """Return the path of all pods, those of a namespace, or one."""
    path = f"/api/v1/namespaces/{namespace}/pods" if namespace else "/api/v1/pods"
    return f"{path}/{name}" if name else path


def claims_path(namespace: str = "", name: str = "") -> str:
    """Return the path of all ResourceClaims, those of a namespace, or one."""
    path = f"{DEVICES_API}/namespaces/{namespace}/resourceclaims" if namespace else f"{DEVICES_API}/resourceclaims"
    return f"{path}/{name}" if name else path


def slices_path() -> str:
    """Return the path of all ResourceSlices."""
    return f"{DEVICES_API}/resourceslices"


def pod_name(job: str, role: str, attempt: int, index: int) -> str:
    """Return the name of a gang's pod, the same for every try at creating it."""
    return f"{job}-{role}-{attempt}-{index}"

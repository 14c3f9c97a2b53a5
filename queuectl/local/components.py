"""The command line of each component, and the files that they share."""

import base64
import errno
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from queuectl.local.errors import LocalError

NAMES = ("etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager", "kwok")  # in order of start
AGENT = "agent"  # the node agent, where there are real nodes
STAGES = Path(__file__).parent / "stages"
_PORTS = range(20_000, 30_000)  # below the ephemeral ports: no client can hold one while its server is stopped
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


@dataclass(frozen=True, slots=True)
class Settings:
    """What a control plane keeps from its first start on."""

    token: str
    ports: Mapping[str, int]  # "etcd", "etcd-peer", "kube-apiserver"
    node_grace_seconds: int = 50
    evict_seconds: int = 300
    real_nodes: int = 0
    real_gpus: int = 8  # that each of these pretends to have
    flags: Mapping[str, list[str]] = field(default_factory=dict)  # more flags, by component

    @property
    def server(self) -> str:
        """The API server's address."""
        return f"https://127.0.0.1:{self.ports['kube-apiserver']}"

    @property
    def components(self) -> Sequence[str]:
        """What belongs to this control plane, in order of start."""
        return (*NAMES, AGENT) if self.real_nodes else NAMES

    @property
    def nodes(self) -> list[str]:
        """The names of the nodes that run pods as processes."""
        return [f"real-{number:04}" for number in range(1, self.real_nodes + 1)]


def command(name: str, program: Path, state: Path, settings: Settings) -> list[str]:
    """Return the whole command line of component `name`."""
    etcd = f"http://127.0.0.1:{settings.ports['etcd']}"
    peer = f"http://127.0.0.1:{settings.ports['etcd-peer']}"
    key = state / "service-account.key"
    client = [f"--kubeconfig={state / 'kubeconfig'}"]
    # One process each, so no election; no port of their own, so none to collide.
    controller = [*client, "--leader-elect=false", "--secure-port=0", "--kube-api-qps=1000", "--kube-api-burst=2000"]
    flags = {
        "etcd": [
            f"--data-dir={state / 'etcd'}",
            "--unsafe-no-fsync",  # the data is for trying out: speed over surviving a power cut
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--quota-backend-bytes=4294967296",
        ],
        "kube-apiserver": [
            f"--etcd-servers={etcd}",
            f"--cert-dir={state / 'certs'}",
            f"--secure-port={settings.ports['kube-apiserver']}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",  # else it looks for a default route, which a machine may not have
            "--endpoint-reconciler-type=none",  # loopback is no valid endpoint, and nothing needs one
            "--kubelet-preferred-address-types=InternalIP",  # no DNS knows the nodes' names
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--token-auth-file={state / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.0.0.0/24",
            # ServiceAccount refuses pods until the namespace's account exists; no simulated pod uses one.
            "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
            f"--default-not-ready-toleration-seconds={settings.evict_seconds}",
            f"--default-unreachable-toleration-seconds={settings.evict_seconds}",
            "--max-requests-inflight=3000",
            "--max-mutating-requests-inflight=1000",
        ],
        "kube-scheduler": controller,
        "kube-controller-manager": [
            *controller,
            f"--service-account-private-key-file={key}",
            f"--node-monitor-grace-period={settings.node_grace_seconds}s",
        ],
        "kwok": [
            *client,
            "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
            f"--node-lease-duration-seconds={settings.node_grace_seconds}",  # renewed four times in it
            "--node-ip=127.0.0.1",
            "--cidr=10.64.0.0/10",
            *(f"--config={stage}" for stage in sorted(STAGES.glob("*.yaml"))),
        ],
        AGENT: [
            "-m",
            "queuectl.local.agent",
            *client,
            f"--folder={state / AGENT}",
            f"--certificates={state / 'certs'}",
            f"--gpus={settings.real_gpus}",
            f"--lease-seconds={settings.node_grace_seconds}",
            *settings.nodes,
        ],
    }
    return [str(program), *flags[name], *settings.flags.get(name, [])]


def write_files(state: Path, settings: Settings) -> None:
    """Write the token file and the service account key, readable by this user alone."""
    write_private(state / "tokens.csv", f"{settings.token},admin,admin,system:masters\n")
    if not (state / "service-account.key").exists():
        write_private(state / "service-account.key", _new_key())


def write_kubeconfig(state: Path, settings: Settings, authority: str) -> None:
    """Write state/kubeconfig, which trusts only `authority` (PEM)."""
    name = "queuectl-local"
    cluster = {"server": settings.server, "certificate-authority-data": base64.b64encode(authority.encode()).decode()}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": cluster}],
        "users": [{"name": name, "user": {"token": settings.token}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "current-context": name,
    }
    write_private(state / "kubeconfig", yaml.safe_dump(config, sort_keys=False))


def new_ports() -> dict[str, int]:
    """Choose ports that are free now. Raises LocalError."""
    ports: dict[str, int] = {}
    for _ in range(200):
        port = secrets.choice(_PORTS)
        if port not in ports.values() and is_free(port):
            ports[("etcd", "etcd-peer", "kube-apiserver")[len(ports)]] = port
            if len(ports) == 3:  # noqa: PLR2004 - one for each name above
                return ports
    raise LocalError(f"No three free ports between {_PORTS.start} and {_PORTS.stop} on 127.0.0.1; end what holds them.")


def is_free(port: int) -> bool:
    """Whether 127.0.0.1:`port` can be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: what lingers in TIME_WAIT is free
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def write_private(path: Path, text: str) -> None:
    """Replace a file in one step; nobody else can read it at any moment."""
    scratch = path.with_name(f".{path.name}.new")
    scratch.unlink(missing_ok=True)
    scratch.touch(mode=0o600)
    scratch.write_text(text)
    scratch.replace(path)


def _new_key() -> str:
    """Make a P-256 private key as SEC1 PEM; its public half may be left out, readers compute it."""
    secret = (secrets.randbelow(_P256_ORDER - 1) + 1).to_bytes(32, "big")
    curve = bytes.fromhex("a00a06082a8648ce3d030107")  # [0] OBJECT IDENTIFIER prime256v1
    body = bytes.fromhex("0201010420") + secret + curve  # INTEGER 1, OCTET STRING of 32
    der = bytes([0x30, len(body)]) + body
    return f"-----BEGIN EC PRIVATE KEY-----\n{base64.encodebytes(der).decode()}-----END EC PRIVATE KEY-----\n"

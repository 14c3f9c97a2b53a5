"""Every setting of the controller, read once from the environment; flags of ``queuectl controller`` go before it."""

import os
import socket
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from queuectl.model.faults import CONDITIONS, HARDWARE_XIDS, FaultRules, condition
from queuectl.model.policy import FairRule


def _data_folder() -> Path:
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "queuectl"


def _identity() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


class Settings(BaseSettings):
    """Settings of one controller process. Times are in seconds."""

    model_config = SettingsConfigDict(env_prefix="QUEUECTL_", extra="forbid", frozen=True, populate_by_name=True)

    database_url: str = Field(
        "", validation_alias="DATABASE_URL", description="PostgreSQL >= 14 that holds the ledger."
    )
    data: Path = Field(default_factory=_data_folder, description="Folder of the embedded PostgreSQL.")
    kubeconfig: str = Field("", description="Path of the kubeconfig; default as for kubectl, then the service account.")
    identity: str = Field(default_factory=_identity, min_length=1, description="Name of this process as a candidate.")
    host: str = Field("127.0.0.1", description="Address of /healthz, /readyz and /metrics.")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(8080, description="Port of the same; 0 takes a free one.")
    lease_seconds: float = Field(
        6.0, ge=3, le=600, description="Time after its last renewal that a leader is replaced."
    )
    back_off_first: float = Field(10.0, gt=0, description="Pause before a gang is tried again, doubled each time.")
    back_off_longest: float = Field(360.0, gt=0, description="Longest such pause.")
    node_not_ready: float = Field(
        30.0, ge=0, description="Time for which gangs stay on a node that is not Ready, after that moment."
    )
    suspect_first: float = Field(
        600.0,
        ge=0,
        le=86400,
        description="Time for which no gang goes onto a node that did one harm, doubled each time"
        " in a row, at most a day. 0: nodes are never avoided for that.",
    )
    fair_sharing: Annotated[tuple[FairRule, ...], NoDecode] = Field(
        (),
        description="Rules of fair sharing in the order tried, with commas between them: LessThanOrEqualToFinalShare,"
        " LessThanInitialShare. Empty: shares don't matter.",
    )
    usage_half_life: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="With fair sharing: seconds after which past use counts half against a queue when it borrows; a week"
        " is 604800. 0: only present use counts.",
    )
    faulty_conditions: Annotated[tuple[str, ...], NoDecode] = Field(
        CONDITIONS,
        description="Conditions of nodes that mean a fault, as TYPE=STATUS with commas between them. Who runs on such a"
        " node leaves it once its work is saved.",
    )
    faulty_xids: Annotated[tuple[Annotated[int, Field(gt=0, lt=1000)], ...], NoDecode] = Field(
        tuple(HARDWARE_XIDS),
        description="XIDs of NVIDIA GPUs that mean a fault of their node, with commas between them; others are told to"
        " the job.",
    )
    fault_seconds: float = Field(
        3600.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds for which a node is avoided after such an XID, or for a failure that a job blames it for.",
    )
    exporter_namespace: str = Field(
        "gpu-operator", min_length=1, description="Namespace of the exporters that show the XIDs of GPUs."
    )
    exporter_labels: str = Field(
        "app=nvidia-dcgm-exporter", description="Label selector of the exporters' pods; empty: none is read."
    )
    exporter_seconds: float = Field(
        30.0, gt=0, le=3600, description="Pause between two readings of an exporter; longer where there are many."
    )
    log_format: str = Field(
        "auto", pattern="^(auto|json|console)$", description="auto: console on a terminal, else JSON."
    )

    @property
    def fault_rules(self) -> FaultRules:
        """What counts as a fault of a node."""
        return FaultRules(
            frozenset(map(condition, self.faulty_conditions)), frozenset(self.faulty_xids), self.fault_seconds
        )

    @field_validator("faulty_conditions")
    @classmethod
    def _check_conditions(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            condition(text)
        return value

    @field_validator("fair_sharing", "faulty_conditions", "faulty_xids", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

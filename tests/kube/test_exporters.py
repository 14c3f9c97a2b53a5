"""What exporters of GPUs' metrics show: which lines are read, and what of."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from queuectl.kube import decode, exporters
from queuectl.kube.exporters import exporter, xids
from queuectl.model.faults import Xid

LABELS = 'gpu="{gpu}",UUID="GPU-{gpu}",pci_bus_id="0:{gpu}",device="nvidia{gpu}",modelName="NVIDIA H100",Hostname="n"'
WHOSE = ',container="main",namespace="team",pod="llm-worker-1-0",pod_uid=""'


def shown(*lines: str) -> bytes:
    """Return what dcgm-exporter shows of eight healthy GPUs, and these lines."""
    text = []
    for name in ("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_XID_ERRORS"):
        text += [f"# HELP {name} What it is (in C).", f"# TYPE {name} gauge"]
        text += [f'{name}{{{LABELS.format(gpu=i)},err_code="0",err_msg="No Error"{WHOSE}}} 0' for i in range(8)]
    return "\n".join((*text, *lines, "")).encode()


def test_nothing_is_found_where_all_is_well() -> None:
    assert xids(shown()) == []
    assert xids(b"") == []


def test_errors_are_read_with_whose_gpu_it_is() -> None:
    gauge = f'DCGM_FI_DEV_XID_ERRORS{{{LABELS.format(gpu=3)},err_code="79",err_msg="GPU \\"3\\" is lost"{WHOSE}}} 79'
    count = f'DCGM_EXP_XID_ERRORS_COUNT{{{LABELS.format(gpu=2)},window_size_in_ms="300000",xid="31"}} 4'
    total = f'DCGM_EXP_XID_ERRORS_TOTAL{{{LABELS.format(gpu=2)},xid="31"}} 1.2e+01'
    none = f'DCGM_EXP_XID_ERRORS_COUNT{{{LABELS.format(gpu=1)},window_size_in_ms="300000"}} 0'
    assert xids(shown(gauge, count, total, none)) == [
        Xid("DCGM_FI_DEV_XID_ERRORS", "3", "GPU-3", 79, 1, "team/llm-worker-1-0"),
        Xid("DCGM_EXP_XID_ERRORS_COUNT", "2", "GPU-2", 31, 4),
        Xid("DCGM_EXP_XID_ERRORS_TOTAL", "2", "GPU-2", 31, 12),
    ]


def test_names_of_older_exporters_and_parts_of_gpus_are_known() -> None:
    line = (
        'DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="GPU-0",GPU_I_ID="7",pod_name="a",pod_namespace="b",container_name="c"} 43'
    )
    assert xids(shown(line)) == [Xid("DCGM_FI_DEV_XID_ERRORS", "0", "GPU-0 7", 43, 1, "b/a")]


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "9223372036854775794", "0.5"])
def test_values_that_stand_for_none_are_none(value: str) -> None:
    assert xids(shown(f'DCGM_FI_DEV_XID_ERRORS{{gpu="0"}} {value}')) == []
    assert xids(shown(f'DCGM_EXP_XID_ERRORS_COUNT{{gpu="0",xid="{value}"}} 3')) == []


@pytest.mark.parametrize("text", [b'DCGM_FI_DEV_XID_ERRORS{gpu="0" 79\n', b"DCGM_FI_DEV_XID_ERRORS{} high\n"])
def test_what_can_not_be_read_is_an_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        xids(text)


def test_no_exporter_may_show_more_than_there_can_be() -> None:
    with pytest.raises(ValueError, match="1001 errors of GPUs; at most 1000"):
        xids(b"".join(b'DCGM_FI_DEV_XID_ERRORS{gpu="%d"} 79\n' % i for i in range(1001)))


def pod(**status: Any) -> bytes:
    ports = [{"name": "health", "containerPort": 1}, {"name": "metrics", "containerPort": 9401}]
    spec = {"nodeName": "n", "containers": [{"name": "side"}, {"name": "main", "ports": ports}]}
    meta = {"name": "e", "namespace": "gpu-operator", "resourceVersion": "7"}
    return json.dumps({"metadata": meta, "spec": spec, "status": status}).encode()


def test_an_exporter_is_read_once_it_runs() -> None:
    there = exporter(pod(phase="Running", podIP="10.0.0.7")).value
    assert (there.node, there.url, there.runs) == ("n", "http://10.0.0.7:9401/metrics", True)
    assert exporter(pod(phase="Running", podIP="fd00::7")).value.url == "http://[fd00::7]:9401/metrics"
    assert not exporter(pod(phase="Pending")).value.runs
    plain = exporter(b'{"metadata": {"name": "e"}, "status": {"phase": "Running", "podIP": "10.0.0.7"}}').value
    assert plain.url == "http://10.0.0.7:9400/metrics"


def test_conditions_of_a_node_that_count_are_told() -> None:
    conditions = [
        {"type": "Ready", "status": "True", "message": "kubelet is posting ready status"},
        {"type": "XIDErrors", "status": "True", "message": "XID 79\n on GPU 3" + 300 * "!"},
        {"type": "AcceleratedHardwareReady", "status": "False"},
        {"type": "GPUMissing", "status": "False"},
    ]
    raw = json.dumps({"metadata": {"name": "n"}, "status": {"conditions": conditions}}).encode()
    assert decode.node(raw).value.faults == ()
    counted = {("XIDErrors", "True"), ("AcceleratedHardwareReady", "False"), ("GPUMissing", "True")}
    first, second = decode.node(raw, counted).value.faults
    assert first.startswith("condition XIDErrors is True: XID 79 on GPU 3!!!")
    assert len(first) < 240
    assert second == "condition AcceleratedHardwareReady is False"


async def _says_nothing(request: web.Request) -> web.StreamResponse:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


async def _never_ends(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"# HELP\n")
        await asyncio.sleep(0.01)


async def _is_endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"#" * 2**16)


@pytest.mark.parametrize("handler", [_says_nothing, _never_ends, _is_endless])
async def test_an_exporter_that_hangs_or_never_ends_is_given_up(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporters, "READ_SECONDS", 0.3)
    monkeypatch.setattr(exporters, "MAX_BYTES", 2**18)
    app = web.Application()
    app.router.add_get("/metrics", handler)
    async with TestServer(app) as server, exporters.Reader() as reader:
        with pytest.raises(exporters.UnreadableError):
            await reader.read(exporters.Exporter("n", "127.0.0.1", server.port or 0, runs=True))

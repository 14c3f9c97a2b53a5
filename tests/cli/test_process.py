"""The program itself: fast help, completion, exit codes, output on a terminal."""

import asyncio
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from queuectl.cli import docs
from queuectl.cli.errors import Exit
from tests.support.commands import Commands

HEAVY = {"kubernetes_asyncio", "sqlalchemy", "numpy", "msgspec", "queuectl.kube", "queuectl.store"}
BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]


def imported(*words: str, code: Exit = Exit.DONE, env: Mapping[str, str] = MappingProxyType({})) -> set[str]:
    """Return the modules that a command loads."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "queuectl", *words],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == code, done.stderr
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


def test_help_loads_nothing_heavy() -> None:
    assert not imported("--help") & (HEAVY | {"pydantic"})


@pytest.mark.parametrize("verb", ["submit", "get", "describe", "cancel", "hold", "release", "wait", "queues", "nodes"])
def test_a_verbs_help_loads_nothing_heavy_and_begins_with_examples(verb: str) -> None:
    assert not imported(verb, "--help") & HEAVY
    shown = subprocess.run([BIN / "queuectl", verb, "--help"], capture_output=True, text=True, check=True, timeout=180)
    assert "Usage: queuectl " + verb in shown.stdout
    assert shown.stdout.index("Examples:") < shown.stdout.index("Options:")


def test_a_look_at_a_cluster_loads_neither_the_generated_api_nor_the_controller(tmp_path: Path) -> None:
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],  # nobody answers
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    (tmp_path / "config").write_text(json.dumps(config), encoding="utf-8")
    loaded = imported("get", code=Exit.UNREACHABLE, env={"KUBECONFIG": str(tmp_path / "config")})
    assert "aiohttp" in loaded
    assert not loaded & {"kubernetes_asyncio.client.models", "sqlalchemy", "numpy", "structlog", "rich"}


def test_completion_loads_nothing_heavy() -> None:
    words = {"_QUEUECTL_COMPLETE": "complete_bash", "COMP_WORDS": "queuectl get --", "COMP_CWORD": "2"}
    assert not imported(env=words) & HEAVY


@pytest.mark.parametrize(
    ("words", "want", "directive"),
    [
        (["ge"], ["get\tList jobs."], 4),
        (["get", "--phase", "Run"], ["Running"], 4),
        (["get", "it's", "--phase", "Run"], ["Running"], 4),
        (["submit", "-f", ""], [], 0),
        (["get", ""], [], 4),
    ],
)
def test_kubectl_gets_candidates_and_a_directive(words: list[str], want: list[str], directive: int) -> None:
    done = subprocess.run(
        [BIN / "kubectl_complete-queuectl", *words], capture_output=True, text=True, check=True, timeout=180
    )
    assert done.stdout.splitlines() == [*want, f":{directive}"]


def test_as_a_plugin_it_calls_itself_so() -> None:
    done = subprocess.run(
        [BIN / "kubectl-queuectl", "get", "--help"], capture_output=True, text=True, check=True, timeout=180
    )
    assert done.stdout.startswith("Usage: kubectl queuectl get ")


def test_the_reference_page_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert docs.main("--check") == 0
    assert set(docs.EXIT_CODES) == set(Exit)


KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: x
contexts: [{name: x, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: u, user: {}}]
"""

UNUSABLE = {
    "nobody listens": (KUBECONFIG, [], "http://127.0.0.1:1"),
    "bad YAML": ("a: b: c", [], "can't be used: mapping values are not allowed here"),
    "not a mapping": ("just words", [], "can't be used"),
    "no contexts": ("apiVersion: v1\nkind: Config", [], "can't be used"),
    "no such context": (KUBECONFIG, ["--context", "y"], 'has no context "y"; those in it are x'),
}


@pytest.mark.parametrize("case", UNUSABLE)
async def test_a_cluster_that_cannot_be_reached(case: str, tmp_path: Path) -> None:
    text, words, told = UNUSABLE[case]
    file = tmp_path / "kubeconfig"
    file.write_text(text)
    done = await Commands(file)("get", *words, code=Exit.UNREACHABLE)
    assert done.err.startswith("queuectl: ")
    assert told in done.err
    assert len(done.err.splitlines()) == 1
    assert done.out == ""


async def test_an_empty_kubeconfig_is_none(tmp_path: Path) -> None:
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube" / "config").write_text(KUBECONFIG)
    done = await Commands(tmp_path)("get", env={"KUBECONFIG": "", "HOME": str(tmp_path)}, code=Exit.UNREACHABLE)
    assert "http://127.0.0.1:1" in done.err


async def test_a_setting_is_named_as_it_was_given(tmp_path: Path) -> None:
    queuectl = Commands(tmp_path)
    wrong = {"QUEUECTL_LEASE_SECONDS": "-1"}
    assert "QUEUECTL_LEASE_SECONDS: '-1': " in (await queuectl("controller", env=wrong, code=Exit.USAGE)).err
    assert (
        "QUEUECTL_FAULTY_CONDITIONS: "
        in (await queuectl("controller", env={"QUEUECTL_FAULTY_CONDITIONS": "x"}, code=Exit.USAGE)).err
    )


async def test_the_version_as_an_option(tmp_path: Path) -> None:
    queuectl = Commands(tmp_path)
    assert (await queuectl("--version")).out == (await queuectl("version")).out


async def test_a_kubeconfig_that_does_not_exist(tmp_path: Path) -> None:
    done = await Commands(tmp_path / "none")("get", code=Exit.UNREACHABLE)
    assert "doesn't exist; name one with --kubeconfig or $KUBECONFIG" in done.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["get", "--color"], "No such option: --color"),
        (["get", "-A", "llm"], "give names, or -A, not both"),
        (["get", "--phase", "Sleeping"], "'--phase': 'Sleeping' is not one of 'Pending'"),
        (["controller", "--port", "99999"], "queuectl: --port: 99999: Input should be less than"),
        (["wait", "llm", "--timeout", "soon"], '--timeout: "soon" is not a duration'),
        (["cancel"], "give the names of jobs, or --all, or -l"),
        (["cancel", "llm", "--all"], "give the names of jobs, or --all, or -l"),
        (["submit"], "Missing option"),
        (["submit", "-f", "no-such-file"], "no-such-file: No such file or directory; name a file, or -"),
        (["describe"], "Missing argument"),
        (["explain", "llm"], "No such command 'explain'. Did you mean 'describe'?"),
        (["delete", "llm"], "No such command 'delete'. Did you mean 'cancel'?"),
        (["node"], "No such command 'node'. Did you mean 'nodes'?"),
    ],
)
async def test_wrong_usage(words: list[str], told: str, cli: Commands) -> None:
    done = await cli(*words, code=Exit.USAGE)
    assert told in done.err
    assert done.out == ""


async def test_a_cluster_without_our_kinds(cli: Commands, tmp_path: Path) -> None:
    """Every path is unknown below a wrong prefix, as it is where the CRDs are missing."""
    file = tmp_path / "kubeconfig"
    file.write_text(re.sub(r"(server: \S+?)/?\"?$", r"\1/apis/apps", cli.kubeconfig.read_text(), flags=re.MULTILINE))
    done = await Commands(file)("queues", code=Exit.NOT_FOUND)
    assert "this cluster doesn't know queuectl's kinds; an admin installs them" in done.err


async def test_a_kubeconfig_with_wrong_credentials(cli: Commands, tmp_path: Path) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(re.sub(r"token: \S+", "token: wrong", cli.kubeconfig.read_text()))
    done = await Commands(file)("queues", code=Exit.REFUSED)
    assert "doesn't accept the kubeconfig's credentials" in done.err


async def on_terminal(cli: Commands, *words: str, columns: int, **env: str) -> str:
    """Return what a command prints on a terminal of that width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    plain = {key: value for key, value in os.environ.items() if key not in {"COLUMNS", "NO_COLOR"}}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "queuectl", *words),
        stdin=theirs,
        stdout=theirs,
        env=plain | {"KUBECONFIG": str(cli.kubeconfig), "TERM": "xterm"} | env,
    )
    os.close(theirs)
    read = asyncio.create_task(asyncio.to_thread(_all, ours))
    async with asyncio.timeout(180):
        assert await process.wait() == 0
        text = (await read).decode()
    os.close(ours)
    return text


def _all(terminal: int) -> bytes:
    text = b""
    while True:
        try:
            chunk = os.read(terminal, 65536)
        except OSError:  # how a terminal says that its other end was closed
            return text
        text += chunk


async def test_a_table_on_a_terminal_is_cut_to_its_width(cli: Commands) -> None:
    name = "a-queue-with-a-name-that-is-much-too-long-for-a-narrow-terminal"
    manifest = f"{{apiVersion: queuectl.dev/v1alpha1, kind: Queue, metadata: {{name: {name}}}, spec: {{}}}}"
    await cli("submit", "-f", "-", stdin=manifest)
    narrow = await on_terminal(cli, "queues", name, columns=60)
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in narrow.splitlines()]
    assert lines[0].startswith("NAME")
    assert all(len(line) <= 60 for line in lines)
    assert "…" in lines[1]
    assert "\x1b[" in narrow
    assert "\x1b[3" not in await on_terminal(cli, "queues", name, columns=60, NO_COLOR="1")
    assert name in await on_terminal(cli, "queues", name, "-o", "wide", columns=60)
    assert name in (await cli("queues", name)).out


def test_a_reader_that_has_seen_enough(cli: Commands) -> None:
    done = subprocess.run(
        f"{sys.executable} -m queuectl nodes -o json | true",
        shell=True,
        env=os.environ | {"KUBECONFIG": str(cli.kubeconfig)},
        capture_output=True,
        text=True,
        check=True,
        timeout=180,
    )
    assert done.stderr == ""

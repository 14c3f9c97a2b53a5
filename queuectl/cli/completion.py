"""Completion of ``kubectl queuectl``: kubectl runs ``kubectl_complete-queuectl`` with the words so far.

It expects candidates, one a line, with a tab before their description, then ``:`` and a directive of cobra's.
"""

import contextlib
import io
import os
import shlex
import sys

_FILES = 0  # let the shell complete file names
_NO_FILES = 4
_FILE_OPTIONS = {"-f", "--filename", "--kubeconfig"}


def run() -> None:
    """Print the candidates for the last of the arguments."""
    words = sys.argv[1:]
    if len(words) > 1 and words[-2] in _FILE_OPTIONS:
        sys.stdout.write(f":{_FILES}\n")
        return
    text = candidates(words)
    sys.stdout.write(text + f":{_NO_FILES}\n")


def candidates(words: list[str]) -> str:
    """Return the candidates by typer's own completion, in the form that it has for fish, which is cobra's."""
    from queuectl.cli.main import app

    done, last = words[:-1], words[-1] if words else ""
    os.environ |= {
        "_QUEUECTL_COMPLETE": "complete_fish",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_TYPER_COMPLETE_ARGS": shlex.join(["queuectl", *done]) + f" {last and shlex.quote(last)}",
    }
    found = io.StringIO()
    with contextlib.redirect_stdout(found), contextlib.suppress(SystemExit):
        app(prog_name="queuectl")
    return "".join(f"{line}\n" for line in found.getvalue().splitlines() if line)

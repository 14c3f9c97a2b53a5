"""The reference page of the command line, made from the commands themselves.

``python -m queuectl.cli.docs --write | --check``, in the repository's root.
"""

import re
import sys
from pathlib import Path

import typer
from typer.cli import get_docs_for_click

from queuectl.cli.errors import Exit
from queuectl.cli.main import app

PAGE = Path("docs/reference/cli.md")
_HEAD = "<!-- Generated from the code by `make generate`; change it there. -->\n\n"

EXIT_CODES = {
    Exit.DONE: "done",
    Exit.FAILED: "failed; also a `wait` for a job that failed without an exit code of its own",
    Exit.USAGE: "wrong usage: an unknown option, a file that can't be read",
    Exit.NOT_FOUND: "not found, or deleted while it was waited for",
    Exit.REFUSED: "refused: invalid, forbidden, or more than the queue's quota could ever hold",
    Exit.TIMED_OUT: "timed out waiting",
    Exit.UNMET: "what was asked about does not hold: a scenario differs from what it wants",
    Exit.UNREACHABLE: "API server or database unreachable, or no usable kubeconfig",
}


def page() -> str:
    """Return the page."""
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="queuectl")
    with context:
        text = get_docs_for_click(obj=command, ctx=context, name="queuectl", title="Command line")
    # The examples are a block of their own; \b is how the help text says so.
    text = re.sub(r"\x08?\n?Examples:\n((?:  .*\n)+)", _examples, text)
    codes = "\n".join(f"| {int(code)} | {meaning} |" for code, meaning in EXIT_CODES.items())
    return (
        f"{_HEAD}{text.strip()}\n\n## Exit codes\n\n| code | meaning |\n| --- | --- |\n{codes}\n\n"
        "`wait` and `submit --wait` exit with the job's own exit code when it has failed, which may be any of these.\n"
        "Interrupted by Ctrl-C, every command exits with 130.\n\n"
        "Data goes to standard output, everything else to standard error. `NO_COLOR` is honoured. Without a terminal,\n"
        "tables are plain aligned columns that are never cut, and `-` stands for an empty cell.\n"
    )


def _examples(match: "re.Match[str]") -> str:
    lines = "\n".join(line[2:] for line in match.group(1).splitlines())
    return f"```console\n{lines}\n```\n"


def main(mode: str) -> int:
    """Write the page or check that it is current; return the exit status."""
    text = page()
    if mode == "--write":
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        sys.stderr.write(f"{PAGE} is not current; run `make generate`\n")
        return 1
    return 0


if __name__ == "__main__":
    if sys.argv[1:] not in (["--write"], ["--check"]):
        sys.exit("usage: python -m queuectl.cli.docs --write | --check")
    sys.exit(main(sys.argv[1]))

"""``python -m queuectl``."""

from queuectl.cli.main import run

run()

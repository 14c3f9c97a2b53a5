"""``python -m tests.peer_cases FILE...``: a line per case that differs, then how many agree."""

import json
import sys
from pathlib import Path
from typing import Any

from tests.peer_cases import kai, kueue, volcano

DIFFERENCES = Path(__file__).parent / "data" / "differences.json"


def differing(cases: list[Any]) -> dict[str, str]:
    """Return case → how its outcome differs from what the peer's table says."""
    result = {}
    for case in cases:
        runner = volcano if "action" in case else kai if "cycles" in case else kueue
        got, want = runner.outcome(case), runner.expected(case)
        parts = [f"{key}: got {got[key]}, want {want[key]}" for key in want if got[key] != want[key]]
        if parts:
            result[case["name"]] = "; ".join(parts)
    return result


def main(files: list[str]) -> int:
    """Run the cases of files; return 1 when one differs that is not a deliberate difference."""
    deliberate = json.loads(DIFFERENCES.read_text(encoding="utf-8"))
    total = agreed = 0
    unexplained = False
    for file in files:
        cases = json.loads(Path(file).read_text(encoding="utf-8"))
        differ = differing(cases)
        total, agreed = total + len(cases), agreed + len(cases) - len(differ)
        for name, how in differ.items():
            reason = deliberate.get(name)
            unexplained = unexplained or reason is None
            print(f"{name}: {how}" + (f" (deliberate: {reason})" if reason else ""))  # noqa: T201
    print(f"{agreed} of {total} agree")  # noqa: T201
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Ask the training process in this container to save: `python -m queuectl.trainer`, as `checkpoint.exec.command`.

The process must take asks on QUEUECTL_CHECKPOINT_PORT. Prints its report and exits with 0 once it has saved, else prints
why not and exits with 1. QUEUECTL_ASK_ID and QUEUECTL_ASK_DEADLINE say what is asked; without them a minute is given.
"""

import http.client
import json
import os
import sys
import time

_SECONDS = 60.0


def main() -> int:
    """Ask; return the exit code."""
    now = time.time()
    port = os.environ.get("QUEUECTL_CHECKPOINT_PORT", "")
    try:
        deadline = float(os.environ.get("QUEUECTL_ASK_DEADLINE") or now + _SECONDS)
        host = os.environ.get("QUEUECTL_CHECKPOINT_ADDRESS") or "127.0.0.1"
        connection = http.client.HTTPConnection(host, int(port), timeout=max(deadline - now, 0.0) + 1.0)
        ask = {"id": os.environ.get("QUEUECTL_ASK_ID") or f"exec-{now}", "deadline": deadline}
        connection.request("POST", "/", json.dumps(ask))
        answer = connection.getresponse()
        text = answer.read().decode()
    except (OSError, ValueError, http.client.HTTPException) as error:
        sys.stderr.write(f"no answer on QUEUECTL_CHECKPOINT_PORT={port!r}: {error}\n")
        return 1
    (sys.stdout if answer.status == http.HTTPStatus.OK else sys.stderr).write(f"{text}\n")
    return 0 if answer.status == http.HTTPStatus.OK else 1


if __name__ == "__main__":
    sys.exit(main())

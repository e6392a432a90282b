"""The process between us and a launcher: it runs one command and is the parent of whatever the command leaves behind.

Started by name. It adopts orphans, so that ranks in sessions of their own, or whose launcher was killed, can be found
below it; when our end of its standard input closes, by our death too, it kills all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from pytest_distcompat import clock
from pytest_distcompat.launch.process import adopt_orphans, descendants, kill, reap_adopted


def main(path: str) -> None:
    """Run what the file says: ``command``, ``environment``, ``cwd``, and where ``output`` and ``status`` go."""
    wanted: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    adopt_orphans()
    threading.Thread(target=_until_let_go, daemon=True).start()
    status: dict[str, Any] = {"code": None, "problem": ""}
    child: subprocess.Popen[bytes] | None = None
    with Path(wanted["output"]).open("wb") as output:
        try:
            child = subprocess.Popen(
                wanted["command"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=wanted["environment"],
                cwd=wanted["cwd"],
                start_new_session=True,
            )
        except OSError as error:
            status["problem"] = str(error)
    while child is not None and child.poll() is None:
        reap_adopted(keep=[child.pid])
        clock.sleep(0.02)
    status["code"] = child.returncode if child is not None else None
    waiting = Path(f"{wanted['status']}.new")
    waiting.write_text(json.dumps({**status, "time": clock.now()}), encoding="utf-8")
    waiting.rename(wanted["status"])
    while True:
        reap_adopted(keep=())
        clock.sleep(0.05)


def _until_let_go() -> None:
    """Wait until nobody holds the other end of our input any more."""
    sys.stdin.buffer.read()
    kill(descendants(os.getpid()))
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])

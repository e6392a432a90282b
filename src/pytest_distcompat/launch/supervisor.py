"""Supervisor process of a foreign launcher, such as torchrun's command.

``hosting.Hosted`` starts it: ``python -m pytest_distcompat.launch.supervisor command.json``. It
runs the command of the file and adopts all processes that the command leaves behind. So ranks in
sessions of their own, or whose launcher was killed, are still its descendants. It kills all of them
when its standard input closes. pytest's process has the other end, so that happens even when pytest
is killed.

When the command has ended, it writes ``{"code": 1, "problem": ""}`` to a file, for ``Hosted``.
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
    """Run the command of a JSON file; stay until standard input closes.

    Args:
        path: The file. It has the ``command`` (a list), its ``environment`` and ``cwd``, the path
            for its ``output``, and the path for the ``status`` at its end.
    """
    text = Path(path).read_text(encoding="utf-8")
    request: dict[str, Any] = json.loads(text)
    adopt_orphans()
    threading.Thread(target=_kill_all_at_end_of_input, daemon=True).start()
    status: dict[str, Any] = {"code": None, "problem": ""}
    try:
        with Path(request["output"]).open("wb") as output:
            child = subprocess.Popen(
                request["command"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=request["environment"],
                cwd=request["cwd"],
                start_new_session=True,
            )
    except OSError as error:
        status["problem"] = str(error)
    else:
        while (code := child.poll()) is None:
            # ``Popen`` itself waits for the command.
            reap_adopted(keep=[child.pid])
            clock.sleep(0.02)
        status["code"] = code
    # Renamed, so that ``Hosted`` never reads a file that is half written.
    unfinished = Path(f"{request['status']}.new")
    unfinished.write_text(json.dumps(status), encoding="utf-8")
    unfinished.rename(request["status"])
    # Ranks may outlive their launcher. They stay descendants of this process until it is ended.
    while True:
        reap_adopted(keep=())
        clock.sleep(0.05)


def _kill_all_at_end_of_input() -> None:
    """Wait until the other end of standard input is closed, then kill all descendants and exit."""
    sys.stdin.buffer.read()
    kill(descendants(os.getpid()))
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])

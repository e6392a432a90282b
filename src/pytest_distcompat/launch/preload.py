"""Gets the fork server ready: imports the heavy modules, calls one function, checks that it may still be forked from.

A JSON file names the modules, the function (the pytest session is collected so) and the file to which the outcome
goes. The fork server must stay fit to fork: no CUDA context, no threads.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pytest_distcompat import clock
from pytest_distcompat.launch import randomness
from pytest_distcompat.launch.deepspeed_cpu import without_shared_memory
from pytest_distcompat.launch.process import native_threads
from pytest_distcompat.launch.request import extend_import_path

#: What each rank imports before it does anything: a tenth of a second each, if it is not here already.
_OF_EVERY_RANK = (
    "torch.distributed.elastic.multiprocessing.api",
    "multiprocessing.popen_forkserver",
    "multiprocessing.queues",
    "pytest_distcompat.launch.rank",
)

#: What ``call`` returned, for the ranks, which inherit it by fork.
collected: Any = None


def main(path: str) -> None:
    """Import, call, and write how it went."""
    global collected  # noqa: PLW0603 - a fork server hands things over by being forked
    wanted = json.loads(Path(path).read_text(encoding="utf-8"))
    began = clock.now()
    status: dict[str, Any] = {"missing": [], "unfit": "", "error": ""}
    extend_import_path(wanted["path"])
    # pytest's capture takes stderr away while it collects.
    log = os.dup(2)
    # Before our parent gives up and shows what we wrote.
    late = began + 0.9 * wanted["timeout"]
    for name in (*wanted["modules"], *_OF_EVERY_RANK):
        try:
            with _stack_written(late, log):
                importlib.import_module(name)
        except ImportError:
            # Not installed, or not for this torch: whoever needs it will say so better.
            status["missing"].append(name)
        except Exception:
            status["missing"].append(name)
            traceback.print_exc()
    threads = native_threads()
    before = randomness.states()
    try:
        if wanted["call"]:
            module, _, function = wanted["call"].partition(":")
            with _stack_written(late, log):
                collected = getattr(importlib.import_module(module), function)(wanted["payload"])
    except BaseException:  # a conftest may raise anything; the ranks will meet it again and report it
        status["error"] = traceback.format_exc()
    randomness.remember_seeds(before)
    if wanted["device"] == "cpu":
        without_shared_memory()
    # All that is here stays: no collection of a rank's has to look through it again. Some libraries collect at every turn,
    # and with torch, transformers and deepspeed in memory that is 0.4 s each time.
    gc.collect()
    gc.freeze()
    os.close(log)
    status["unfit"] = _unfit(threads)
    status["seconds"] = clock.now() - began
    waiting = Path(f"{wanted['status']}.new")
    waiting.write_text(json.dumps(status), encoding="utf-8")
    waiting.rename(wanted["status"])


@contextlib.contextmanager
def _stack_written(late: float, log: int) -> Iterator[None]:
    """Write to that file where this process is if the block lasts until ``late``.

    The thread that waits for that is gone after the block: a fork server must have none.
    """
    faulthandler.dump_traceback_later(max(0.1, late - clock.now()), file=log)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _unfit(threads_of_libraries: int) -> str:
    """Why this process must not be forked from, as one sentence; empty if it may."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "it initialised CUDA, which does not survive a fork"
    extra = native_threads() - threads_of_libraries
    if extra > 0:
        return f"it started {extra} thread{'s' if extra > 1 else ''}, which do not survive a fork and may hold locks"
    return ""

"""Gets the fork server ready: imports the heavy modules, calls one function, checks that it may still be forked from.

A ``Warmth`` names the modules and the function (the pytest session is collected so). The fork server must stay fit to fork: no
CUDA context, no threads, and nobody in it who knows which rank it is.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_distcompat import clock
from pytest_distcompat.launch import randomness
from pytest_distcompat.launch.deepspeed_cpu import without_shared_memory
from pytest_distcompat.launch.per_rank import asked_at_import
from pytest_distcompat.launch.process import native_threads
from pytest_distcompat.launch.request import extend_import_path

#: What each rank imports before it does anything: a tenth of a second each, if it is not here already. The launcher process
#: needs it too, and the fork server is forked from that.
_OF_EVERY_RANK = (
    "torch",
    "torch.distributed.elastic.multiprocessing.api",
    "multiprocessing.popen_forkserver",
    "multiprocessing.queues",
    "pytest_distcompat.launch.rank",
    "pytest_distcompat.launch.serving",
)

#: What ``call`` returned, for the ranks, which inherit it by fork.
collected: Any = None


def import_torch(late: float) -> None:
    """In the launcher process, before the fork server is forked; the others by ``late`` too."""
    _import(_OF_EVERY_RANK, late, 2)


def main(wanted: Mapping[str, Any], late: float) -> dict[str, Any]:
    """Import and call; how it went: why modules are ``missing``, why it is ``unfit`` to be forked from, the call's ``error``.

    ``wanted`` has the fields of a Warmth, and the ``device``. At ``late`` our parent is about to give up; what hangs is shown.
    """
    global collected  # noqa: PLW0603 - a fork server hands things over by being forked
    status: dict[str, Any] = {"missing": {}, "unfit": "", "error": ""}
    extend_import_path(wanted["path"])
    # pytest's capture takes stderr away while it collects.
    log = os.dup(2)
    with asked_at_import() as asked:
        status["missing"] = _import(wanted["modules"], late, log)
        _restart_threads_of_numpy()
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
    status["unfit"] = _unfit(threads, asked)
    return status


def _import(names: Sequence[str], late: float, log: int) -> dict[str, str]:
    """Import them; which could not be, and why."""
    missing = {}
    for name in names:
        try:
            with _stack_written(late, log):
                importlib.import_module(name)
        except ImportError as error:
            # Not installed, or not for this torch: whoever needs it will say so better.
            missing[name] = str(error)
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
    return missing


def _restart_threads_of_numpy() -> None:
    """OpenBLAS ends its threads at a fork, and starts them again for the first large product, as a module may have one: that
    would be counted as a thread of that module's. https://github.com/OpenMathLib/OpenBLAS/wiki/Faq
    """
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        square = numpy.ones((256, 256))
        square @ square


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


def _unfit(threads_of_libraries: int, asked: Sequence[str]) -> str:
    """Why this process must not be forked from, as one sentence; empty if it may."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "it initialised CUDA, which does not survive a fork"
    extra = native_threads() - threads_of_libraries
    if extra > 0:
        return f"it started {extra} thread{'s' if extra > 1 else ''}, which do not survive a fork and may hold locks"
    return asked[0] if asked else ""

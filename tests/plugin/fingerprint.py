"""A test that writes what its rank is like: all of a process that code could tell warm ranks from torchrun's by."""

import concurrent
import gc
import importlib
import json
import locale
import logging
import multiprocessing
import os
import resource
import signal
import sys
import threading
import types
import warnings
import xml
from pathlib import Path

import pytest
import torch

#: The packages whose submodules can be reached as attributes.
PACKAGES = (
    concurrent,
    importlib,
    logging,
    multiprocessing,
    torch,
    torch.distributed,
    torch.nn,
    torch.optim,
    torch.utils,
    xml,
)
#: Variables that have another value in each run, also of torchrun.
VOLATILE = (
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
    "PYTEST_CURRENT_TEST",
    "RECORDED_REPORTS",
    "TMPDIR",
)


def reachable(package: types.ModuleType) -> list[str]:
    """Return the submodules of a package that code reaches as its attributes."""
    return [name for name, value in vars(package).items() if isinstance(value, types.ModuleType)]


def limits() -> dict[str, tuple[int, int]]:
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {name: resource.getrlimit(getattr(resource, name)) for name in names}


def descriptors() -> list[str]:
    """Return what is open, each kind as often as it is; without numbers that each process has of its own."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            opened = str(link.readlink())
        except FileNotFoundError:  # the directory itself
            continue
        found.append(opened.partition(":[")[0] if ":[" in opened else Path(opened).name)
    return found


def handlers() -> dict[str, str]:
    return {
        one.name: getattr(signal.getsignal(one), "__qualname__", str(signal.getsignal(one))) for one in signal.Signals
    }


def main_module() -> dict[str, object]:
    main = sys.modules["__main__"]
    return {
        "file": Path(getattr(main, "__file__", None) or "none").parent.name,
        "spec": getattr(getattr(main, "__spec__", None), "name", None),
    }


def fingerprint(config: pytest.Config) -> dict[str, object]:
    """Return all as plain data. What is a list is compared as a set with counts."""
    here = str(Path(__file__).parent)
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    found: dict[str, object] = {f"modules of {one.__name__}": reachable(one) for one in PACKAGES}
    found["sys.path"] = " ".join(sys.path).replace(here, "HERE")
    found["sys.argv"] = " ".join(sys.argv)
    found["sys.orig_argv"] = " ".join(sys.orig_argv)
    found["sys.flags"] = str(sys.flags)
    found["sys.warnoptions"] = sys.warnoptions
    found["sys._xoptions"] = dict(sys._xoptions)
    found["sys.excepthook"] = sys.excepthook.__qualname__
    found["recursion limit"] = sys.getrecursionlimit()
    found["hooks"] = [str(sys.gettrace()), str(sys.getprofile()), str(threading.gettrace())]
    found["__main__"] = main_module()
    found["environment"] = {
        name: "" if name in VOLATILE else value.replace(here, "HERE") for name, value in os.environ.items()
    }
    found["working directory"] = Path.cwd() == Path(here)
    found["leads its session"] = os.getsid(0) == os.getpid()
    found["leads its group"] = os.getpgid(0) == os.getpid()
    found["multiprocessing"] = {
        "parent": str(multiprocessing.parent_process()),
        "name": multiprocessing.current_process().name,
        "daemon": multiprocessing.current_process().daemon,
        "start method": multiprocessing.get_start_method(allow_none=True),
        "children": len(multiprocessing.active_children()),
    }
    found["signal handlers"] = handlers()
    found["signal masks"] = {name: status[name] for name in ("SigBlk", "SigIgn", "SigCgt")}
    found["gc"] = {
        "enabled": gc.isenabled(),
        "threshold": gc.get_threshold(),
        "debug": gc.get_debug(),
        "callbacks": len(gc.callbacks),
    }
    found["gc freezes objects"] = gc.get_freeze_count() > 0
    found["umask"] = status["Umask"]
    found["limits"] = limits()
    found["descriptors"] = descriptors()
    found["threads"] = [thread.name for thread in threading.enumerate()]
    found["native threads"] = status["Threads"]
    found["locale"] = [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(False), sys.getfilesystemencoding()]
    found["warnings filters"] = [str(one) for one in warnings.filters]
    found["torch"] = {
        "threads": torch.get_num_threads(),
        "interop threads": torch.get_num_interop_threads(),
        "dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    found["hash seed"] = bool(sys.flags.hash_randomization)
    found["nice"] = os.nice(0)
    found["affinity"] = len(os.sched_getaffinity(0))
    found["streams"] = {name: type(getattr(sys, name)).__name__ for name in ("stdin", "stdout", "stderr")}
    found["logging"] = {
        "level": logging.getLogger().level,
        "handlers": [type(one).__name__ for one in logging.getLogger().handlers],
    }
    found["imported psutil"] = "psutil" in sys.modules
    parent = Path(f"/proc/{os.getppid()}/cmdline").read_text()
    found["parent"] = "torch.distributed.run" in parent
    found["meta path"] = [str(getattr(one, "__name__", type(one).__name__)) for one in sys.meta_path]
    found["terminal reporter"] = config.pluginmanager.hasplugin("terminalreporter")
    return found


@pytest.mark.distcompat(world_size=2)
def test_fingerprint(pytestconfig: pytest.Config) -> None:
    written = Path(__file__).with_name(f"rank-{os.environ['RANK']}.json")
    written.write_text(json.dumps(fingerprint(pytestconfig)))

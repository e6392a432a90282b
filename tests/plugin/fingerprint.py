"""A test that writes the state of its rank's process: all by which code could tell warm ranks from torchrun's."""

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
    """Return the kinds of open files, each as often as it is open, without numbers that differ in each process."""
    names = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            opened = str(link.readlink())
        except FileNotFoundError:  # the directory itself
            continue
        names.append(opened.partition(":[")[0] if ":[" in opened else Path(opened).name)
    return names


def handlers() -> dict[str, str]:
    """Return the handler of each signal, by the names of both."""
    names = {}
    for number in signal.Signals:
        handler = signal.getsignal(number)
        names[number.name] = getattr(handler, "__qualname__", str(handler))
    return names


def main_module() -> dict[str, object]:
    main = sys.modules["__main__"]
    return {
        "file": Path(getattr(main, "__file__", None) or "none").parent.name,
        "spec": getattr(getattr(main, "__spec__", None), "name", None),
    }


def fingerprint(config: pytest.Config) -> dict[str, object]:
    """Return all facts as plain data. Lists are compared without their order."""
    directory = str(Path(__file__).parent)
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    facts: dict[str, object] = {f"modules of {package.__name__}": reachable(package) for package in PACKAGES}
    facts["sys.path"] = " ".join(sys.path).replace(directory, "HERE")
    facts["sys.argv"] = " ".join(sys.argv)
    facts["sys.orig_argv"] = " ".join(sys.orig_argv)
    facts["sys.flags"] = str(sys.flags)
    facts["sys.warnoptions"] = sys.warnoptions
    facts["sys._xoptions"] = dict(sys._xoptions)
    facts["sys.excepthook"] = sys.excepthook.__qualname__
    facts["recursion limit"] = sys.getrecursionlimit()
    facts["hooks"] = [str(sys.gettrace()), str(sys.getprofile()), str(threading.gettrace())]
    facts["__main__"] = main_module()
    facts["environment"] = {
        name: "" if name in VOLATILE else value.replace(directory, "HERE") for name, value in os.environ.items()
    }
    facts["working directory"] = Path.cwd() == Path(directory)
    facts["leads its session"] = os.getsid(0) == os.getpid()
    facts["leads its group"] = os.getpgid(0) == os.getpid()
    facts["multiprocessing"] = {
        "parent": str(multiprocessing.parent_process()),
        "name": multiprocessing.current_process().name,
        "daemon": multiprocessing.current_process().daemon,
        "start method": multiprocessing.get_start_method(allow_none=True),
        "children": len(multiprocessing.active_children()),
    }
    facts["signal handlers"] = handlers()
    facts["signal masks"] = {name: status[name] for name in ("SigBlk", "SigIgn", "SigCgt")}
    facts["gc"] = {
        "enabled": gc.isenabled(),
        "threshold": gc.get_threshold(),
        "debug": gc.get_debug(),
        "callbacks": len(gc.callbacks),
    }
    facts["gc freezes objects"] = gc.get_freeze_count() > 0
    facts["umask"] = status["Umask"]
    facts["limits"] = limits()
    facts["descriptors"] = descriptors()
    facts["threads"] = [thread.name for thread in threading.enumerate()]
    facts["native threads"] = status["Threads"]
    facts["locale"] = [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(False), sys.getfilesystemencoding()]
    facts["warnings filters"] = [str(rule) for rule in warnings.filters]
    facts["torch"] = {
        "threads": torch.get_num_threads(),
        "interop threads": torch.get_num_interop_threads(),
        "dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    facts["hash seed"] = bool(sys.flags.hash_randomization)
    facts["nice"] = os.nice(0)
    facts["affinity"] = len(os.sched_getaffinity(0))
    facts["streams"] = {name: type(getattr(sys, name)).__name__ for name in ("stdin", "stdout", "stderr")}
    facts["logging"] = {
        "level": logging.getLogger().level,
        "handlers": [type(handler).__name__ for handler in logging.getLogger().handlers],
    }
    facts["imported psutil"] = "psutil" in sys.modules
    parent = Path(f"/proc/{os.getppid()}/cmdline").read_text()
    facts["parent"] = "torch.distributed.run" in parent
    facts["meta path"] = [str(getattr(finder, "__name__", type(finder).__name__)) for finder in sys.meta_path]
    facts["terminal reporter"] = config.pluginmanager.hasplugin("terminalreporter")
    return facts


@pytest.mark.distcompat(world_size=2)
def test_fingerprint(pytestconfig: pytest.Config) -> None:
    written = Path(__file__).with_name(f"rank-{os.environ['RANK']}.json")
    written.write_text(json.dumps(fingerprint(pytestconfig)))

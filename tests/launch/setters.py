"""Prints, as JSON, every function of the installed stack whose name says that it changes something for all of a process."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import re
import sys

#: What of the standard library has such functions; a test runs no terminal and no GUI.
STANDARD = (
    *(
        "asyncio",
        "atexit",
        "codecs",
        "copyreg",
        "csv",
        "ctypes",
        "decimal",
        "email.charset",
        "faulthandler",
        "gc",
        "locale",
    ),
    *(
        "logging",
        "mimetypes",
        "multiprocessing",
        "os",
        "random",
        "resource",
        "shutil",
        "signal",
        "socket",
        "sqlite3",
        "sys",
    ),
    *("threading", "tracemalloc", "unittest", "urllib.request", "warnings", "webbrowser", "xml.etree.ElementTree"),
)
#: What of torch and numpy is imported for it; all other public modules that come with them are walked too.
LIBRARIES = (
    *("torch", "torch.distributed", "torch.distributed.fsdp", "torch.utils.data", "torch.utils.checkpoint"),
    *("torch.distributions", "torch.compiler", "torch.nn.attention", "torch.cuda.tunable", "torch.monitor"),
    *("numpy", "numpy.polynomial", "numpy.random"),
)
SETTER = re.compile(
    r"(set|enable|disable|allow|use|register|unregister|add|remove|clear|install|override|patch)(_\w+|[a-z]+)?$"
)


def setters() -> list[str]:
    """Return their names, each function once, under the shortest name that it has."""
    for name in (*STANDARD, *LIBRARIES):
        importlib.import_module(name)
    public = (
        name
        for name in sys.modules
        if name in STANDARD or (name.partition(".")[0] in {"torch", "numpy"} and not re.search(r"(^|\.)_", name))
    )
    setter_by_name: dict[int, str] = {}
    for module in sorted(public, key=lambda name: (name.count("."), name)):
        for name in dir(sys.modules[module]):
            if not SETTER.match(name):
                continue
            value = getattr(sys.modules[module], name, None)
            if callable(value) and not inspect.isclass(value) and not inspect.ismodule(value):
                setter_by_name.setdefault(id(value), f"{module}.{name}")
    return sorted(setter_by_name.values())


if __name__ == "__main__":
    with contextlib.redirect_stdout(io.StringIO()):
        names = setters()
    print(json.dumps(names))

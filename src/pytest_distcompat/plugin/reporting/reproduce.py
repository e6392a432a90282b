"""The command line that runs one item again."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from pytest_distcompat.plugin.nodeids import strip_group
from pytest_distcompat.plugin.options import OPTIONS

#: Under what an xdist worker is told the arguments of the run: its own are options by value.
ARGUMENTS = "distcompat_arguments"
#: pytest's own options, with and without a value, that say which settings, plugins and filters an item has, and how it is
#: imported. What else was given selects or reports, or is of somebody's conftest.
_VALUED = (
    ("-c", "--config-file"),
    ("--rootdir",),
    ("--confcutdir",),
    ("--import-mode",),
    ("-p",),
    ("-o", "--override-ini"),
    ("-W", "--pythonwarnings"),
)
_BARE = ("--noconftest",)
#: Letters that may stand before one of those in one word: ``-qp plugin``.
_LETTERS = ("-l", "-q", "-s", "-v", "-x")
#: Ours that select or report.
_OF_THE_RUN = {
    "distcompat_report",
    "distcompat_baseline",
    "distcompat_strategies",
    "distcompat_precisions",
    "distcompat_drivers",
}


def command(config: pytest.Config, item: pytest.Function) -> str:
    """The command that runs that one item again, as it was run, from the same directory."""
    here = config.invocation_params.dir
    _, _, inside = strip_group(config, item.nodeid).partition("::")
    flags = [
        f"{option.flag}={config.getoption(name)}"
        for name, option in OPTIONS.items()
        if name not in _OF_THE_RUN and config.getoption(name) is not None
    ]
    flags += _of_pytest(config)
    # A node id is relative to the root directory, which need not be where pytest was started. And a module given by
    # its import name may lie anywhere.
    paths = any((here / argument.partition("::")[0]).exists() for argument in config.args)
    if config.getoption("pyargs") and not paths:
        return shlex.join(["pytest", "--pyargs", f"{item.module.__name__}::{inside}", *flags])
    return shlex.join(["pytest", f"{os.path.relpath(item.path, here)}::{inside}", *flags])


def tell_worker(node: Any) -> None:
    """Have xdist's worker know what was given on the command line."""
    node.workerinput[ARGUMENTS] = [str(argument) for argument in node.config.invocation_params.args]


def _of_pytest(config: pytest.Config) -> Iterator[str]:
    """Those options of pytest's own, as the command line has them: what addopts says holds anyway."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for names in _VALUED:
        parser.add_argument(*names, dest=names[0], action="append", default=[])
    for name in (*_BARE, *_LETTERS):
        parser.add_argument(name, dest=name, action="store_true")
    given = getattr(config, "workerinput", {}).get(ARGUMENTS, config.invocation_params.args)
    found = vars(parser.parse_known_args([str(argument) for argument in given])[0])
    for flag, *_ in _VALUED:
        for value in found[flag]:
            if flag == "-p" and value.startswith("no:"):
                # Mostly a plugin that orders, caches or colours.
                continue
            yield from (flag, value) if len(flag) == 2 else (f"{flag}={value}",)
    yield from (name for name in _BARE if found[name])

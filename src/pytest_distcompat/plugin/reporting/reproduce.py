"""Command line that runs one item again."""

from __future__ import annotations

import argparse
import functools
import os
import shlex
from collections.abc import Iterator

import pytest

from pytest_distcompat.plugin.options import options_of
from pytest_distcompat.plugin.selection import strip_group

#: The key of ``workerinput`` with the arguments of the controller: a worker itself gets its options as values.
ARGUMENTS = "distcompat_arguments"
#: pytest's own options, with and without a value, that set configuration, plugins and warning filters, or how modules are
#: imported. All others select tests, report, or belong to a conftest.
_WITH_VALUE = (
    ("-c", "--config-file"),
    ("--rootdir",),
    ("--confcutdir",),
    ("--import-mode",),
    ("-p",),
    ("-o", "--override-ini"),
    ("-W", "--pythonwarnings"),
)
_FLAGS = ("--noconftest",)
#: One-letter flags that may be joined with one of those: ``-qp plugin``.
_JOINABLE_FLAGS = ("-l", "-q", "-s", "-v", "-x")
#: This plugin's own options that select tests or report.
_LEFT_OUT = {f"distcompat_{name}" for name in ("report", "baseline", "budget", "shard", "strategies", "drivers")}
#: In a suite it also decides in which of several cells of a strategy the profile runs a check.
_PRECISIONS = {"distcompat_precisions"}


def command(config: pytest.Config, item: pytest.Function) -> str:
    """Return the command that runs that item alone again with the same options, from the same directory."""
    start = config.invocation_params.dir
    _, _, inside = strip_group(config, item.nodeid).partition("::")
    left_out = _LEFT_OUT | _PRECISIONS if item.get_closest_marker("distcompat") else _LEFT_OUT
    flags = [
        f"{option.flag}={config.getoption(name)}"
        for name, option in options_of(config).items()
        if name not in left_out and config.getoption(name) is not None
    ]
    flags += _pytest_flags(config)
    # A node id is relative to the root directory, but the command to where pytest was started. A module given by its
    # import name (--pyargs) may be anywhere.
    paths = any((start / argument.partition("::")[0]).exists() for argument in config.args)
    if config.getoption("pyargs") and not paths:
        return shlex.join(["pytest", "--pyargs", f"{item.module.__name__}::{inside}", *flags])
    return shlex.join(["pytest", f"{os.path.relpath(item.path, start)}::{inside}", *flags])


@functools.lru_cache(maxsize=1)
def _pytest_flags(config: pytest.Config) -> tuple[str, ...]:
    """Return pytest's own options from the command line. Cached, since every verdict has the command."""
    return tuple(_own_flags(config))


def _own_flags(config: pytest.Config) -> Iterator[str]:
    """Yield pytest's own options from the command line; those of addopts apply to the new command anyway."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for names in _WITH_VALUE:
        parser.add_argument(*names, dest=names[0], action="append", default=[])
    for name in (*_FLAGS, *_JOINABLE_FLAGS):
        parser.add_argument(name, dest=name, action="store_true")
    given = getattr(config, "workerinput", {}).get(ARGUMENTS, config.invocation_params.args)
    parsed = vars(parser.parse_known_args([str(argument) for argument in given])[0])
    for flag, *_ in _WITH_VALUE:
        for value in parsed[flag]:
            if flag == "-p" and value.startswith("no:"):
                # Mostly a plugin that changes order, cache or colours, which does not matter for one item.
                continue
            yield from (flag, value) if len(flag) == 2 else (f"{flag}={value}",)
    yield from (name for name in _FLAGS if parsed[name])

"""Command line that runs one item again, as it is shown below each failure.

``DistcompatSession.reproduce`` calls ``command``, for marked tests and for items of suites. For
example ``pytest 'tests/test_a.py::TestA::test[ddp-fp32-w2:names]' --distcompat-timeout=20 -p
my_plugin``. Of the user's command line it repeats only what a single item needs: this plugin's
options, and those of pytest that set configuration and plugins. Options that select tests or write
reports are left out. Settings in ini files apply to the new command anyway.
"""

from __future__ import annotations

import argparse
import functools
import os
import shlex
from collections.abc import Iterator

import pytest

from pytest_distcompat.plugin.options import options_of
from pytest_distcompat.plugin.selection import strip_group

#: The key of ``workerinput`` with the command line's arguments. xdist gives that dictionary to each
#: of its workers; a worker gets its options as values and has no command line.
ARGUMENTS = "distcompat_arguments"
#: pytest's own options with a value that set configuration, plugins and warning filters, or how
#: modules are imported: the names of each. All other options select tests, report, or belong to a
#: conftest.
_WITH_VALUE = (
    ("-c", "--config-file"),
    ("--rootdir",),
    ("--confcutdir",),
    ("--import-mode",),
    ("-p",),
    ("-o", "--override-ini"),
    ("-W", "--pythonwarnings"),
)
#: Those without a value.
_FLAGS = ("--noconftest",)
#: One-letter flags that may be joined with one of those: ``-qp plugin``.
_JOINABLE_FLAGS = ("-l", "-q", "-s", "-v", "-x")
#: This plugin's own options that select tests or report, by their ini keys.
_LEFT_OUT = {
    f"distcompat_{name}"
    for name in ("report", "baseline", "budget", "shard", "strategies", "drivers")
}
#: A further one for tests with the mark ``distcompat``. For items of suites the option must stay:
#: it also decides in which of several cells of a strategy the profile runs a check.
_PRECISIONS = {"distcompat_precisions"}


def command(config: pytest.Config, item: pytest.Function) -> str:
    """Return the command that runs that item alone again, from the directory of this session."""
    # With --pyargs the user names modules, as ``pytest_distcompat.suite``, and not paths.
    if config.getoption("pyargs") and not _names_paths(config):
        place = _place_in_module(config, item)
        arguments = ["--pyargs", f"{item.module.__name__}::{place}"]
    else:
        # A node id is relative to the root directory, but the command to where pytest was started.
        path = os.path.relpath(item.path, config.invocation_params.dir)
        arguments = [f"{path}::{_place_in_module(config, item)}"]
    arguments += _our_flags(config, item)
    arguments += _pytest_flags(config)
    return shlex.join(["pytest", *arguments])


def _place_in_module(config: pytest.Config, item: pytest.Function) -> str:
    """Return the part of a node id after the module: class, function, parameters.

    ``strip_group`` removes the ``@group`` that xdist appends with ``--dist loadgroup``.
    """
    _, _, place = strip_group(config, item.nodeid).partition("::")
    return place


def _names_paths(config: pytest.Config) -> bool:
    """Tell whether any of the arguments is a path that exists.

    With ``--pyargs`` an argument may be either: a path, or a module that may be anywhere.
    """
    start = config.invocation_params.dir
    for argument in config.args:
        path, _, _ = argument.partition("::")
        if (start / path).exists():
            return True
    return False


def _our_flags(config: pytest.Config, item: pytest.Function) -> Iterator[str]:
    """Yield this plugin's own options from the command line, as ``--distcompat-timeout=20``.

    Those that select tests or report are left out.
    """
    left_out = _LEFT_OUT
    if item.get_closest_marker("distcompat"):
        left_out = _LEFT_OUT | _PRECISIONS
    for name, option in options_of(config).items():
        value = config.getoption(name)
        if name not in left_out and value is not None:
            yield f"{option.flag}={value}"


@functools.lru_cache(maxsize=1)
def _pytest_flags(config: pytest.Config) -> tuple[str, ...]:
    """Return pytest's own options from the command line, as ``("-p", "my_plugin")``.

    Cached, since every verdict has the command.
    """
    return tuple(_read_pytest_flags(config))


def _read_pytest_flags(config: pytest.Config) -> Iterator[str]:
    """Yield pytest's own options from the command line.

    They are parsed from the arguments, and not taken from ``config.option``: that also has those of
    ``addopts``, which apply to the new command anyway.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for names in _WITH_VALUE:
        parser.add_argument(*names, dest=names[0], action="append", default=[])
    for name in (*_FLAGS, *_JOINABLE_FLAGS):
        parser.add_argument(name, dest=name, action="store_true")
    # Only a worker of xdist has it.
    workerinput = getattr(config, "workerinput", {})
    given = workerinput.get(ARGUMENTS, config.invocation_params.args)
    namespace, _ = parser.parse_known_args([str(argument) for argument in given])
    parsed = vars(namespace)
    for flag, *_ in _WITH_VALUE:
        for value in parsed[flag]:
            if flag == "-p" and value.startswith("no:"):
                # Mostly a plugin that changes order, cache or colours, which does not matter for
                # one item.
                continue
            # Short options are written as two arguments.
            if len(flag) == 2:
                yield flag
                yield value
            else:
                yield f"{flag}={value}"
    for name in _FLAGS:
        if parsed[name]:
            yield name

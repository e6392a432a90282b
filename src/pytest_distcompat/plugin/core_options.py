"""The options of the core: ``OPTIONS``, with the parsers that only they use.

``plugin.options`` registers them with pytest and reads them. Each parser gets the text of an option
and returns its value, or raises UsageProblem with the allowed values. That of an option whose
metavar begins with ``FILE`` also gets the directory that relative paths start from, as ``base``.

Words in the help texts: a *suite* is a subclass of ``CompatSuite``, which tests a *driver* (a
trainer) in many *cells*, configurations such as ``fsdp2-fp32-w2`` (strategy, precision, 2 ranks). A
*rank* is a process of a torchrun process group, a *run* is such a group from start to end.

Every session imports this module, so that it imports other modules of the package in functions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.plugin.option import Option, choice, count, number
from pytest_distcompat.plugin.shard import read_shard
from pytest_distcompat.plugin.suite.budget import read_budget

#: The parser of a time limit: ``"300"`` becomes ``300.0``.
_seconds = number("a number of seconds above 0", lambda value: 0 < value < math.inf)


def _names(registry: str) -> Callable[[str], tuple[str, ...]]:
    """Return a parser for names that are separated by commas or white space.

    ``ddp, fsdp2`` becomes ``("ddp", "fsdp2")``. An empty text becomes an empty tuple: all names.

    Args:
        registry: What the names are of: ``strategies``, ``precisions`` or ``drivers``.
    """

    def read(text: str) -> tuple[str, ...]:
        from pytest_distcompat.drivers import find_driver
        from pytest_distcompat.precisions import PRECISIONS
        from pytest_distcompat.strategies import STRATEGIES

        # Called only because each function raises UsageProblem for a name that is not known.
        find: Mapping[str, Callable[[str], object]] = {
            "strategies": STRATEGIES.get,
            "precisions": PRECISIONS.get,
            "drivers": find_driver,
        }
        names = _split(text)
        for name in names:
            find[registry](name)
        # Each once, in order.
        return tuple(dict.fromkeys(names))

    return read


def _split(text: str) -> list[str]:
    """Return the words of a list, which commas or white space separate."""
    return text.replace(",", " ").split()


def _profile(text: str) -> str:
    """Return the text if it is the name of a profile, which selects the cells of each suite.

    Extensions add profiles. They are loaded only for a name that the core does not know.
    """
    from pytest_distcompat.profiles import PROFILES, all_profiles

    if text in PROFILES:
        return text
    return choice(*all_profiles())(text)


def _known(text: str, base: Path) -> Any:
    """Return a tuple of ``KnownIssue``, each a bug that is expected, from a list of TOML files.

    The type is not in the signature: its module is imported only if there are files.
    """
    from pytest_distcompat.known import read_file

    issues: list[Any] = []
    for name in _split(text):
        issues += read_file(base / name)
    return tuple(issues)


#: The parser of a fraction, which may be above 1.
_positive = number("a number above 0, as 0.9", lambda value: 0 < value < math.inf)


def _part(text: str) -> float:
    """Return a number above 0, or 0 for an empty text: no limit."""
    if not text:
        return 0.0
    return _positive(text)


def _report(text: str, base: Path) -> tuple[Path, ...]:
    """Return the paths of report files, one for each line of the text.

    Everything that would make them impossible to write is an error now, not after the tests.
    """
    from pytest_distcompat.report.write import FORMATS

    paths = []
    # Each line once.
    for line in dict.fromkeys(text.splitlines()):
        if line.strip():
            paths.append(base / line.strip())
    for path in paths:
        if path.suffix not in FORMATS:
            raise UsageProblem(
                f"{str(path)!r}: the suffix says the format. Known: {', '.join(FORMATS)}."
            )
        directory = path.absolute().parent
        if not directory.is_dir():
            raise UsageProblem(f"{str(path)!r}: there is no directory {directory}.")
        if path.is_dir():
            raise UsageProblem(f"{str(path)!r} is a directory; expected a file.")
    return tuple(paths)


def _baseline(text: str, base: Path) -> Any:
    """Return the ``Report`` that the session is compared with; None for an empty text."""
    if not text:
        return None
    return _read_report((base / text).absolute())


@functools.cache
def _read_report(path: Path) -> Any:
    """Read a report. Cached: this session may write to the same file at its end."""
    from pytest_distcompat.report.document import Report

    return Report.read(path)


#: The options of the core, in the order of ``--help``: short name, metavar, default, parser, help.
#: ``gpus`` is ``--distcompat-gpus``. A help begins with a verb and names the unit and the default,
#: in the terms of docs/architecture.md.
_ALL = (
    Option(
        "gpus",
        "N|auto|0",
        "auto",
        count(least=0, keywords=("auto",)),
        "Use N of the visible GPUs; more than there are is an error. "
        "auto: all, or the CPU where there are none. 0: the CPU.",
    ),
    Option(
        "world_size",
        "N",
        "auto",
        count(least=1, keywords=("auto",)),
        "Start N ranks where a test does not say how many. auto: one a GPU, 2 on the CPU.",
    ),
    Option(
        "ranks_per_gpu",
        "N|auto",
        "auto",
        count(least=1, keywords=("auto",)),
        "Let up to N ranks share a GPU, above 1 those of several runs too. "
        "auto: 2 of a run on one GPU if NCCL can, else 1.",
        alias="oversubscribe",
    ),
    Option(
        "strategies",
        "NAMES",
        "",
        _names("strategies"),
        "Run only these strategies of each suite's matrix (default: all).",
    ),
    Option(
        "precisions",
        "NAMES",
        "",
        _names("precisions"),
        "Run only these precisions of each suite's matrix (default: all).",
    ),
    Option(
        "drivers",
        "NAMES",
        "",
        _names("drivers"),
        "Run only suites of these drivers, by name or module:attribute (default: all).",
    ),
    Option(
        "profile",
        "smoke|default|pairwise|sweep|zoo|full",
        "default",
        _profile,
        "Run so many cells of each suite: "
        "each strategy once, its matrix, a covering array of pairs, every option.",
    ),
    Option(
        "budget",
        "TIME[@SEED]",
        "",
        read_budget,
        "Start no further cell after this time (90s, 20m, 2h). "
        "First come those that never ran or were red in the last report, "
        "then all others in the order of the seed, another one each day (default: no limit).",
    ),
    Option(
        "shard",
        "I/N",
        "",
        read_shard,
        "Run only part I of N of the tests, of equal duration by the baseline, "
        "else of equal number; cells stay whole (default: all).",
    ),
    Option(
        "known",
        "FILES",
        "",
        _known,
        "Read known issues from these TOML files too, beside those that come with the package.",
    ),
    Option(
        "throughput",
        "PART",
        "",
        _part,
        "Fail a cell whose tokens/s per rank fall below this fraction of the baseline strategy's "
        "(default: no limit).",
    ),
    Option(
        "timeout",
        "SECONDS",
        "300",
        _seconds,
        "End a run that takes longer than this; "
        "imports of the fork server do not count (default: 300).",
    ),
    Option(
        "warm_timeout",
        "SECONDS",
        "600",
        _seconds,
        "Fail if the fork server, or collecting in it, imports longer than this (default: 600).",
    ),
    Option(
        "report",
        "FILE",
        "",
        _report,
        "Write the verdicts of all suites to this file: .json, .html, .md, or .txt for a chat. "
        "May be given several times.",
        repeated=True,
    ),
    Option(
        "baseline",
        "FILE",
        "",
        _baseline,
        "Compare with this earlier .json report: "
        "only what is newly broken or newly missing makes the run fail.",
    ),
    Option(
        "launcher",
        "warm|torchrun",
        "warm",
        choice("warm", "torchrun"),
        "Start ranks by torchrun's agent on a warm fork server, or by the cold torchrun command "
        "(default: warm).",
    ),
    Option(
        "verify",
        "PERCENT",
        "0",
        number("a number from 0 to 100", lambda value: 0 <= value <= 100),
        "Run this share of all tests and checks a second time under cold torchrun, "
        "another one each day, and fail where the verdicts differ (default: 0).",
    ),
    Option(
        "nothing_ran",
        "fail|pass",
        "fail",
        choice("fail", "pass"),
        "Fail or pass a session in which suites were collected and none of their cells ran "
        "(default: fail).",
    ),
)
#: The options of the core, by the name of their ini key, as ``distcompat_timeout``.
OPTIONS: dict[str, Option] = {option.name: option for option in _ALL}

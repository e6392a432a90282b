"""Options of the plugin, from the command line, ini file or default, in that order.

``pytest_addoption`` calls ``add``, which registers the options of the core (``OPTIONS``) and those
of extensions. All other modules read them by ``setting(config, "distcompat_timeout")``, mostly
through ``DistcompatSession.setting("timeout")``. Each option is a text first, as ``"300"``, whose
``Option.read`` returns the value, here ``300.0``. Each can be given in three ways::

    pytest --distcompat-timeout=300      # the command line
    distcompat_timeout = 300             # an ini key, in pyproject.toml or pytest.ini
                                         # neither: Option.default

Every session imports this module, so that it imports other modules of the package in functions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.plugin.shard import read_shard
from pytest_distcompat.plugin.suite.budget import read_budget
from pytest_distcompat.user_input import LARGEST_COUNT


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Option:
    """An option and the ini key of the same name, ``distcompat_<short>``.

    Attributes:
        short: The name without the prefix, as ``world_size``.
        metavar: What stands for the value in ``--help``, as ``N|auto``.
        default: The text that counts if nothing is set, as ``auto``.
        read: Parses the text of the option, or raises UsageProblem with the allowed values. For an
            option whose ``metavar`` begins with ``FILE`` its second argument is the directory that
            relative paths start from.
        help: What pytest's ``--help`` says of it.
        repeated: Whether the option may be given several times; its text then has one line for
            each.
        alias: Another short name, which works as well; empty for none.
    """

    short: str
    metavar: str
    default: str
    read: Callable[..., Any]
    help: str
    repeated: bool = False
    alias: str = ""

    @property
    def name(self) -> str:
        """The ini key."""
        return f"distcompat_{self.short}"

    @property
    def names(self) -> tuple[str, ...]:
        """The ini keys that set the option, its own first."""
        if not self.alias:
            return (self.name,)
        return (self.name, f"distcompat_{self.alias}")

    @property
    def flag(self) -> str:
        """The option as it is written on the command line."""
        return _flag(self.name)

    @property
    def flags(self) -> tuple[str, ...]:
        """All names of the option on the command line, its own first."""
        return tuple([_flag(name) for name in self.names])


@dataclass(frozen=True)
class Setting:
    """The effective value of an option, and where it was set.

    Attributes:
        value: What ``Option.read`` returned, as ``300.0``.
        text: The text for messages, as ``300``; several values are separated by commas.
        origin: ``option`` (the command line), ``ini`` or ``default``.
    """

    value: Any
    text: str
    origin: str


# Parsers, for ``Option.read``: each returns the value of an option's text, or raises UsageProblem
# with the allowed values. Functions without an underscore are for extensions too.


def choice(*allowed: str) -> Callable[[str], str]:
    """Return a parser for one of these words."""

    def read(text: str) -> str:
        if text not in allowed:
            raise UsageProblem(f"no such value: {text!r}. Known: {', '.join(allowed)}.")
        return text

    return read


def count(*, least: int, keywords: tuple[str, ...] = ()) -> Callable[[str], int | str]:
    """Return a parser for a whole number of at least ``least``, or one of the keywords."""

    def read(text: str) -> int | str:
        if text in keywords:
            return text
        if text.isdecimal() and _exceeds_largest_count(text):
            raise UsageProblem(f"{text[:20]!r} is too large: expected at most {LARGEST_COUNT}.")
        if not text.isdecimal() or int(text) < least:
            also = "".join([f", or {keyword!r}" for keyword in keywords])
            raise UsageProblem(
                f"{text!r} is not right: expected a whole number of at least {least}{also}."
            )
        return int(text)

    return read


def _exceeds_largest_count(digits: str) -> bool:
    # ``int`` refuses thousands of digits by an error of its own.
    return len(digits) > len(str(LARGEST_COUNT)) or int(digits) > LARGEST_COUNT


def _number(expected: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """Return a parser for a number.

    Args:
        expected: Says in words which numbers are right, as ``a number above 0``.
        fits: Tells whether a number is right. It gets NaN for a text that is no number.
    """

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not fits(number):
            raise UsageProblem(f"{text!r} is not right: expected {expected}.")
        return number

    return read


_seconds = _number("a number of seconds above 0", lambda number: 0 < number < math.inf)


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

        # Each function raises UsageProblem for a name that is not known.
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
    """Return the name of a profile, which selects the cells of each suite.

    Extensions add profiles. They are loaded only for a name that the core does not know.
    """
    from pytest_distcompat.profiles import PROFILES, all_profiles

    if text in PROFILES:
        return text
    return choice(*all_profiles())(text)


def _known(text: str, base: Path) -> Any:
    """Return the ``KnownIssue`` of all TOML files in the list, each a bug that is expected."""
    from pytest_distcompat.known import read_file

    issues: list[Any] = []
    for name in _split(text):
        issues += read_file(base / name)
    return tuple(issues)


_positive = _number("a number above 0, as 0.9", lambda number: 0 < number < math.inf)


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
    """Return the report that the session is compared with; None for an empty text."""
    if not text:
        return None
    return _read_report((base / text).absolute())


@functools.cache
def _read_report(path: Path) -> Any:
    """Read a report. Cached: this session may write to the same file at its end."""
    from pytest_distcompat.report.document import Report

    return Report.read(path)


#: The options of the core, in the order of ``--help``: short name, metavar, default, parser, help.
#: A help begins with a verb and names the unit and the default, in the terms of
#: docs/architecture.md.
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
        _number("a number from 0 to 100", lambda number: 0 <= number <= 100),
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
#: The name under which pytest's plugin manager has the ``RegisteredOptions``.
_REGISTERED = "distcompat-options"


@dataclass(eq=False)
class RegisteredOptions:
    """The options of one pytest process: those of the core, and those of its extensions.

    It is registered as a plugin without hooks, because the plugin manager is all that
    ``pytest_addoption`` and later hooks have in common.
    """

    parser: pytest.Parser
    #: The options by the name of their ini key.
    by_name: dict[str, Option] = field(default_factory=dict)

    def add(self, options: Iterable[Option]) -> None:
        """Register options, each on the command line and as an ini key."""
        group = self.parser.getgroup("distcompat", "distributed compatibility")
        for option in options:
            self.by_name[option.name] = option
            action = "append" if option.repeated else "store"
            # The default is None, which tells an option that was not given.
            group.addoption(
                *option.flags,
                dest=option.name,
                default=None,
                metavar=option.metavar,
                help=option.help,
                action=action,
            )
            for key in option.names:
                self.parser.addini(key, option.help, default=None)


def add(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the options of the core and of the extensions.

    The hook is historic: pluggy also calls it on an extension that is loaded later.
    """
    registered = RegisteredOptions(parser)
    registered.add(OPTIONS.values())
    pluginmanager.register(registered, _REGISTERED)
    pluginmanager.hook.pytest_distcompat_options.call_historic(registered.add, {})


def options_of(config: pytest.Config) -> dict[str, Option]:
    """Return all options of a pytest, by the name of their ini key."""
    registered: RegisteredOptions | None = config.pluginmanager.getplugin(_REGISTERED)
    assert registered is not None
    return registered.by_name


def setting(config: pytest.Config, name: str) -> Setting:
    """Return the effective value of an option.

    Args:
        config: The configuration of pytest.
        name: The ini key of the option, as ``distcompat_timeout``.

    Raises:
        pytest.UsageError: The value is wrong; the message names the allowed ones.
    """
    option = options_of(config)[name]
    given = config.getoption(name)
    ini = _in_file(config, option)
    # An empty value on the command line overrides the file too: no baseline this time, or an unset
    # shell variable.
    if given is not None:
        # A conftest may have set it to another type.
        text = "\n".join(given) if option.repeated else str(given)
        origin = "option"
        where = option.flag
    elif ini:
        text = str(ini)
        origin = "ini"
        where = f"ini {name}"
    else:
        text = option.default
        origin = "default"
        where = name
    try:
        if option.metavar.startswith("FILE"):
            value = option.read(text, _base(config, origin))
        else:
            value = option.read(text)
    except UsageProblem as problem:
        raise pytest.UsageError(f"{where}: {problem}") from None
    return Setting(value, ", ".join(text.split("\n")), origin)


def _base(config: pytest.Config, origin: str) -> Path:
    """Return the directory that relative paths start from; ``origin`` is that of the ``Setting``.

    Paths in the ini file start from the file's directory, wherever pytest is started:
    https://docs.pytest.org/en/stable/reference/reference.html#pytest.Parser.addini
    """
    file = config.inipath if origin == "ini" else None
    # Relative paths stay relative where possible: messages show them as they were written.
    if file is None or file.parent == config.invocation_params.dir:
        return Path()
    return file.parent


def given(config: pytest.Config) -> Sequence[str]:
    """Return the ini keys of the options that are set by command line or ini file."""
    names: list[str] = []
    for name, option in options_of(config).items():
        if config.getoption(name) is not None or _in_file(config, option):
            names.append(name)
    return names


def _in_file(config: pytest.Config, option: Option) -> str | None:
    """Return the text that the ini file has for an option; None if it sets none of its names."""
    for name in option.names:
        text: str | None = config.getini(name)
        if text:
            return text
    return None

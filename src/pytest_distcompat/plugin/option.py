"""What an option of the plugin is, and parsers for its value.

``core_options`` makes the options of the core, and extensions make theirs, as::

    Option("world_size", "N", "auto", count(least=1, keywords=("auto",)), "Start N ranks ...")

This one is ``--distcompat-world-size N`` on the command line and ``distcompat_world_size`` in an
ini file. ``plugin.options`` registers it with pytest and reads it.

Every session imports this module, so that it imports little.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pytest_distcompat.failures import UsageProblem
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


def number(expected: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
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

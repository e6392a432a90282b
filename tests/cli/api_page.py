"""Sections of docs/api.md: signatures and docstrings as Markdown that is readable without a build."""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest_distcompat
from pytest_distcompat import scripts

#: The objects of each section of the page, by the name of its block.
SECTIONS: dict[str, tuple[Any, ...]] = {
    "api_suite": (
        pytest_distcompat.CompatSuite,
        pytest_distcompat.Matrix,
        pytest_distcompat.Cell,
        pytest_distcompat.fails,
        pytest_distcompat.refuses,
    ),
    "api_driver": (pytest_distcompat.Driver, pytest_distcompat.World),
    "api_engine": (pytest_distcompat.check_driver,),
    "api_checks": (
        pytest_distcompat.Check,
        pytest_distcompat.check,
        pytest_distcompat.Trace,
        pytest_distcompat.Verdict,
    ),
    "api_scripts": (
        scripts.launch,
        scripts.ScriptRun,
        scripts.resume_roundtrip,
        scripts.RoundTrip,
        scripts.parity,
        scripts.Parity,
    ),
    "api_exceptions": (
        pytest_distcompat.DistcompatError,
        pytest_distcompat.UsageProblem,
        pytest_distcompat.Incompatible,
        pytest_distcompat.LateFailure,
        pytest_distcompat.RunFailedError,
    ),
}
#: The title of a section of a Google docstring, and the name at the beginning of one of its entries.
TITLE = re.compile(r"^(Args|Attributes|Raises|Returns|Example):$", re.MULTILINE)
ENTRY = re.compile(r"^(\*{0,2}\w+): ", re.MULTILINE)
#: Members that no driver, suite or check of a user calls.
OF_THE_PACKAGE = frozenset(
    {
        *(
            "CompatSuite.test",
            "Matrix.cells",
            "Trace.name_hosts",
            "Verdict.to_json",
            "Verdict.place",
        ),
        *(
            "Cell.spread",
            "Cell.spread_as",
            "Cell.own_facets",
            "Matrix.counts_of_session",
            "Matrix.spread_as",
            "Cell.own_disks",
            "Cell.only_tp",
            "Cell.settings",
            "Cell.with_settings",
        ),
        *("World.from_environment", "World.divide_memory", "World.divide_memory_once_used"),
        *("ScriptRun.missing_evidence", "ScriptRun.trace_with_files", "ScriptRun.raise_unless_failed"),
    }
)
#: What stands before the name of an argument that takes several.
STARS: Mapping[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
#: A call that is longer has a line for each argument.
LONGEST_CALL = 100


@dataclass(frozen=True)
class Docstring:
    """A Google docstring: its paragraphs, and its sections by their title."""

    paragraphs: str
    sections: dict[str, str]

    @classmethod
    def of(cls, documented: Any) -> Docstring:
        """Read the docstring of an object."""
        first, *rest = TITLE.split(inspect.getdoc(documented) or "")
        titles = rest[::2]
        texts = map(textwrap.dedent, rest[1::2])
        return cls(first.strip(), dict(zip(titles, texts, strict=True)))

    @property
    def summary(self) -> str:
        """Return its first line."""
        return self.paragraphs.partition("\n\n")[0]

    def entries(self, title: str) -> Iterator[tuple[str, str]]:
        """Yield name and text of each entry of a section."""
        _, *rest = ENTRY.split(self.sections.get(title, ""))
        return zip(rest[::2], map(words, rest[1::2]), strict=True)


def words(text: str) -> str:
    """Return a docstring's text as Markdown in one line."""
    return re.sub(r"(https?://[^\s)]+[^\s).,:;])", r"<\1>", " ".join(text.split()).replace("``", "`"))


def arguments(function: Callable[..., Any]) -> Iterator[str]:
    """Yield each argument as it is written, with its annotation and its default."""
    keywords_begun = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            keywords_begun = True
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords_begun:
            keywords_begun = True
            yield "*"
        star = STARS.get(parameter.kind, "")
        annotated = f": {parameter.annotation}" if parameter.annotation is not parameter.empty else ""
        yield f"{star}{parameter.name}{annotated}{default(parameter)}"


def default(parameter: inspect.Parameter) -> str:
    """Return the default of an argument; three dots for a function or a new dictionary, whose text says nothing."""
    if parameter.default is parameter.empty:
        return ""
    shown = repr(parameter.default)
    return " = ..." if shown.startswith("<") else f" = {shown}"


def returned(function: Callable[..., Any]) -> str:
    """Return the arrow and the type behind a function's arguments; nothing for a class."""
    annotation = inspect.signature(function).return_annotation
    return "" if inspect.isclass(function) or annotation is inspect.Signature.empty else f" -> {annotation}"


def fenced(function: Callable[..., Any]) -> str:
    """Return the call of a function or a class as a block of code."""
    name = function.__name__
    result = returned(function)
    call = f"{name}({', '.join(arguments(function))}){result}"
    if len(call) > LONGEST_CALL:
        lines = "".join(f"    {argument},\n" for argument in arguments(function))
        call = f"{name}(\n{lines}){result}"
    return f"```py\n{call}\n```\n"


def listed(docstring: Docstring, indent: str = "") -> Iterator[str]:
    """Yield a line for each argument and attribute, for what is returned and for what is raised."""
    for title in ("Attributes", "Args"):
        for name, text in docstring.entries(title):
            yield f"{indent}- `{name}`: {text}\n"
    if "Returns" in docstring.sections:
        yield f"{indent}- Returns: {words(docstring.sections['Returns'])}\n"
    for name, text in docstring.entries("Raises"):
        yield f"{indent}- Raises `{name}`: {text}\n"


def full_text(docstring: Docstring) -> Iterator[str]:
    """Yield the paragraphs, the lists and the example of a docstring."""
    code_follows = False
    for paragraph in docstring.paragraphs.split("\n\n"):
        if code_follows:
            yield f"```py\n{textwrap.dedent(paragraph)}\n```\n\n"
        else:
            yield f"{words(paragraph.replace('::', ':'))}\n\n"
        code_follows = paragraph.endswith("::")
    yield from ended(listed(docstring))
    if "Example" in docstring.sections:
        yield f"```pycon\n{docstring.sections['Example'].strip()}\n```\n\n"


def ended(lines: Iterator[str]) -> Iterator[str]:
    """Yield the lines of a list, and an empty line after the last."""
    line = None
    for line in lines:
        yield line
    if line is not None:
        yield "\n"


def members(kind: type) -> Iterator[str]:
    """Yield a line for each attribute that a comment explains, then one for each property and method, with its arguments."""
    yield from attributes(kind)
    for name, member in vars(kind).items():
        hidden = name.startswith("_") or f"{kind.__name__}.{name}" in OF_THE_PACKAGE
        if hidden or not inspect.getdoc(member):
            continue
        if isinstance(member, (property, functools.cached_property)):
            yield f"- `{name}`: {words(Docstring.of(member).summary)}\n"
        elif isinstance(member, (classmethod, staticmethod)) or inspect.isfunction(member):
            function = getattr(kind, name)
            given = list(arguments(function))
            # Of a class method it is bound already.
            given = given[1:] if inspect.isfunction(member) else given
            docstring = Docstring.of(function)
            yield f"- `{name}({', '.join(given)}){returned(function)}`: {words(docstring.summary)}\n"
            yield from listed(docstring, "    ")


def attributes(kind: type) -> Iterator[str]:
    """Yield a line for each attribute of a class that has a comment ``#:`` before it."""
    lines = textwrap.dedent(inspect.getsource(kind)).splitlines()
    comment = ""
    for line in lines:
        explained = re.fullmatch(r"    #: ?(.*)", line)
        named = re.match(r"    (\w+)(: [^=]+?)?( = .*)?$", line)
        if explained:
            comment = f"{comment} {explained[1]}"
        elif named and comment:
            yield f"- `{named[1]}`: {words(comment)}\n"
            comment = ""
        else:
            comment = ""


def item(documented: Any) -> Iterator[str]:
    """Yield the heading, the signature and the text of a class or a function."""
    place = "pytest_distcompat.scripts" if documented in SECTIONS["api_scripts"] else "pytest_distcompat"
    yield f"### {place}.{documented.__name__}\n\n"
    raised = inspect.isclass(documented) and issubclass(documented, Exception)
    # Nobody makes an exception or a suite.
    if not raised and documented is not pytest_distcompat.CompatSuite:
        yield f"{fenced(documented)}\n"
    yield from full_text(Docstring.of(documented))
    if not inspect.isclass(documented) or raised:
        return
    yield from ended(members(documented))
    # What it inherits from classes beside it, such as the abilities of a driver.
    for inherited in documented.__mro__[1:]:
        if inherited.__module__ == documented.__module__:
            yield f"#### {inherited.__name__}\n\n"
            yield from full_text(Docstring.of(inherited))
            yield from ended(members(inherited))


def section(name: str) -> str:
    """Return the Markdown of one block of the page."""
    return "".join(part for documented in SECTIONS[name] for part in item(documented))

"""Candidates of a search: a cell of a driver, and perhaps calls of its live trainer.

A cell is one point of the test matrix, with options and settings. As text a candidate is

    torch fsdp2-fp32-w2-model_mlp-set_AdamW.eps=0.5: step(), export(max_shard_size=7)

Here ``torch`` is the driver, ``model_mlp`` an option, ``AdamW.eps=0.5`` a setting (a field of an
object of a library), and ``step()`` a call of a method of the trainer.

``space`` makes candidates, ``trial`` runs them, and ``guide`` reduces those that fail: it takes
away *parts* (options, settings, calls and arguments of calls).
"""

from __future__ import annotations

import ast
import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_distcompat.calls import Call
from pytest_distcompat.cell import Cell, OptionValue


@dataclass(frozen=True)
class Candidate:
    """A candidate, which is run and judged as a whole.

    Attributes:
        driver: The driver's name.
        cell: Strategy, precision, options and settings.
        calls: Calls of the live trainer, in order. Without calls the trainer trains, saves, loads
            and exports, as in every cell.
    """

    driver: str
    cell: Cell
    calls: tuple[Call, ...] = ()

    def __str__(self) -> str:
        """Return it as one line, which no other candidate has."""
        text = f"{self.driver} {self.cell}"
        if self.calls:
            text += f": {self.calls_text}"
        return text

    @property
    def calls_text(self) -> str:
        """Return the calls as Python writes them."""
        return ", ".join(map(str, self.calls))

    @property
    def command(self) -> str:
        """Return the command that runs it alone."""
        words = ["distcompat", "search", "--driver", self.driver, "--cell", self.cell.id]
        if self.calls:
            words += ["--calls", self.calls_text]
        return shlex.join(words)

    @property
    def parts(self) -> tuple[str, ...]:
        """Return what can be taken away, as texts.

        ``model=mlp`` is an option, ``set AdamW.eps=0.5`` a setting, ``1 export`` call number 1
        (from 0), and ``1 max_shard_size=7`` an argument of it.
        """
        return (*self._cell_parts(), *self._call_parts())

    def only(self, parts: Sequence[str]) -> Candidate:
        """Return the candidate with these of its parts only.

        An option that is not among them has its default. A call whose argument is not among them is
        made without that argument, and an argument without its call is dropped.
        """
        kept = set(parts)
        options: list[tuple[str, OptionValue]] = []
        for name, value in self.cell.options:
            if name != "set" and f"{name}={value}" in kept:
                options.append((name, value))
        settings = [setting for setting in self.cell.set if f"set {setting}" in kept]
        if settings:
            options.append(("set", "+".join(settings)))
        cell = dataclasses.replace(self.cell, options=tuple(options))
        calls: list[Call] = []
        for number, call in enumerate(self.calls):
            if f"{number} {call.name}" not in kept:
                continue
            arguments: list[tuple[str, Any]] = []
            for pair in call.arguments:
                if _argument_part(number, pair) in kept:
                    arguments.append(pair)
            calls.append(Call(call.name, tuple(arguments)))
        return dataclasses.replace(self, cell=cell, calls=tuple(calls))

    def _cell_parts(self) -> Iterator[str]:
        """Yield options and settings: ``model=mlp``, ``set AdamW.eps=0.5``."""
        for name, value in self.cell.options:
            if name != "set":
                yield f"{name}={value}"
        for setting in self.cell.set:
            yield f"set {setting}"

    def _call_parts(self) -> Iterator[str]:
        """Yield calls and their arguments: ``1 export``, ``1 max_shard_size=7``."""
        for number, call in enumerate(self.calls):
            yield f"{number} {call.name}"
            for pair in call.arguments:
                yield _argument_part(number, pair)

    def as_data(self) -> dict[str, Any]:
        """Return it as data for a JSON file: ``{"driver": ..., "cell": ..., "calls": [...]}``."""
        data: dict[str, Any] = {
            "driver": self.driver,
            "cell": self.cell.id,
        }
        if self.calls:
            data["calls"] = list(map(str, self.calls))
        return data

    @classmethod
    def parse(cls, text: str) -> Candidate:
        """Return the candidate of which ``str`` returned this text."""
        driver, _, rest = text.partition(" ")
        cell, _, calls = rest.partition(": ")
        return cls(driver, Cell.parse(cell), tuple(parse_calls(calls)))

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Candidate:
        """Return the candidate of which ``as_data`` returned this data."""
        cell = Cell.parse(data["cell"])
        calls = [Call.parse(text) for text in data.get("calls", ())]
        return cls(data["driver"], cell, tuple(calls))


def parse_calls(text: str) -> list[Call]:
    """Return the calls that a text lists: ``step(), export(max_shard_size=7)``.

    Unlike ``calls.read_calls`` it accepts any name: an argument may be one that only the library
    knows, ``max_shard_size`` say.

    Raises:
        SyntaxError: The text is no list in Python.
        ValueError: An element of it is no call.
    """
    expression = ast.parse(f"[{text}]", mode="eval")
    calls = expression.body
    assert isinstance(calls, ast.List)
    return [Call.parse(ast.unparse(call)) for call in calls.elts]


def _argument_part(number: int, pair: tuple[str, Any]) -> str:
    """Return the text of an argument, name and value, of call ``number``."""
    name, value = pair
    return f"{number} {name}={value!r}"

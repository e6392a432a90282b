"""The forms in which a pytest runs faulty tests: on which ranks, on how many, with or without workers of xdist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest

REUSE = "--distcompat-reuse=session"


@dataclass(frozen=True)
class Form:
    """Arguments of ``run_faults`` after the name of the file with the faults."""

    name: str
    args: tuple[str, ...] = ()
    #: The number of ranks of all tests; 0 if each has its own.
    world_size: int = 0
    nightly: bool = False

    @property
    def reuses_ranks(self) -> bool:
        """Return whether tests share ranks; then each fault happens on ranks that have run a test."""
        return REUSE in self.args

    @property
    def size(self) -> Mapping[str, str]:
        return {"FAULTS_WORLD_SIZE": str(self.world_size)} if self.world_size else {}

    @property
    def more(self) -> Mapping[str, str]:
        """Keyword arguments: on reused ranks passing tests stand around each fault."""
        if self.reuses_ranks:
            return {**self.size, "conftest": "faults_neighbours.py"}
        return self.size


#: In some form of the daily run each fault is on 2 ranks, in some form of the nightly one on 4.
FORMS: Mapping[str, Form] = MappingProxyType(
    {
        form.name: form
        for form in (
            Form("alone"),
            Form("alone at 2", (), 2),
            Form("alone at 4", (), 4, nightly=True),
            Form("workers", ("-n", "2"), nightly=True),
            Form("reused", (REUSE,), 2, nightly=True),
            Form("reused at 4", (REUSE,), 4, nightly=True),
        )
    }
)


def forms(*names: str) -> list[Any]:
    """Return parameters for a fixture, with the mark ``nightly`` on those of the nightly run."""
    parameters = []
    for name in names:
        form = FORMS[name]
        marks = [pytest.mark.nightly] if form.nightly else []
        parameters.append(pytest.param(form, id=form.name, marks=marks))
    return parameters

"""The sweep reads no fields of libraries that are not installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from pytest_distcompat.drivers import find_driver
from pytest_distcompat.ext.upstream.sweep import reading
from pytest_distcompat.ext.upstream.sweep.fields import Source

#: What a driver cannot do without.
NEEDED = ("torch", "pytest_distcompat")


def library_of(source: Source) -> str:
    return source.target.partition(".")[0]


@pytest.mark.parametrize("driver", ["torch", "accelerate", "trainer", "deepspeed"])
def test_sources_of_missing_libraries_have_no_fields(driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(reading, "_fields_of", lambda source: [library_of(source)])
    kind: Any = find_driver(driver)
    sources = list(kind.sources)
    assert {library_of(source) for source in sources} - set(NEEDED)
    libraries: set[object] = set(reading.read_fields(sources))
    assert libraries <= set(NEEDED)

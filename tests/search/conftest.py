"""Candidates without the libraries: a few settings, and trials that reach what the test says."""

from __future__ import annotations

import pytest

from pytest_distcompat.ext.search import space
from pytest_distcompat.ext.upstream.sweep.rules import Setting


@pytest.fixture
def few_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each driver have ten settings of two values each."""
    settings = [
        Setting(f"AdamW.field{number}", "swept", ("1", "2"), "", ("ddp", "fsdp2"), "fp32") for number in range(10)
    ]
    monkeypatch.setattr(space, "settings_of", lambda sources, shared=None: settings)

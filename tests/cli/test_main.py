"""The command without a subcommand."""

from __future__ import annotations

import importlib.metadata

import pytest

from pytest_distcompat.cli import main


def test_the_bare_command_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("usage: distcompat ")
    assert ("doctor" in out, "init" in out, err) == (True, True, "")


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"distcompat {importlib.metadata.version('pytest-distcompat')}\n"

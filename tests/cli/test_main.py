"""The command without a subcommand."""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
from pathlib import Path

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


@pytest.mark.parametrize(("command", "is_there"), [("init", False), ("settings", True)])
def test_only_commands_that_take_a_driver_import_from_the_working_directory(
    command: str, is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", sys.path[:])
    with contextlib.suppress(SystemExit):
        main([command, "--driver", "torch"])
    assert (str(tmp_path) in sys.path) == is_there

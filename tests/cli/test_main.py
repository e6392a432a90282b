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
    assert ("doctor" in out) is True
    assert ("init" in out) is True
    assert err == ""


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["join", "127.0.0.1:1", "--token-file", "bytes"], "--token-file bytes: it is no text in UTF-8"),
        (
            ["join", "127.0.0.1:99999", "--token-file", "token"],
            "'127.0.0.1:99999' is not right: expected a port from 1 to 65535",
        ),
        (["join", "127.0.0.1", "--token-file", "token"], "'127.0.0.1' is not right: expected HOST:PORT"),
        (["sbatch", "--nodes", "-1", "--", "x"], "--nodes -1 is not right: expected a whole number of at least 1"),
        (["sbatch", "--gpus-per-node", "-1"], "--gpus-per-node -1 is not right: expected a whole number of at least 0"),
        (["sbatch", "--time", "1\nrm -rf x"], "--time '1\\nrm -rf x' is not right: expected a time limit of Slurm"),
        (["sbatch", "--time", "1\n"], "--time '1\\n' is not right: expected a time limit of Slurm"),
        (["sbatch", "--partition", "a\n#SBATCH --x"], "--partition 'a\\n#SBATCH --x' is not right: expected names"),
        (["trace", ":a", "ddp-fp32-w2"], "driver ':a': expected module:attribute, or one of torch"),
        (["trace", "broken:D", "ddp-fp32-w2"], "driver 'broken:D': SyntaxError when it is imported"),
    ],
)
def test_a_wrong_value_is_one_line_that_says_what_was_expected(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", sys.path[:])
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "token").write_text("t", encoding="utf-8")
    (tmp_path / "broken.py").write_text("x = (", encoding="utf-8")
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"distcompat: {message}")
    assert err.count("\n") == 1

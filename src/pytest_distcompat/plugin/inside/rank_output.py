"""Where the output of a rank goes: files of its run, and no terminal."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest import capture as pytest_capture
from _pytest._io import TerminalWriter


def no_terminal(config: pytest.Config) -> None:
    """Without pytest's terminal, have ``config.get_terminal_writer()`` give a writer that leads nowhere, in no colours.

    It would raise. pytest 8 asks it for colours whenever an assertion that compares fails, as plugins do that print.
    ``_pytest._io.TerminalWriter`` is private; ``tests/plugin/test_private_names.py`` says when it changes.
    """
    config.pluginmanager.set_blocked("terminal")
    writer = TerminalWriter(Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - for as long as the process lives
    writer.hasmarkup = False
    config.get_terminal_writer = lambda: writer  # type: ignore[method-assign]


@contextlib.contextmanager
def capturing(config: pytest.Config, directory: Path, rank: int) -> Iterator[None]:
    """Capture this rank's output as pytest does, but into files with a name: a rank that dies leaves its last words there.

    ``_pytest.capture.TemporaryFile`` is private; ``tests/plugin/test_private_names.py`` says when it changes.
    """
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is None:
        yield
        return
    from pytest_distcompat.launch.files import captured_files

    module: Any = pytest_capture
    before = module.TemporaryFile
    paths = iter(captured_files(directory, rank))
    # Ranks that live on begin theirs anew with each item.
    module.TemporaryFile = lambda buffering: next(paths).open("w+b", buffering=buffering)
    try:
        capture.start_global_capturing()
    finally:
        module.TemporaryFile = before
    try:
        yield
    finally:
        capture.stop_global_capturing()


def fault_handler(config: pytest.Config) -> None:
    """Have a crash's stack written to this rank's stderr: pytest's own plugin kept the fork server's.

    Its two hooks are called again, for it has no other way to change the file.
    """
    plugin = config.pluginmanager.getplugin("faulthandler")
    if plugin is not None:
        plugin.pytest_unconfigure(config)
        plugin.pytest_configure(config)

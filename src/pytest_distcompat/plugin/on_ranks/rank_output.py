"""Output of a rank: captured into files of its run, without a terminal."""

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
    """Block pytest's terminal plugin, but keep a terminal writer, which writes to /dev/null.

    Without the plugin ``config.get_terminal_writer()`` raises. pytest 8 calls it for colours
    whenever an assertion that compares fails, and plugins that print call it too.
    ``_pytest._io.TerminalWriter`` is private; ``tests/plugin/test_private_names.py`` fails when it
    changes.
    """
    config.pluginmanager.set_blocked("terminal")
    # Open for as long as the process lives.
    null = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    writer = TerminalWriter(null)
    writer.hasmarkup = False
    config.get_terminal_writer = lambda: writer  # type: ignore[method-assign]


@contextlib.contextmanager
def capturing(config: pytest.Config, directory: Path, rank: int) -> Iterator[None]:
    """Capture this rank's output as pytest does, but into named files.

    These are still there when the rank dies.

    ``_pytest.capture.TemporaryFile`` is private; ``tests/plugin/test_private_names.py`` fails when
    it changes.
    """
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is None:
        yield
        return
    from pytest_distcompat.launch.files import captured_files

    module: Any = pytest_capture
    before = module.TemporaryFile
    paths = iter(captured_files(directory, rank))
    # Kept ranks truncate their files for each item.
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
    """Have the stack of a crash written to this rank's stderr.

    Without that it goes to the stderr of the fork server that the rank was forked from.

    pytest's plugin faulthandler can change its file only by calling its two hooks again.
    """
    plugin = config.pluginmanager.getplugin("faulthandler")
    if plugin is not None:
        plugin.pytest_unconfigure(config)
        plugin.pytest_configure(config)

"""Output of a rank: captured into files of its run, without a terminal.

A *rank* is one process of a torchrun process group on which pytest runs an item. Its *run* has a
directory for the logs and outputs of all ranks. ``rank_session`` calls ``no_terminal`` when it
makes pytest's session, ``fault_handler`` and ``capturing`` when it runs an item. What ranks wrote
is shown later by pytest's own process, with a failure.
"""

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
    # It stays open for as long as the process lives.
    null = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    writer = TerminalWriter(null)
    writer.hasmarkup = False
    config.get_terminal_writer = lambda: writer  # type: ignore[method-assign]


@contextlib.contextmanager
def capturing(config: pytest.Config, directory: Path, rank: int) -> Iterator[None]:
    """Capture this rank's output as pytest does, but into named files.

    pytest captures into temporary files without a name, which are gone when the rank dies.
    ``_pytest.capture.TemporaryFile`` is private; ``tests/plugin/test_private_names.py`` fails when
    it changes.

    Args:
        config: The configuration of this rank's pytest.
        directory: Where the files are: ``rank-0.stdout.captured`` for rank 0, and so on.
        rank: The number of this rank.
    """
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is None:
        yield
        return
    from pytest_distcompat.launch.files import captured_files

    module: Any = pytest_capture
    before = module.TemporaryFile
    # pytest makes a file for stdout first, then one for stderr.
    paths = iter(captured_files(directory, rank))
    # "w": ranks that run several items truncate their files for each.
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
    """Have the Python stack of a crash, as a segmentation fault, written to this rank's stderr.

    pytest's plugin faulthandler was configured in the fork server that this rank was forked from,
    and would write to the stderr of that process. The plugin opens stderr anew only if its two
    hooks are called again.
    """
    plugin = config.pluginmanager.getplugin("faulthandler")
    if plugin is not None:
        plugin.pytest_unconfigure(config)
        plugin.pytest_configure(config)

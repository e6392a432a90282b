"""Stands for plugins that run each test in a fork of pytest: pytest-forked, and others whose option nobody knows."""

from __future__ import annotations

import os
import pickle

import pytest
from _pytest.runner import runtestprotocol


def pytest_addoption(parser: pytest.Parser) -> None:
    for name in ("forked", "forks-by-another-name"):
        parser.addoption(f"--{name}", action="store_true")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if not (item.config.getoption("forked") or item.config.getoption("forks_by_another_name")):
        return None
    hook = item.config.hook
    readable, writable = os.pipe()
    child = os.fork()
    if not child:
        try:
            reports = [
                hook.pytest_report_to_serializable(config=item.config, report=report)
                for report in runtestprotocol(item, log=False)
            ]
            os.write(writable, pickle.dumps(reports))
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as file:
        data = file.read()
    os.waitpid(child, 0)
    for report in pickle.loads(data):
        item.ihook.pytest_runtest_logreport(
            report=hook.pytest_report_from_serializable(config=item.config, data=report)
        )
    return True

"""Runs over several nodes: options, and the launcher; what they do is imported when a session needs it."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.plugin.options import Option, count
from pytest_distcompat.user_input import read_address

if TYPE_CHECKING:
    from pytest_distcompat.ext.cluster.launcher import NodesLauncher
    from pytest_distcompat.launch.launcher import Launcher
    from pytest_distcompat.launch.request import Warmth
    from pytest_distcompat.lease import Inventory, Pool
    from pytest_distcompat.plugin.session import DistcompatSession


def _executor(text: str) -> str:
    from pytest_distcompat.ext.cluster.executors import EXECUTORS

    EXECUTORS.get(text)
    return text


def _address(text: str) -> tuple[str, int] | None:
    """Return host and port; None for an empty text."""
    if not text:
        return None
    host, port = read_address(text)
    if host == "0.0.0.0":  # noqa: S104 - it is refused
        raise UsageProblem(
            f"{text!r} is no address that other nodes can reach: expected that of one interface."
        )
    return host, port or 0


def _token(text: str, base: Path) -> str:
    """Return the token in a file; empty for an empty text."""
    if not text:
        return ""
    try:
        token = (base / text).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UsageProblem(f"{text!r}: {error.strerror}.") from None
    if len(token) < 16:
        raise UsageProblem(
            f"{text!r}: expected a token of at least 16 characters, as `openssl rand -hex 32` makes it."
        )
    return token


OPTIONS = (
    Option(
        "worker_nodes",
        "N",
        "0",
        count(least=0),
        "Deal the workers of xdist (-n) out over N nodes: each has its runs, of one node, there (default: 0, all here).",
    ),
    Option(
        "executor",
        "NAME",
        "local",
        _executor,
        "Start the agents of several nodes on this machine (local), by `distcompat join` on each (join), by srun in "
        "an allocation (slurm), or on a Ray cluster (ray) (default: local).",
    ),
    Option(
        "listen",
        "HOST[:PORT]",
        "",
        _address,
        "Have nodes join at this address of this machine (default: 127.0.0.1 for local, the host's for slurm and ray).",
    ),
    Option(
        "token_file",
        "FILE",
        "",
        _token,
        "Let only nodes join that know the token in this file; --distcompat-executor join needs it (default: a new "
        "token).",
    ),
)


@pytest.hookimpl(optionalhook=True)
def pytest_distcompat_options() -> tuple[Option, ...]:
    """Add the options."""
    return OPTIONS


@pytest.hookimpl(optionalhook=True)
def pytest_distcompat_session(session: DistcompatSession) -> None:
    """Deal the workers of xdist out over nodes, if that is asked for."""
    session.worker_nodes = int(session.setting("worker_nodes").value)


@pytest.hookimpl(optionalhook=True)
def pytest_distcompat_over_nodes(
    session: DistcompatSession, launcher: Launcher, warmth: Warmth
) -> NodesLauncher:
    """Return a launcher for runs of several nodes too."""
    from pytest_distcompat.ext.cluster.session_nodes import nodes_launcher

    over_nodes = nodes_launcher(session, launcher, warmth)
    session.config.pluginmanager.register(NodesOfSession(over_nodes), "distcompat-nodes")
    return over_nodes


class NodesOfSession:
    """Hooks of a session over nodes."""

    def __init__(self, launcher: NodesLauncher) -> None:
        self._launcher = launcher

    def pytest_distcompat_why_not_ready(self) -> str:
        """Wait until all nodes have joined; return what is wrong with them, empty if nothing is."""
        return self._launcher.ready()

    def pytest_distcompat_pool(
        self, session: DistcompatSession, inventory: Inventory
    ) -> Pool | None:
        """Return a pool that asks the scheduler for devices, if it counts them."""
        launcher = self._launcher
        if not launcher.accounts or not session.gpus:
            return None
        from pytest_distcompat.ext.cluster.pool import ScheduledPool

        return ScheduledPool(
            None,
            inventory,
            ask=lambda ranks, who: launcher.devices([], ranks, who),
            **session.pool_options,
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """End the session once a scheduler takes its nodes away: no later test can run."""
        report = yield
        if self._launcher.taken:
            item.session.shouldstop = self._launcher.taken
        return report

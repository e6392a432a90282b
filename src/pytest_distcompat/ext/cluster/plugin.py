"""pytest plugin for runs over several machines (nodes): its options, and the placement of runs.

pytest loads it by the entry point ``distcompat-cluster``. The core of the plugin calls the two
hooks at the end of this module when the session begins. All else is imported when a session needs
it, so that other sessions start fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.plugin.options import Option, count
from pytest_distcompat.user_input import read_address

if TYPE_CHECKING:
    from pytest_distcompat.plugin.placement import Placement
    from pytest_distcompat.plugin.session import DistcompatSession


def _executor(text: str) -> str:
    """Return the name of an executor. Raises UsageProblem for an unknown one."""
    from pytest_distcompat.ext.cluster.executors import EXECUTORS

    EXECUTORS.get(text)
    return text


def _address(text: str) -> tuple[str, int] | None:
    """Return host and port, such as ``("10.0.0.1", 29500)``; None for an empty text.

    The port is 0, for any free one, if the text has none.
    """
    if not text:
        return None
    host, port = read_address(text)
    if host == "0.0.0.0":  # noqa: S104 - it is refused
        raise UsageProblem(
            f"{text!r} is no address that other nodes can reach: expected that of one interface."
        )
    return host, port or 0


def _token(text: str, base: Path) -> str:
    """Return the token in a file, whose path is relative to ``base``; empty for an empty text."""
    if not text:
        return ""
    try:
        token = (base / text).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UsageProblem(f"{text!r}: {error.strerror}.") from None
    if len(token) < 16:
        raise UsageProblem(
            f"{text!r}: expected a token of at least 16 characters, "
            "as `openssl rand -hex 32` makes it."
        )
    return token


#: For each option: its name without ``--distcompat-``, the word for its value, the default, the
#: function that reads the value, and its help.
OPTIONS = (
    Option(
        "nodes",
        "N",
        "1",
        count(least=1),
        "Spread the ranks of a test or suite that does not say over how many over N nodes "
        "(default: 1).",
    ),
    Option(
        "worker_nodes",
        "N",
        "0",
        count(least=0),
        "Deal the workers of xdist (-n) out over N nodes: "
        "each has its runs, of one node, there (default: 0, all here).",
    ),
    Option(
        "executor",
        "NAME",
        "local",
        _executor,
        "Start the agents of several nodes on this machine (local), "
        "by `distcompat join` on each (join), by srun in an allocation (slurm), "
        "or on a Ray cluster (ray) (default: local).",
    ),
    Option(
        "listen",
        "HOST[:PORT]",
        "",
        _address,
        "Have nodes join at this address of this machine "
        "(default: 127.0.0.1 for local, the host's for slurm and ray).",
    ),
    Option(
        "token_file",
        "FILE",
        "",
        _token,
        "Let only nodes join that know the token in this file; "
        "--distcompat-executor join needs it (default: a new token).",
    ),
)


@pytest.hookimpl(optionalhook=True)
def pytest_distcompat_options() -> tuple[Option, ...]:
    """Add the options."""
    return OPTIONS


@pytest.hookimpl(optionalhook=True)
def pytest_distcompat_placement(session: DistcompatSession) -> Placement:
    """Return where runs are, as the options say."""
    from pytest_distcompat.ext.cluster.placement import ClusterPlacement

    return ClusterPlacement(session)

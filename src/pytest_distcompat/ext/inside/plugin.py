"""pytest plugin for a pytest that a launcher has started as one of several ranks.

For example ``torchrun --nproc-per-node 2 -m pytest`` starts two. The plugin notices it by the
variables that launchers set, and calls ``external_launch.enter``. In any other pytest it does
nothing.
"""

from __future__ import annotations

import os

import pytest

from pytest_distcompat.plugin.on_ranks.launched import HIDDEN, ON_RANK

#: Variables that torchrun, accelerate, deepspeed and composer's launcher all set for a rank.
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_rank() -> bool:
    """Tell whether a launcher started this process as one of several ranks.

    A process that a rank starts inherits the launcher's variables; ``HIDDEN``, a variable of this
    plugin, says that it is no rank.
    """
    is_launched = all(name in os.environ for name in _VARIABLES)
    return is_launched and HIDDEN not in os.environ


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Let only rank 0 write to the terminal."""
    if (
        is_rank()
        and not early_config.pluginmanager.is_blocked("distcompat")
        and os.environ["RANK"] != "0"
    ):
        from pytest_distcompat.plugin.on_ranks.rank_output import no_terminal

        no_terminal(early_config)


@pytest.hookimpl(optionalhook=True)
def pytest_distcompat_configure(config: pytest.Config) -> None:
    """Make this pytest run its tests in lockstep with the other ranks.

    The plugin's own ranks, which get their tests from pytest's process, have ``ON_RANK`` in the
    stash of their configuration. They are left alone.
    """
    if is_rank() and ON_RANK not in config.stash:
        from pytest_distcompat.ext.inside import external_launch

        external_launch.enter(config)

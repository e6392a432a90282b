"""Notices that a launcher started this pytest as one of several ranks; what follows is imported then."""

from __future__ import annotations

import os

import pytest

from pytest_distcompat.plugin.on_ranks.launched import HIDDEN, ON_RANK

#: Variables that torchrun, accelerate, deepspeed and composer's launcher all set for a rank.
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_rank() -> bool:
    """Tell whether a launcher started this process as one of several ranks."""
    return all(name in os.environ for name in _VARIABLES) and HIDDEN not in os.environ


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Take the terminal from all ranks but rank 0."""
    if (
        is_rank()
        and not early_config.pluginmanager.is_blocked("distcompat")
        and os.environ["RANK"] != "0"
    ):
        from pytest_distcompat.plugin.on_ranks.rank_output import no_terminal

        no_terminal(early_config)


@pytest.hookimpl(optionalhook=True)
def pytest_distcompat_configure(config: pytest.Config) -> None:
    """Set this pytest up as a rank of the launch."""
    if is_rank() and ON_RANK not in config.stash:
        from pytest_distcompat.ext.inside import external_launch

        external_launch.enter(config)

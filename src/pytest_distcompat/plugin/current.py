"""Access to the ``DistcompatSession`` of this process, which is made on first use with its hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.plugin.inside.launched import ON_RANK

if TYPE_CHECKING:
    from pytest_distcompat.plugin.session import DistcompatSession


def session_of(config: pytest.Config) -> DistcompatSession:
    """Return the session; the first call makes it, imports what it needs, and registers its hooks."""
    from pytest_distcompat.plugin.session import SESSION, DistcompatSession

    if SESSION not in config.stash:
        session = config.stash[SESSION] = DistcompatSession(config)
        config.add_cleanup(session.close)
        if ON_RANK not in config.stash and not hasattr(config, "workerinput"):
            from pytest_distcompat.plugin.declared import declared_of
            from pytest_distcompat.plugin.reporting.results import Results

            config.pluginmanager.register(Results(session), "distcompat-results")
            config.pluginmanager.register(declared_of(session), "distcompat-declared")
            if session.setting("reach").value is not None:
                from pytest_distcompat.plugin.reporting.reached import Reached

                config.pluginmanager.register(Reached(session), "distcompat-reached")
    return config.stash[SESSION]

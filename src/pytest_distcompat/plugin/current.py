"""Access to the ``DistcompatSession`` of this process.

It is made on first use, together with its hooks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_distcompat.plugin.session import DistcompatSession


def session_of(config: pytest.Config) -> DistcompatSession:
    """Return the session. The first call imports what it needs and registers the hooks."""
    from pytest_distcompat.plugin.session import SESSION, DistcompatSession

    if SESSION not in config.stash:
        session = config.stash[SESSION] = DistcompatSession(config)
        config.add_cleanup(session.close)
        if session.has_terminal:
            from pytest_distcompat.plugin.declared import declared_of
            from pytest_distcompat.plugin.reporting.results import Results

            config.pluginmanager.register(Results(session), "distcompat-results")
            config.pluginmanager.register(declared_of(session), "distcompat-declared")
        config.hook.pytest_distcompat_session(session=session)
    return config.stash[SESSION]

"""Access to the ``DistcompatSession`` of this process: all settings and the launcher of ranks.

The hooks of the plugin and of its extensions call ``session_of(config)``. It is a module of its
own, because every session imports it, but a session without distributed tests must not import
``plugin.session`` and what that needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_distcompat.plugin.session import DistcompatSession


def session_of(config: pytest.Config) -> DistcompatSession:
    """Return the session of a pytest configuration, which the first call makes.

    That call also registers the hooks that gather and show results, in the process that has the
    terminal, and lets extensions register theirs.
    """
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

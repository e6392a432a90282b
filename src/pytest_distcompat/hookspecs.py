"""Hooks by which extensions, plugins of pytest themselves, add to the plugin. ``docs/extend.md`` shows one of each.

An extension marks its functions ``@pytest.hookimpl(optionalhook=True)``: without the plugin (``-p no:distcompat``) the hooks do
not exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from pytest_distcompat.compat_suite import CompatSuite
    from pytest_distcompat.launch.forensics.ending import Ending
    from pytest_distcompat.launch.launcher import Launcher
    from pytest_distcompat.launch.request import Request, Warmth
    from pytest_distcompat.lease import Inventory, Pool
    from pytest_distcompat.plugin.marked.arguments import AddedArgument
    from pytest_distcompat.plugin.options import Option
    from pytest_distcompat.plugin.session import DistcompatSession
    from pytest_distcompat.profiles import AddedCheck
    from pytest_distcompat.report.document import Report
    from pytest_distcompat.substitute import Substitute
    from pytest_distcompat.world import World


# historic: pytest may load the extension after the plugin.
@pytest.hookspec(historic=True)
def pytest_distcompat_options() -> Sequence[Option]:  # type: ignore[empty-body]
    """Return options to add, each on the command line and as an ini key."""


@pytest.hookspec
def pytest_distcompat_mark_arguments() -> Sequence[AddedArgument]:  # type: ignore[empty-body]
    """Return arguments to add to ``@pytest.mark.distcompat``."""


@pytest.hookspec
def pytest_distcompat_configure(config: pytest.Config) -> None:
    """Change how this pytest is configured, before the plugin reads its options."""


@pytest.hookspec
def pytest_distcompat_session(session: DistcompatSession) -> None:
    """Use the session of this pytest process, which was just made.

    It is made for the first distributed test that is collected, or for an option of the plugin. Other hooks may be registered
    here, in ``session.config.pluginmanager``: a pytest without distributed tests then has none of them.
    """


@pytest.hookspec(firstresult=True)
def pytest_distcompat_substitute(session: DistcompatSession) -> Substitute | None:
    """Return what takes the place of ranks; None for ranks."""


@pytest.hookspec(firstresult=True)
def pytest_distcompat_over_nodes(
    session: DistcompatSession, launcher: Launcher, warmth: Warmth
) -> Launcher | None:
    """Return a launcher for runs over several nodes; ``launcher`` has those of this node."""


@pytest.hookspec(firstresult=True)
def pytest_distcompat_run(
    session: DistcompatSession, item: pytest.Function, request: Request
) -> Ending | None:
    """Have ranks do the request to run a marked test; None for new ranks of the session's launcher."""


@pytest.hookspec(firstresult=True)
def pytest_distcompat_group(session: DistcompatSession, item: pytest.Item) -> str | None:
    """Return a key of the marked tests that one process is to run, as this one; None if it is alone."""


@pytest.hookspec(firstresult=True)
def pytest_distcompat_process_group(world: World) -> ProcessGroup | None:
    """Return, on a rank, the process group for a test, which does not destroy it; None for a new one."""


@pytest.hookspec(firstresult=True)
def pytest_distcompat_why_not_ready() -> str | None:
    """Wait until ranks can be started; return what is wrong, nothing if all is well."""


@pytest.hookspec(firstresult=True)
def pytest_distcompat_pool(session: DistcompatSession, inventory: Inventory) -> Pool | None:
    """Return the pool that leases devices; None for that of this machine."""


@pytest.hookspec
def pytest_distcompat_preload(session: DistcompatSession) -> Sequence[str]:  # type: ignore[empty-body]
    """Return modules that fork servers import, so that ranks need not."""


@pytest.hookspec
def pytest_distcompat_recorders(session: DistcompatSession) -> Sequence[str]:  # type: ignore[empty-body]
    """Return what records on each rank of a suite: functions, as ``module:function``, that return a ``recording.Recorder``."""


@pytest.hookspec
def pytest_distcompat_added_checks(  # type: ignore[empty-body]
    suite: type[CompatSuite], session: DistcompatSession
) -> Sequence[AddedCheck]:
    """Return checks to run in a suite beside those of its own cells."""


@pytest.hookspec
def pytest_distcompat_summary(report: Report) -> Sequence[str]:  # type: ignore[empty-body]
    """Return lines for the terminal's summary of all suites."""

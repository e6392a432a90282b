"""Hooks by which extensions add to the plugin. ``docs/extend.md`` names them all.

An extension is a pytest plugin. It marks its functions ``@pytest.hookimpl(optionalhook=True)``,
because the hooks do not exist without this plugin (``-p no:distcompat``). ``plugin`` registers this
module with pytest and calls the hooks: at the start of pytest, of its session, and around runs.

Words: a *suite* is a class of compatibility tests; a *marked* test has ``@pytest.mark.distcompat``
and runs on several ranks. A *request* says what ranks are to run, and an *ending* how they ended. A
*pool* leases GPUs or CPU slots to one process group at a time. A hook with ``firstresult`` ends at
the first extension that returns something other than None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from pytest_distcompat.compat_suite import CompatSuite
    from pytest_distcompat.launch.forensics.ending import Ending
    from pytest_distcompat.launch.request import Request
    from pytest_distcompat.lease import Inventory, Pool
    from pytest_distcompat.plugin.marked.arguments import AddedArgument
    from pytest_distcompat.plugin.options import Option
    from pytest_distcompat.plugin.placement import Placement
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
    """Use the session of this pytest process, which was just created.

    It is created when the first distributed test is collected, or when an option of the plugin
    needs it. Register further hooks here, in ``session.config.pluginmanager``, so that a pytest
    without distributed tests does not have them.
    """


@pytest.hookspec(firstresult=True)
def pytest_distcompat_substitute(session: DistcompatSession) -> Substitute | None:
    """Return a substitute for the ranks of all suites; None to start ranks."""


@pytest.hookspec(firstresult=True)
def pytest_distcompat_placement(session: DistcompatSession) -> Placement | None:
    """Return where runs are, and what starts them there; None for this machine."""


@pytest.hookspec(firstresult=True)
def pytest_distcompat_run(
    session: DistcompatSession, item: pytest.Function, request: Request
) -> Ending | None:
    """Have ranks do the request to run a marked test, and return how they ended.

    None for new ranks of the session's launcher.
    """


@pytest.hookspec(firstresult=True)
def pytest_distcompat_group(session: DistcompatSession, item: pytest.Item) -> str | None:
    """Return a key that this marked test has in common with others, to run in one xdist worker.

    None if the test is alone. Extensions keep ranks for the tests with one key.
    """


@pytest.hookspec(firstresult=True)
def pytest_distcompat_process_group(world: World) -> ProcessGroup | None:
    """Return, on a rank, the process group for a test; None for a new one.

    The test does not destroy it.
    """


@pytest.hookspec(firstresult=True)
def pytest_distcompat_why_not_ready() -> str | None:
    """Wait until ranks can be started; return why they cannot, None if they can."""


@pytest.hookspec(firstresult=True)
def pytest_distcompat_pool(session: DistcompatSession, inventory: Inventory) -> Pool | None:
    """Return the pool that leases devices; None for the pool of this machine."""


@pytest.hookspec
def pytest_distcompat_preload(session: DistcompatSession) -> Sequence[str]:  # type: ignore[empty-body]
    """Return modules for fork servers to import, so that ranks need not import them."""


@pytest.hookspec
def pytest_distcompat_recorders(session: DistcompatSession) -> Sequence[str]:  # type: ignore[empty-body]
    """Return functions (``module:function``) that return a ``recording.Recorder`` for a rank."""


@pytest.hookspec
def pytest_distcompat_added_checks(  # type: ignore[empty-body]
    suite: type[CompatSuite], session: DistcompatSession
) -> Sequence[AddedCheck]:
    """Return checks to run in a suite in addition to those of its own cells."""


@pytest.hookspec
def pytest_distcompat_summary(report: Report) -> Sequence[str]:  # type: ignore[empty-body]
    """Return lines to add to the terminal's summary of all suites."""

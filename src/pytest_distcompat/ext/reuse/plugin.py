"""pytest plugin for ranks that tests share: ``--distcompat-reuse`` and its hooks.

It adds two options and the argument ``reuse`` of the mark: ``@pytest.mark.distcompat(world_size=2,
reuse="module")``. In pytest's process it registers a ``SharedRanks``, which decides which tests
share ranks, and tells it before and after each test what pytest runs next. On the ranks it gives
all tests the same process group.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.plugin.marked.arguments import AddedArgument
from pytest_distcompat.plugin.on_ranks.launched import ON_RANK
from pytest_distcompat.plugin.options import Option, choice, count

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from pytest_distcompat.ext.reuse.shared import SharedRanks
    from pytest_distcompat.plugin.session import DistcompatSession
    from pytest_distcompat.world import World

#: Which tests share ranks: none, those of a module, or all with the same number of ranks.
REUSE = ("never", "module", "session")
OPTIONS = (
    Option(
        "reuse",
        "|".join(REUSE),
        "never",
        choice(*REUSE),
        "Run marked tests that follow each other on the same ranks: "
        "of a module, or all of one world size (default: never).",
    ),
    Option(
        "reuse_limit",
        "N",
        "100",
        count(least=1),
        "Start new ranks after so many tests, where ranks are reused (default: 100).",
    ),
)
#: In the stash of pytest's configuration: the shared ranks of this process. A rank has none.
SHARED_RANKS: pytest.StashKey[SharedRanks] = pytest.StashKey()


@pytest.hookimpl(optionalhook=True)
def pytest_distcompat_options() -> tuple[Option, ...]:
    """Add the options."""
    return OPTIONS


@pytest.hookimpl(optionalhook=True)
def pytest_distcompat_mark_arguments() -> list[AddedArgument]:
    """Add the argument ``reuse`` of the mark, whose value is one of the words ``REUSE``."""
    return [AddedArgument("reuse", REUSE)]


@pytest.hookimpl(optionalhook=True)
def pytest_distcompat_preload() -> tuple[str, ...]:
    """Return the modules that fork servers import, since the ranks forked from them need these.

    ``rank_item``, which runs a test on a shared rank, is not among them, because it imports pytest.
    The same servers fork the ranks of suites (subclasses of ``CompatSuite``), which need no pytest.
    """
    return ("pytest_distcompat.ext.reuse.request_loop",)


@pytest.hookimpl(optionalhook=True)
def pytest_distcompat_configure(config: pytest.Config) -> None:
    """Import what runs an item on a rank, in a process that is a rank or will fork ranks.

    Both have ``ON_RANK`` in their configuration. A fork server that has collected the tests hands
    its configuration and its imports on to the ranks that are forked from it.
    """
    if ON_RANK in config.stash:
        from pytest_distcompat.ext.reuse import rank_item  # noqa: F401 - see the docstring


@pytest.hookimpl(optionalhook=True)
def pytest_distcompat_session(session: DistcompatSession) -> None:
    """Share ranks between the marked tests of this process, unless it is a rank."""
    if ON_RANK not in session.config.stash:
        from pytest_distcompat.ext.reuse.shared import SharedRanks

        shared = session.config.stash[SHARED_RANKS] = SharedRanks(session)
        session.config.pluginmanager.register(shared, "distcompat-shared-ranks")


# A wrapper comes around those that were registered before it. The next two hooks are in this
# module, which pytest registers before any conftest.py, and not in ``SharedRanks``, which is
# registered later: so a conftest's wrapper of the same priority comes around them.


# ``tryfirst``: ranks that are not kept have ended before wrappers without it begin the item. The
# hook after this one acts when the item's teardown is done, and needs no such order.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Note the next item, and end ranks that were kept for other tests than this one."""
    shared = item.config.stash.get(SHARED_RANKS, None)
    if shared is not None:
        shared.begin(item, nextitem)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """End ranks that are kept for no later test.

    A failure there is an error of this item's teardown.
    """
    yield
    shared = item.config.stash.get(SHARED_RANKS, None)
    if shared is not None:
        shared.end(nextitem)


@pytest.hookimpl(optionalhook=True)
def pytest_distcompat_process_group(world: World) -> ProcessGroup | None:
    """Return, on a shared rank, the group that all its tests use; None in any other process.

    The fixture that gives a test its process group calls the hook.
    """
    # ``request_loop`` is the main loop of a shared rank, and ``reused`` the state that this rank
    # keeps between tests. Another process has no need to import the module.
    loop = sys.modules.get("pytest_distcompat.ext.reuse.request_loop")
    if loop is None or loop.reused is None:
        return None
    group: ProcessGroup = loop.reused.process_group(world.backend)
    return group

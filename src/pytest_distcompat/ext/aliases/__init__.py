"""pytest plugin with the marks and base classes of other test harnesses, so that their tests run.

``pytest_plugins = ["pytest_distcompat.aliases"]`` in the top ``conftest.py`` turns this on:

- ``@pytest.mark.world_size(2)`` (composer, llm-foundry) and a class attribute ``world_size = 2``:
  the test runs on that many ranks. It gets this package's own mark, ``distcompat(world_size=2)``;
- ``DistributedTest`` and ``DistributedFixture`` (DeepSpeed's ``tests/unit/common.py``), to inherit
  from (``deepspeed_tests``);
- ``@pytest.mark.require_distributed(2)`` (LLaMA-Factory) and ``@gpu_test(gpu_count=2)``
  (torchtune): the test starts its ranks itself. It gets a fixture that lends it so many devices:
  its processes see only these. Without enough devices it is skipped.
"""

from __future__ import annotations

import os
import sys
import unittest
from collections.abc import Collection, Generator, Iterable, Iterator
from typing import Any

import pytest

from pytest_distcompat.ext.aliases.deepspeed_tests import DistributedFixture, DistributedTest
from pytest_distcompat.lease import Lease
from pytest_distcompat.leased import inherited_leak_message, leak_message, rank_environment
from pytest_distcompat.plugin.current import session_of
from pytest_distcompat.plugin.marked.declare import MARK
from pytest_distcompat.plugin.marked.outcome import unexcused
from pytest_distcompat.plugin.reporting.representation import represent

__all__ = ["DistributedFixture", "DistributedTest", "gpu_test"]

#: The marks of composer and of LLaMA-Factory. The first is also the name of the class attribute,
#: and of the argument of this package's own mark.
_SIZE = "world_size"
_DEVICES = "require_distributed"
#: The fixtures that lend devices, and that say on how many ranks a test runs.
_LENT = "distcompat_lent"
_SIZES = "distcompat_size"
#: In an item's stash (pytest's dict for plugins' data): the message about memory that the test left
#: in use on the devices lent to it; empty if it left none.
_LEAKED: pytest.StashKey[str] = pytest.StashKey()


def gpu_test(gpu_count: int = 1) -> pytest.MarkDecorator:
    """Return torchtune's mark for a test that needs that many GPUs.

    The test is skipped where there are fewer.
    """
    return pytest.mark.require_distributed(gpu_count, gpus=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """Keep the tests that a ``conftest.py`` deselects for another size than ``WORLD_SIZE``.

    Composer has such a file: its tests run under a launcher, and those for other numbers of ranks
    are deselected. Here each test has ranks of its own. So the other plugins' hooks are called once
    more for each number of ranks, with this number in ``WORLD_SIZE``. What they keep then is put
    back into the list.
    """
    collected = list(items)
    yield
    selected = set(items)
    deselected_by_size = _deselected_by_size(collected, selected)
    if not deselected_by_size or "WORLD_SIZE" in os.environ:
        return
    # The same hook of all plugins but this one.
    others = config.pluginmanager.subset_hook_caller(
        "pytest_collection_modifyitems", [sys.modules[__name__]]
    )
    restored: set[pytest.Item] = set()
    for size, candidates in deselected_by_size.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WORLD_SIZE", str(size))
            # They remove from the list what must be left out with this size too.
            others(session=session, config=config, items=candidates)
        restored.update(candidates)
    # If the order is that of the collection, it stays so. Otherwise the restored tests come last.
    in_order_of_collection = [item for item in collected if item in selected]
    if items == in_order_of_collection:
        kept = selected | restored
        items[:] = [item for item in collected if item in kept]
    else:
        # Another plugin has changed the order.
        items += [item for item in collected if item in restored]
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and "deselected" in reporter.stats:
        # pytest counts deselected items for its summary. The conftest has reported each once or
        # twice, and restored ones are none.
        reported = dict.fromkeys(reporter.stats["deselected"])
        reporter.stats["deselected"] = [item for item in reported if item not in restored]


def _deselected_by_size(
    collected: Iterable[pytest.Item], selected: Collection[pytest.Item]
) -> dict[int, list[pytest.Item]]:
    """Return the tests for several ranks that were deselected, by their world size."""
    deselected: dict[int, list[pytest.Item]] = {}
    for item in collected:
        mark = item.get_closest_marker(MARK)
        if mark is None or item in selected:
            continue
        size = mark.kwargs.get(_SIZE, 0)
        if size > 1:
            deselected.setdefault(size, []).append(item)
    return deselected


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks, for ``--strict-markers``."""
    config.addinivalue_line(
        "markers", f"{_SIZE}(n): run the test on n ranks of a process group; n may be a list."
    )
    config.addinivalue_line(
        "markers", f"{_DEVICES}(n): the test starts ranks itself; lend it n devices, or skip it."
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make an item for each world size of a test: ``test_sum[w2]`` and ``test_sum[w4]``."""
    sizes = _sizes(metafunc.definition)
    if len(sizes) > 1:
        metafunc.fixturenames.append(_SIZES)
        values = []
        for size in sizes:
            mark = pytest.mark.distcompat(world_size=size)
            values.append(pytest.param(size, marks=mark, id=f"w{size}"))
        metafunc.parametrize(_SIZES, values, indirect=True)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Add this package's mark to a test with a world size, and a fixture to one that needs devices.

    Tests with several world sizes have their marks from ``pytest_generate_tests``.
    """
    if not isinstance(item, pytest.Function):
        return
    sizes = _sizes(item)
    if len(sizes) == 1:
        item.add_marker(pytest.mark.distcompat(world_size=sizes[0]))
    if item.get_closest_marker(_DEVICES) is not None:
        item.fixturenames.insert(0, _LENT)


def _sizes(item: Any) -> list[int]:
    """Return the world sizes of a test, from its mark or its class's attribute ``world_size``.

    ``[2, 4]`` for ``@pytest.mark.world_size([2, 4])``. The list is empty for a test with this
    package's own mark, and for one that runs in pytest's own process.

    Raises:
        pytest.Collector.CollectError: The mark has a wrong argument.
    """
    test_class = getattr(item, "cls", None) or object
    if item.get_closest_marker(MARK) is not None or issubclass(test_class, unittest.TestCase):
        return []
    mark = item.get_closest_marker(_SIZE)
    if mark is None:
        sizes = _listed(getattr(test_class, _SIZE, None))
        if not _are_sizes(sizes):
            # An unrelated attribute of that name.
            return []
    else:
        sizes = _sizes_of_mark(item, mark)
    # One rank is an ordinary test, unless its class asks for a process group.
    if sizes == [1] and not issubclass(test_class, DistributedTest):
        return []
    return sizes


def _sizes_of_mark(item: Any, mark: pytest.Mark) -> list[int]:
    """Return the world sizes of the mark ``world_size`` of a test.

    Raises:
        pytest.Collector.CollectError: The mark has a wrong argument.
    """
    where = f"{item.nodeid}: @pytest.mark.{_SIZE}"
    if len(mark.args) != 1:
        raise pytest.Collector.CollectError(f"{where} takes a number of ranks, or a list of them")
    declared = mark.args[0]
    sizes = _listed(declared)
    if not _are_sizes(sizes):
        raise pytest.Collector.CollectError(
            f"{where}({declared!r}): expected whole numbers above 0"
        )
    return sizes


def _listed(declared: Any) -> list[Any]:
    """Return the declared world sizes, a list or a single one, as a list."""
    return list(declared) if isinstance(declared, (list, tuple)) else [declared]


def _are_sizes(values: Iterable[Any]) -> bool:
    """Tell whether all are whole numbers above 0; a bool is none."""
    return all(type(value) is int and value > 0 for value in values)


@pytest.fixture
def distcompat_size(request: pytest.FixtureRequest) -> int:
    """Return the world size in which the test runs."""
    return int(request.param)


@pytest.fixture
def distcompat_lent(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Lease]:
    """Lease devices for a test that starts ranks itself; its processes see no others.

    After the test it is checked whether memory of the devices is still in use.
    """
    mark = request.node.get_closest_marker(_DEVICES)
    session = session_of(request.config)
    count = int(mark.args[0])
    if mark.kwargs.get("gpus") and not session.gpus:
        pytest.skip(f"the test needs {count} GPUs, there are none to use")
    problem = session.too_large(count)
    if problem:
        pytest.skip(problem)
    request.node.stash[_LEAKED] = ""
    # Whole GPUs: what the test starts need not keep to a part of one.
    with session.pool.lease(count, who=request.node.nodeid, whole=True) as lease:
        # Memory that an earlier holder left in use, whose process died.
        for leak in lease.leak:
            session.notice(inherited_leak_message(leak))
        for name, value in rank_environment(lease, count).items():
            monkeypatch.setenv(name, value)
        yield lease
    # Memory that this test left in use; known only now, after the lease.
    leaks = [leak_message(leak) for leak in lease.own_leak]
    torch: Any = sys.modules.get("torch")
    # A process that uses a GPU itself has its memory until it ends.
    if leaks and torch is not None and torch.cuda.is_initialized():
        cause = "which may be pytest's own process: it uses a GPU too"
        leaks_text = "; ".join(leaks)
        session.notice(f"{request.node.nodeid}: {leaks_text}, {cause}")
    elif leaks:
        request.node.stash[_LEAKED] = "\n".join(
            (*leaks, f"reproduce: {session.reproduce(request.node)}")
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that leaked memory of the devices lent to it, even if it is marked xfail.

    The report of the teardown fails, because the leak is found when fixtures are torn down.
    """
    report = yield
    leaked = item.stash.get(_LEAKED, "")
    if call.when == "teardown" and leaked:
        text = leaked
        if report.longreprtext:
            text = f"{report.longreprtext}\n\n{leaked}"
        crash = getattr(report.longrepr, "reprcrash", None)
        if crash:
            represent(report, text, (crash.path, crash.lineno, ""), short=crash.message)
        else:
            represent(report, text, None, short="")
        # The report fails even if the test is marked xfail.
        unexcused(report)
    return report

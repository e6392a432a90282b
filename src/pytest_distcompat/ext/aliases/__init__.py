"""Marks and base classes of other test harnesses, so that their tests run here unchanged.

``pytest_plugins = ["pytest_distcompat.aliases"]`` in the top ``conftest.py`` turns this on:

- ``@pytest.mark.world_size(2)`` (composer, llm-foundry) and a class attribute ``world_size = 2``:
  the test runs on that many ranks;
- ``DistributedTest`` and ``DistributedFixture`` (DeepSpeed's ``tests/unit/common.py``), to inherit
  from;
- ``@pytest.mark.require_distributed(2)`` (LLaMA-Factory) and ``@gpu_test(gpu_count=2)``
  (torchtune): the test starts its ranks itself; that many devices are lent to it, or it is skipped.
"""

from __future__ import annotations

import importlib
import inspect
import os
import socket
import sys
import unittest
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat import clock
from pytest_distcompat.failures import RunFailedError
from pytest_distcompat.lease import Lease
from pytest_distcompat.leased import inherited_leak_message, leak_message, rank_environment
from pytest_distcompat.plugin.current import session_of
from pytest_distcompat.plugin.marked.declare import MARK
from pytest_distcompat.plugin.marked.outcome import unexcused
from pytest_distcompat.plugin.reporting.representation import represent

#: The marks of composer and of LLaMA-Factory.
_SIZE = "world_size"
_DEVICES = "require_distributed"
#: The fixtures that lend devices, and that say in which world size a test runs.
_LENT = "distcompat_lent"
_SIZES = "distcompat_size"
#: Memory that a test leaked on the devices lent to it.
_LEAKED: pytest.StashKey[str] = pytest.StashKey()


def gpu_test(gpu_count: int = 1) -> pytest.MarkDecorator:
    """Return torchtune's mark for a test that needs that many GPUs.

    The test is skipped where there are fewer.
    """
    return pytest.mark.require_distributed(gpu_count, gpus=True)


class DistributedTest:
    """Base class of tests that run on ``world_size`` ranks, in a process group.

    If ``world_size`` is a list, a test runs once for each. A mark ``world_size`` on a test takes
    precedence over the class. ``tmp_path``, ``tmpdir`` and ``class_tmpdir`` are one directory for
    all ranks of a test.
    https://github.com/deepspeedai/DeepSpeed/blob/master/tests/unit/common.py
    """

    world_size: int | Sequence[int] = 2
    #: Whether the test begins with a process group.
    init_distributed: bool = True

    @pytest.fixture(autouse=True)
    def _initialised(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if self.init_distributed:
            request.getfixturevalue("process_group")
            if "deepspeed" in sys.modules:
                sys.modules["deepspeed"].init_distributed()

    @pytest.fixture
    def tmp_path(self, shared_dir: Path) -> Path:
        """Return the directory that the parent made for all ranks."""
        return shared_dir

    @pytest.fixture
    def class_tmpdir(self, tmpdir: Any) -> Any:
        """Return the test's own directory: each test has ranks and directories of its own."""
        return tmpdir


class _FixtureClass(type):
    """Metaclass that makes a fixture of each class with a world size.

    A class without one is a base class.
    """

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        created = super().__new__(cls, name, bases, namespace)
        size = getattr(created, _SIZE)
        if size is None:
            return created
        if type(size) is not int or size < 1:
            raise TypeError(f"{name}.{_SIZE} is {size!r}: expected a whole number above 0")
        _CLASSES[created.__module__, name] = created
        return _fixture_of(created)


#: The fixture classes, by module and name; in its module, the fixture replaces the class.
_CLASSES: dict[tuple[str, str], Any] = {}


class DistributedFixture(metaclass=_FixtureClass):
    """Base class of fixtures that run on ranks of their own before the test.

    The method ``run`` runs on ``world_size`` ranks. Its arguments are fixtures, and go to the ranks
    by pickle. Rank 0 of the test starts these ranks, on the devices that it has, and the test's
    other ranks wait.
    https://github.com/deepspeedai/DeepSpeed/blob/master/tests/unit/common.py
    """

    world_size: int | None = None
    #: Whether ``run`` begins with a process group.
    init_distributed: bool = True


def _fixture_of(cls: Any) -> Any:
    """Return the fixture of a class, with the arguments of its ``run``."""

    def fixture(request: pytest.FixtureRequest, **values: Any) -> None:
        done: Path | None = None
        if "RANK" in os.environ:
            shared = request.getfixturevalue("shared_dir")
            done = shared.with_name(f"{shared.name}-{cls.__name__}")
        if os.environ.get("RANK", "0") == "0":
            _spawn_fixture(cls, values)
            if done is not None:
                done.touch()
        elif done is not None:
            # No time limit of its own: the test has one, and a rank that fails ends this one too.
            clock.wait_until(done.exists, float("inf"), every=0.05)

    # pytest gives a fixture what its signature names.
    signature = [inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for name, parameter in inspect.signature(cls.run).parameters.items():
        if name not in {"self", "request"}:
            signature.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    # Functions take attributes.
    fixture.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    return pytest.fixture(name=cls.__name__)(fixture)


def _spawn_fixture(cls: Any, values: Mapping[str, Any]) -> None:
    """Run a fixture class on ranks of its own, and wait for them.

    Raises:
        RunFailedError: A rank failed.
    """
    import torch

    multiprocessing: Any = torch.multiprocessing
    arguments = (cls.__module__, cls.__name__, _free_port(), values)
    try:
        multiprocessing.spawn(_run_fixture, args=arguments, nprocs=cls.world_size)
    except (
        multiprocessing.ProcessRaisedException,
        multiprocessing.ProcessExitedException,
    ) as error:
        text = str(error).strip()
        last_line = text.splitlines()[-1]
        headline = f"rank {error.error_index} of the fixture {cls.__name__}: {last_line}"
        raise RunFailedError(f"{headline}\n\n{text}") from None


def _free_port() -> str:
    """Return a port of this machine that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def _run_fixture(rank: int, module: str, name: str, port: str, values: Mapping[str, Any]) -> None:
    """Run the method ``run`` of a fixture class on one rank."""
    importlib.import_module(module)
    cls = _CLASSES[module, name]
    size = str(cls.world_size)
    for variable in list(os.environ):
        if variable.startswith("TORCHELASTIC_"):
            del os.environ[variable]
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "LOCAL_SIZE": size}
    import torch

    if cls.init_distributed:
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(rank)
            backend = "nccl"
        torch.distributed.init_process_group(backend)
        if "deepspeed" in sys.modules:
            sys.modules["deepspeed"].init_distributed()
    cls().run(**values)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """Keep the tests that a ``conftest.py`` deselects for another size than ``WORLD_SIZE``.

    Composer has such a file.
    """
    collected = list(items)
    yield
    selected = set(items)
    deselected_by_size = _deselected_by_size(collected, selected)
    if not deselected_by_size or "WORLD_SIZE" in os.environ:
        return
    others = config.pluginmanager.subset_hook_caller(
        "pytest_collection_modifyitems", [sys.modules[__name__]]
    )
    restored: set[pytest.Item] = set()
    for size, candidates in deselected_by_size.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WORLD_SIZE", str(size))
            # It removes from the list what is for another size still.
            others(session=session, config=config, items=candidates)
        restored.update(candidates)
    if [item for item in collected if item in selected] == items:
        items[:] = [item for item in collected if item in selected | restored]
    else:
        # Another plugin has changed the order.
        items += [item for item in collected if item in restored]
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and "deselected" in reporter.stats:
        # The conftest reported each item once or twice.
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
    """Make an item for each world size of a test."""
    sizes = _sizes(metafunc.definition)
    if len(sizes) > 1:
        metafunc.fixturenames.append(_SIZES)
        values = []
        for size in sizes:
            mark = pytest.mark.distcompat(world_size=size)
            values.append(pytest.param(size, marks=mark, id=f"w{size}"))
        metafunc.parametrize(_SIZES, values, indirect=True)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Add the mark of this package to a test with a mark or base class of another one."""
    if not isinstance(item, pytest.Function):
        return
    sizes = _sizes(item)
    if len(sizes) == 1:
        item.add_marker(pytest.mark.distcompat(world_size=sizes[0]))
    if item.get_closest_marker(_DEVICES) is not None:
        item.fixturenames.insert(0, _LENT)


def _sizes(item: Any) -> list[int]:
    """Return the world sizes of a test.

    None for a test with this package's mark, or on one process.
    """
    test_class = getattr(item, "cls", None) or object
    if item.get_closest_marker(MARK) is not None or issubclass(test_class, unittest.TestCase):
        return []
    mark = item.get_closest_marker(_SIZE)
    if mark is None:
        declared = getattr(test_class, _SIZE, None)
        sizes = _listed(declared)
        if not _are_sizes(sizes):
            # An unrelated attribute of that name.
            return []
    else:
        where = f"{item.nodeid}: @pytest.mark.{_SIZE}"
        if len(mark.args) != 1:
            raise pytest.Collector.CollectError(
                f"{where} takes a number of ranks, or a list of them"
            )
        declared = mark.args[0]
        sizes = _listed(declared)
        if not _are_sizes(sizes):
            raise pytest.Collector.CollectError(
                f"{where}({declared!r}): expected whole numbers above 0"
            )
    if sizes == [1] and not issubclass(test_class, DistributedTest):
        return []
    return sizes


def _listed(declared: Any) -> list[Any]:
    """Return a list of world sizes from a list or from one of them."""
    return list(declared) if isinstance(declared, (list, tuple)) else [declared]


def _are_sizes(values: Iterable[Any]) -> bool:
    """Tell whether all are whole numbers above 0; True is none."""
    return all(type(value) is int and value > 0 for value in values)


@pytest.fixture
def distcompat_size(request: pytest.FixtureRequest) -> int:
    """Return the world size in which the test runs."""
    return int(request.param)


@pytest.fixture
def distcompat_lent(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Lease]:
    """Lease devices for a test that starts ranks itself; its processes see no others."""
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
        for leak in lease.leak:
            session.notice(inherited_leak_message(leak))
        for name, value in rank_environment(lease, count).items():
            monkeypatch.setenv(name, value)
        yield lease
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
    """Fail a test that leaked memory, even if it is marked xfail.

    This comes after its fixtures are torn down.
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
        unexcused(report)
    return report

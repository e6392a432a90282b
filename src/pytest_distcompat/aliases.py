"""Names under which other harnesses run distributed tests, so that such tests move unchanged.

``pytest_plugins = ["pytest_distcompat.aliases"]`` in the top ``conftest.py`` turns this on:

- ``@pytest.mark.world_size(2)`` (composer, llm-foundry) and a class attribute ``world_size = 2``: the test runs on that many
  ranks;
- ``DistributedTest`` and ``DistributedFixture`` (DeepSpeed's ``tests/unit/common.py``), to inherit from;
- ``@pytest.mark.require_distributed(2)`` (LLaMA-Factory) and ``@gpu_test(gpu_count=2)`` (torchtune): the test starts its ranks
  itself; that many devices are lent to it, or it is skipped.
"""

from __future__ import annotations

import importlib
import inspect
import os
import socket
import sys
import unittest
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat import clock
from pytest_distcompat.failures import RunFailedError
from pytest_distcompat.lease import Lease
from pytest_distcompat.leased import inherited, told
from pytest_distcompat.plugin.current import session_of
from pytest_distcompat.plugin.marked import MARK
from pytest_distcompat.plugin.outcome import unexcused
from pytest_distcompat.plugin.representation import represent

_SIZE, _DEVICES = "world_size", "require_distributed"
_LENT, _SIZES = "distcompat_lent", "distcompat_size"
#: What a test left on the devices lent to it.
_LEAKED: pytest.StashKey[str] = pytest.StashKey()


def gpu_test(gpu_count: int = 1) -> pytest.MarkDecorator:
    """The test needs so many GPUs. It is skipped where there are fewer.

    https://github.com/pytorch/torchtune/blob/main/tests/test_utils.py
    """
    return pytest.mark.require_distributed(gpu_count, gpus=True)


class DistributedTest:
    """Its tests run on ``world_size`` ranks, once for each if it is a list, with the process group that they expect.

    A mark ``world_size`` on a test goes before the class. ``tmp_path``, ``tmpdir`` and ``class_tmpdir`` are one directory
    for all ranks of a test. https://github.com/deepspeedai/DeepSpeed/blob/master/tests/unit/common.py
    """

    world_size: int | Sequence[int] = 2
    #: Whether there is to be a process group when the test begins.
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
        """There the parent makes it, for all ranks."""
        return shared_dir

    @pytest.fixture
    def class_tmpdir(self, tmpdir: Any) -> Any:
        """Not that of other tests: each has ranks and directories of its own."""
        return tmpdir


class _FixtureClass(type):
    """Makes a fixture of each class that says on how many ranks it runs; one that does not is there to inherit from."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        made = super().__new__(cls, name, bases, namespace)
        size = getattr(made, _SIZE)
        if size is None:
            return made
        if type(size) is not int or size < 1:
            raise TypeError(f"{name}.{_SIZE} is {size!r}: expected a whole number above 0")
        _CLASSES[made.__module__, name] = made
        return _fixture_of(made)


#: The classes of fixtures, by module and name: in the module the fixture has the name.
_CLASSES: dict[tuple[str, str], Any] = {}


class DistributedFixture(metaclass=_FixtureClass):
    """A fixture whose method ``run`` is done by ``world_size`` ranks of its own before the test, which may have others.

    Its arguments are fixtures, and go to the ranks by pickle. Rank 0 of the test starts these ranks, on the devices that it has,
    and the test's other ranks wait. https://github.com/deepspeedai/DeepSpeed/blob/master/tests/unit/common.py
    """

    world_size: int | None = None
    #: Whether there is to be a process group when ``run`` begins.
    init_distributed: bool = True


def _fixture_of(of: Any) -> Any:
    """Make the fixture of a class, with the arguments of its ``run``."""

    def fixture(request: pytest.FixtureRequest, **values: Any) -> None:
        import torch

        multiprocessing: Any = torch.multiprocessing
        shared = request.getfixturevalue("shared_dir") if "RANK" in os.environ else None
        done = shared.with_name(f"{shared.name}-{of.__name__}") if shared is not None else None
        if os.environ.get("RANK", "0") == "0":
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = str(free.getsockname()[1])
            told = of.__module__, of.__name__, port, values
            try:
                multiprocessing.spawn(_run_fixture, args=told, nprocs=of.world_size)
            except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
                story = str(error).strip()
                said = f"rank {error.error_index} of the fixture {of.__name__}: {story.splitlines()[-1]}"
                raise RunFailedError(f"{said}\n\n{story}") from None
            if done is not None:
                done.touch()
        elif done is not None:
            # As long as the test may run: who fails meanwhile ends this rank too.
            clock.wait_until(done.exists, float("inf"), every=0.05)

    parameters = [one for one in inspect.signature(of.run).parameters.values() if one.name != "self"]
    asked = inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters if one.name != "request"]
    fixture.__signature__ = inspect.Signature([asked, *named])  # type: ignore[attr-defined]  # pytest asks for it
    return pytest.fixture(name=of.__name__)(fixture)


def _run_fixture(rank: int, module: str, name: str, port: str, values: Mapping[str, Any]) -> None:
    """Be a rank of a fixture."""
    importlib.import_module(module)
    of = _CLASSES[module, name]
    size = str(of.world_size)
    for variable in [one for one in os.environ if one.startswith("TORCHELASTIC_")]:
        del os.environ[variable]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "LOCAL_SIZE": size}
    import torch

    if of.init_distributed:
        if torch.cuda.is_available():
            torch.cuda.set_device(rank)
        torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        if "deepspeed" in sys.modules:
            sys.modules["deepspeed"].init_distributed()
    of().run(**values)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """Have a ``conftest.py`` that keeps the tests of ``WORLD_SIZE`` ranks, as composer's does, keep those of all sizes.

    It expects to be run by torchrun once for each number of ranks; here no test of several would be left, and nobody told.
    """
    found = list(items)
    yield
    kept = {id(item) for item in items}
    gone: dict[int, list[pytest.Item]] = {}
    for item in found:
        mark = item.get_closest_marker(MARK)
        size = mark.kwargs.get(_SIZE, 0) if mark is not None else 0
        if id(item) not in kept and size > 1:
            gone.setdefault(size, []).append(item)
    if not gone or "WORLD_SIZE" in os.environ:
        return
    others = config.pluginmanager.subset_hook_caller("pytest_collection_modifyitems", [sys.modules[__name__]])
    for size, wanted in gone.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WORLD_SIZE", str(size))
            others(session=session, config=config, items=wanted)
    back = {id(item) for wanted in gone.values() for item in wanted}
    if [item for item in found if id(item) in kept] == items:
        items[:] = [item for item in found if id(item) in kept | back]
    else:
        items += [item for item in found if id(item) in back]
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and "deselected" in reporter.stats:
        # Each was reported once or twice.
        once = {id(item): item for item in reporter.stats["deselected"] if id(item) not in back}
        reporter.stats["deselected"] = list(once.values())


def pytest_configure(config: pytest.Config) -> None:
    """The marks, for ``--strict-markers``."""
    config.addinivalue_line("markers", f"{_SIZE}(n): run the test on n ranks of a process group; n may be a list.")
    config.addinivalue_line("markers", f"{_DEVICES}(n): the test starts ranks itself; lend it n devices, or skip it.")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of several sizes is an item for each."""
    sizes = _sizes(metafunc.definition)
    if len(sizes) > 1:
        metafunc.fixturenames.append(_SIZES)
        values = [pytest.param(size, marks=pytest.mark.distcompat(world_size=size), id=f"w{size}") for size in sizes]
        metafunc.parametrize(_SIZES, values, indirect=True)


def pytest_itemcollected(item: pytest.Item) -> None:
    """What the names say, in ours."""
    if not isinstance(item, pytest.Function):
        return
    sizes = _sizes(item)
    if len(sizes) == 1:
        item.add_marker(pytest.mark.distcompat(world_size=sizes[0]))
    if item.get_closest_marker(_DEVICES) is not None:
        item.fixturenames.insert(0, _LENT)


def _sizes(item: Any) -> list[int]:
    """On how many ranks the test runs; none for one that stays as it is: with a mark of ours, or on one process."""
    test_class = getattr(item, "cls", None)
    if item.get_closest_marker(MARK) is not None or (test_class and issubclass(test_class, unittest.TestCase)):
        return []
    mark = item.get_closest_marker(_SIZE)
    if mark is not None and len(mark.args) != 1:
        raise pytest.Collector.CollectError(
            f"{item.nodeid}: @pytest.mark.{_SIZE} takes a number of ranks, or a list of them"
        )
    wanted: Any = mark.args[0] if mark is not None else getattr(test_class, _SIZE, None)
    sizes: list[Any] = list(wanted) if isinstance(wanted, (list, tuple)) else [wanted]
    if not all(type(size) is int and size > 0 for size in sizes):
        if mark is None:
            # A property, or a thing of another name, on a class that is not about ranks.
            return []
        raise pytest.Collector.CollectError(
            f"{item.nodeid}: @pytest.mark.{_SIZE}({wanted!r}): expected whole numbers above 0"
        )
    alone = sizes == [1] and not (test_class and issubclass(test_class, DistributedTest))
    return [] if alone else sizes


@pytest.fixture
def distcompat_size(request: pytest.FixtureRequest) -> int:
    """Which of its sizes the test runs in."""
    return int(request.param)


@pytest.fixture
def distcompat_lent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lease]:
    """The devices of a test that starts ranks itself: nobody else has them, and its processes see no others."""
    mark = request.node.get_closest_marker(_DEVICES)
    session = session_of(request.config)
    count = int(mark.args[0])
    if mark.kwargs.get("gpus") and not session.gpus:
        pytest.skip(f"the test needs {count} GPUs, there are none to use")
    problem = session.too_large(count)
    if problem:
        pytest.skip(problem)
    request.node.stash[_LEAKED] = ""
    with session.pool.lease(count, who=request.node.nodeid) as lease:
        for leak in lease.leak:
            session.notice(inherited(leak))
        for name, value in lease.environment.items():
            monkeypatch.setenv(name, value)
        yield lease
    left = [told(leak) for leak in lease.own_leak]
    if left and _has_context():
        own = "which may be pytest's own process: it uses a GPU too"
        session.notice(f"{request.node.nodeid}: {'; '.join(left)}, {own}")
    elif left:
        request.node.stash[_LEAKED] = "\n".join((*left, f"reproduce: {session.reproduce(request.node)}"))


def _has_context() -> bool:
    """Whether this process uses a GPU itself, which shows there until it ends."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A leak is the test's failure, whatever it did otherwise and an xfail mark says: when all its fixtures are gone."""
    report = yield
    leaked = item.stash.get(_LEAKED, "")
    if call.when == "teardown" and leaked:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = "\n\n".join(filter(None, (report.longreprtext, leaked)))
        if crash is None:
            represent(report, text)
        else:
            represent(report, text, (crash.path, crash.lineno, ""), short=crash.message)
        unexcused(report)
    return report

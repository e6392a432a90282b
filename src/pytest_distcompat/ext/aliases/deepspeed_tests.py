"""Base classes of DeepSpeed's tests: ``DistributedTest`` and ``DistributedFixture``.

DeepSpeed's suite defines them in ``tests/unit/common.py``
(https://github.com/deepspeedai/DeepSpeed/blob/master/tests/unit/common.py). A suite that inherits
from the classes of this module instead runs unchanged::

    class TestZero(DistributedTest):
        world_size = 2

        def test_step(self, tmpdir): ...

A test of such a class runs on that many ranks, which the package's plugin starts: ``ext/aliases``
adds the mark ``distcompat(world_size=2)`` to it.
"""

from __future__ import annotations

import importlib
import inspect
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat import clock
from pytest_distcompat.failures import RunFailedError

#: The class attribute with the number of ranks.
_SIZE = "world_size"


class DistributedTest:
    """Base class of tests that run on ``world_size`` ranks, in a process group.

    If ``world_size`` is a list, a test runs once for each number. A mark ``world_size`` on a test
    takes precedence over the class. ``tmp_path``, ``tmpdir`` and ``class_tmpdir`` are one directory
    for all ranks of a test.
    """

    world_size: int | Sequence[int] = 2
    #: Whether the test begins with a process group.
    init_distributed: bool = True

    @pytest.fixture(autouse=True)
    def _initialised(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make the process group before a test, unless its class does without."""
        # DeepSpeed's class sets this variable too.
        monkeypatch.setenv("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if self.init_distributed:
            request.getfixturevalue("process_group")
            # DeepSpeed takes the process group that exists. A suite that has not imported it does
            # not need it.
            if "deepspeed" in sys.modules:
                sys.modules["deepspeed"].init_distributed()

    @pytest.fixture
    def tmp_path(self, shared_dir: Path) -> Path:
        """Return one directory for all ranks of the test, as ``shared_dir`` does."""
        return shared_dir

    @pytest.fixture
    def class_tmpdir(self, tmpdir: Any) -> Any:
        """Return the test's own directory, where DeepSpeed's suite has one for the whole class.

        With this plugin each test has ranks and a directory of its own.
        """
        return tmpdir


class _FixtureClass(type):
    """Metaclass that makes a pytest fixture of each class with a world size.

    So the name ``Saved`` in ``class Saved(DistributedFixture): world_size = 2`` stands for a
    fixture, which a test names as its argument. A class without a world size stays a class, from
    which others inherit.
    """

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        created = super().__new__(cls, name, bases, namespace)
        size = getattr(created, _SIZE)
        if size is None:
            return created
        # Not ``isinstance``: True is an int too.
        if type(size) is not int or size < 1:
            raise TypeError(f"{name}.{_SIZE} is {size!r}: expected a whole number above 0")
        _CLASSES[created.__module__, name] = created
        return _fixture_of(created)


#: The fixture classes, by module and name. They are kept because in its module the fixture replaces
#: the class.
_CLASSES: dict[tuple[str, str], Any] = {}


class DistributedFixture(metaclass=_FixtureClass):
    """Base class of fixtures that run on ranks of their own before the test.

    The method ``run`` runs on ``world_size`` ranks, which may be another number than that of the
    test: it saves a checkpoint on four ranks for a test on two, say. Its arguments are fixtures,
    and go to the ranks by pickle. Rank 0 of the test starts these ranks, on the devices that it
    has, and the test's other ranks wait.
    """

    world_size: int | None = None
    #: Whether ``run`` begins with a process group.
    init_distributed: bool = True


def _fixture_of(cls: Any) -> Any:
    """Return the fixture of a class, with the arguments of its ``run``."""

    def fixture(request: pytest.FixtureRequest, **values: Any) -> None:
        # The file that tells the test's other ranks that the fixture's ranks are done; None in a
        # test on one process.
        done: Path | None = None
        if "RANK" in os.environ:
            # Beside the directory that the ranks share, not in it: that is the test's ``tmpdir``.
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

    Args:
        cls: The fixture class.
        values: By name, the arguments of its ``run``.

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
    """Run the method ``run`` of a fixture class on one rank; ``torch.multiprocessing`` calls it.

    Args:
        rank: The number of the rank.
        module: The name of the class's module.
        name: The name of the class.
        port: A free port, on which the ranks meet.
        values: By name, the arguments of ``run``.
    """
    importlib.import_module(module)
    cls = _CLASSES[module, name]
    size = str(cls.world_size)
    # The process is a child of a rank of torchrun's agent. With these variables torch would take
    # the store of that launch.
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

"""Entry point of a simulation: takes the part of each rank that differs, without peers and without values.

Floating-point tensors are fake (shape and dtype alone), whole numbers are real: data and masks keep
their control flow. torch's fake process group takes every collective for done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pytest_distcompat.cell import Cell
from pytest_distcompat.decode import decode
from pytest_distcompat.drivers import find_driver, preload_of
from pytest_distcompat.events import Done, Start
from pytest_distcompat.ext.simulation.status import SIMULATED
from pytest_distcompat.launch.process import die_with_parent
from pytest_distcompat.launch.rank import prepare, report_error
from pytest_distcompat.launch.rank_log import RankLog
from pytest_distcompat.launch.request import Request
from pytest_distcompat.probe.layouts import alike_ranks
from pytest_distcompat.probe.observe import Observer
from pytest_distcompat.probe.tensors import valueless
from pytest_distcompat.run_paths import SuitePayload
from pytest_distcompat.trace import StandIn
from pytest_distcompat.worker import Rank
from pytest_distcompat.world import World

#: What a rank of a simulation does: one step sends what each of them sends.
ACTIONS = ("build_model", "build", "step")


def main(path: str) -> None:
    """Simulate the request in that file: rank 0, then one rank of each class of ranks that hold as much as no rank before."""
    die_with_parent()
    request = Request.read(path)
    prepare(request)
    asked = decode(SuitePayload, request.payload)
    for name in preload_of(find_driver(asked.driver), [Cell.parse(asked.cell)]):
        importlib.import_module(name)
    _, *others = _in_a_fork(request, (0, ()))
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(
            threads.map(
                functools.partial(_in_a_fork, request), ((ranks[0], ranks) for ranks in others)
            )
        )


def _in_a_fork(request: Request, part: tuple[int, tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Take the part of a rank in a process of its own: DTensor keeps the meshes and groups of an earlier one."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
        return process.submit(_simulate, request, *part).result()


def _simulate(request: Request, number: int, stands_for: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Take the part of one rank; return the classes of ranks, the first that of rank 0, if that is the rank."""
    die_with_parent()
    asked = decode(SuitePayload, request.payload)
    place = {
        "RANK": number,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": request.world_size,
        "LOCAL_WORLD_SIZE": 1,
    }
    os.environ.update({name: str(value) for name, value in place.items()})
    with contextlib.closing(RankLog(request.directory, number)) as log:
        log.write(Start(os.getpid()))
        try:
            with fake_ranks(number, request.world_size):
                driver = find_driver(asked.driver)(
                    Cell.parse(asked.cell), World.from_environment("cpu")
                )
                run = dataclasses.replace(asked.run, actions=ACTIONS)
                rank = _SimulatedRank(driver, run, asked.paths, Observer(), log)
                rank.classes = [stands_for]
                rank.perform()
        except BaseException as error:
            report_error(log, error)
            raise
        log.write(Done(os.getpid()))
    return rank.classes


class _SimulatedRank(Rank):
    """Actions of one rank without peers; its snapshots stand for those of all ranks that hold as much."""

    #: The first are the ranks that this one stands for.
    classes: list[tuple[int, ...]]

    def _end(self, infos: Mapping[str, Any], seconds: float) -> None:
        if self.run.actions[self.index] == "build" and not self.classes[0]:
            self.classes = alike_ranks(self.driver.model.parameters(), self.driver.world.size)
        steps = self.run.actions.count("step")
        stand_in = StandIn(SIMULATED.name, self.classes[0], steps)
        # The process's peak is no rank's.
        super()._end({**infos, "memory": 0, "stand_in": stand_in}, seconds)


@contextlib.contextmanager
def fake_ranks(rank: int, size: int) -> Iterator[None]:
    """Be that rank of a process group without peers; tensors made inside have no values, unless they are of whole numbers."""
    # All of it is private: torch's fake process group (registered as a backend by the import), fake
    # tensors, and the function that disables modes. ``tests/launch/test_simulated.py`` fails when
    # they change.
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def again(*_: Any, **__: Any) -> None:
        """Take the place of ``init_process_group``, which a trainer may call without looking."""

    store: Any = FakeStore()
    distributed.init_process_group("fake", store=store, rank=rank, world_size=size)
    begin, distributed.init_process_group = distributed.init_process_group, again
    # ``Module.to`` swaps fake parameters in place, which torch refuses where it holds weak
    # references to them itself.
    utils: Any = torch.utils
    checked, utils.weakref = utils.weakref, SimpleNamespace(getweakrefs=lambda _: ())
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _WholeNumbers(), _EqualChunks():
            yield
    finally:
        utils.weakref, distributed.init_process_group = checked, begin
        distributed.destroy_process_group()


class _WholeNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves the base class untyped
    """Dispatch mode above fake tensors: what is made of whole numbers is real, and a number read from a fake tensor is 1."""

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensor

        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = FakeTensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and self._fake in types:  # noqa: SLF001 - an operator
            return _one(args[0].dtype)
        if not {*types} - _PLAIN and func.namespace != "c10d":
            if _has_tensor((*args, *given.values())):
                return _really(func, args, given)
            made = func(*args, **given)
            whole = isinstance(made, torch.Tensor) and not (
                made.is_floating_point() or made.is_complex()
            )
            return _really(func, args, given) if whole else made
        return func(*args, **given)


class _EqualChunks(TorchFunctionMode):
    """Mode in which chunks of a tensor without values that are equally large are one tensor: ``fully_shard`` makes one a rank.

    Where the tensor is shorter than there are ranks, it makes empty ones of the first chunk
    (``new_empty(0)``).
    """

    def __init__(self) -> None:
        super().__init__()
        self._first = self._empty = torch.empty(0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.chunk and valueless(args[0]):
            chunks = _chunk(*args, **kwargs or {})
            self._first, self._empty = chunks[0], chunks[0].new_empty(0)
            return chunks
        if (
            func is torch.Tensor.new_empty
            and args[0] is self._first
            and args[1:] == (0,)
            and not kwargs
        ):
            return self._empty
        return func(*args, **kwargs or {})


def _chunk(tensor: torch.Tensor, chunks: int, dim: int = 0) -> tuple[torch.Tensor, ...]:
    length = tensor.shape[dim]
    size = -(-length // chunks)
    whole, rest = divmod(length, size) if length else (0, 0)
    first = (tensor.narrow(dim, 0, size),) * whole
    return first + ((tensor.narrow(dim, length - rest, rest),) if rest or not length else ())


#: The types of real tensors.
_PLAIN = {torch.Tensor, torch.nn.Parameter}


def _really(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    with _disable_current_modes():
        return func(*args, **kwargs)


def _one(dtype: torch.dtype) -> float | int | bool:
    return 1.0 if dtype.is_floating_point else True if dtype is torch.bool else 1


def _has_tensor(values: Sequence[Any]) -> bool:
    return any(
        isinstance(one, torch.Tensor) or (isinstance(one, (list, tuple)) and _has_tensor(one))
        for one in values
    )


if __name__ == "__main__":
    main(sys.argv[1])

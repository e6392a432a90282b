"""Entry point of a simulation: one process takes the part of each rank that differs.

``launcher.SimulatingLauncher`` starts it for each run of a suite: ``python -m
pytest_distcompat.ext.simulation.fake_ranks request.json``. It does what the ranks of such a run do
(``worker.Rank``): it builds the model with the *driver*, the class for the trainer under test,
takes a step, and writes a snapshot of the model and the optimizer to the rank's log. But no other
rank exists, and no values are computed:

- Floating-point tensors are fake (torch's ``FakeTensor``: shape and dtype alone). Whole numbers are
  real, so that data and masks keep their control flow.
- torch's fake process group takes every collective for done.

Most ranks hold as much as another one. So rank 0 is simulated first. It finds the classes of ranks
that hold equally much of each parameter: with 5 rows on 4 ranks these are ``(0, 1)``, ``(2,)`` and
``(3,)``. Then one rank of each further class is simulated, each in a process of its own. A snapshot
says for which ranks it stands (``trace.StandIn``), and there are no logs of the other ranks.
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
from pytest_distcompat.probe.meshes import alike_ranks
from pytest_distcompat.probe.observe import Observer
from pytest_distcompat.probe.tensors import valueless
from pytest_distcompat.run_paths import SuitePayload
from pytest_distcompat.trace import StandIn
from pytest_distcompat.worker import Rank
from pytest_distcompat.world import World

#: The actions of a simulated rank. One step is enough: each runs the same collectives.
ACTIONS = ("build_model", "build", "step")

#: Ranks that hold as much of each parameter as each other.
RankClass = tuple[int, ...]


def main(path: str) -> None:
    """Simulate the request in that file: rank 0 first, then one rank of each other class."""
    die_with_parent()
    request = Request.read(path)
    prepare(request)
    payload = decode(SuitePayload, request.payload)
    # Imported once, in the process from which the simulated ranks are forked.
    for name in preload_of(find_driver(payload.driver), [Cell.parse(payload.cell)]):
        importlib.import_module(name)
    classes = _in_a_fork(request, _Part(0, ()))
    # The first class is that of rank 0, which is done.
    parts = [_Part(ranks[0], ranks) for ranks in classes[1:]]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        # ``map`` raises the error of a call only where its result is read: the list reads all.
        list(threads.map(functools.partial(_in_a_fork, request), parts))


@dataclasses.dataclass(frozen=True)
class _Part:
    """The part of one rank in a simulation.

    Attributes:
        rank: The rank.
        stands_for: The ranks that hold as much, itself among them. Empty for rank 0, which finds
            out the classes.
    """

    rank: int
    stands_for: RankClass


def _in_a_fork(request: Request, part: _Part) -> list[RankClass]:
    """Take the part of a rank in a process of its own, and return what ``_simulate`` returns.

    In one process the second rank would meet what torch keeps of the first: DTensor stores meshes
    and groups.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
        return process.submit(_simulate, request, part).result()


def _simulate(request: Request, part: _Part) -> list[RankClass]:
    """Take the part of one rank.

    Returns:
        For rank 0 the classes of ranks, its own first; for any other rank its own class alone.
    """
    die_with_parent()
    number = part.rank
    payload = decode(SuitePayload, request.payload)
    # As if each rank were alone on its machine: this process acts as one rank only.
    place = {
        "RANK": number,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": request.world_size,
        "LOCAL_WORLD_SIZE": 1,
    }
    for name, value in place.items():
        os.environ[name] = str(value)
    with contextlib.closing(RankLog(request.directory, number)) as log:
        log.write(Start(os.getpid()))
        try:
            with fake_ranks(number, request.world_size):
                cell = Cell.parse(payload.cell)
                driver = find_driver(payload.driver)(cell, World.from_environment("cpu"))
                run = dataclasses.replace(payload.run, actions=ACTIONS)
                rank = _SimulatedRank(driver, run, payload.paths, Observer(), log)
                rank.classes = [part.stands_for]
                rank.perform()
        except BaseException as error:
            report_error(log, error)
            raise
        log.write(Done(os.getpid()))
    return rank.classes


class _SimulatedRank(Rank):
    """A rank of a suite's run without peers, whose snapshots stand for all ranks of its class."""

    #: The classes of ranks. The first has the ranks for which this one stands; only rank 0 has
    #: others.
    classes: list[tuple[int, ...]]

    def _end(self, infos: Mapping[str, Any], seconds: float) -> None:
        """End an action: log its snapshot, with the ranks that it stands for."""
        # Rank 0 finds out the classes once the model is sharded.
        is_build = self.run.actions[self.index] == "build"
        if is_build and not self.classes[0]:
            parameters = self.driver.model.parameters()
            self.classes = alike_ranks(parameters, self.driver.world.size)
        steps = self.run.actions.count("step")
        stand_in = StandIn(SIMULATED.name, self.classes[0], steps)
        # Without values the process's peak of memory is not that of a rank.
        super()._end({**infos, "memory": 0, "stand_in": stand_in}, seconds)


@contextlib.contextmanager
def fake_ranks(rank: int, size: int) -> Iterator[None]:
    """Be that rank of a process group without peers, in a ``with`` block.

    Tensors made inside have no values, unless they are of whole numbers.

    Args:
        rank: The rank.
        size: The number of ranks of the group.
    """
    # All of it is private in torch: the fake process group (registered as a backend by the import),
    # fake tensors, and ``_disable_current_modes``. ``tests/launch/test_simulated.py`` fails when
    # they change.
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def again(*_: Any, **__: Any) -> None:
        """Do nothing, in place of ``init_process_group``: a trainer calls it once more."""

    store: Any = FakeStore()
    distributed.init_process_group("fake", store=store, rank=rank, world_size=size)
    begin = distributed.init_process_group
    distributed.init_process_group = again
    # ``Module.to`` swaps fake parameters in place, which torch refuses for a tensor with weak
    # references. torch itself makes such references, so here it sees none.
    utils: Any = torch.utils
    weakref = utils.weakref
    utils.weakref = SimpleNamespace(getweakrefs=lambda _: ())
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _WholeNumbers(), _EqualChunks():
            yield
    finally:
        utils.weakref = weakref
        distributed.init_process_group = begin
        distributed.destroy_process_group()


# torch leaves the base class untyped.
class _WholeNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode above fake tensors: it sees each operator, and makes some results real.

    What is computed from real tensors alone is real, and so is a new tensor of whole numbers. A
    number that code reads from a fake tensor, as by ``loss.item()``, is 1.
    """

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensor

        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = FakeTensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        # The operator behind ``tensor.item()``.
        reads_number = func is torch.ops.aten._local_scalar_dense.default  # noqa: SLF001
        if reads_number and self._fake in types:
            return _number_one(args[0].dtype)
        # Fake tensors, DTensors and collectives go on to the modes below.
        has_other_types = bool({*types} - _PLAIN)
        if has_other_types or func.namespace == "c10d":
            return func(*args, **keywords)
        if _has_tensor((*args, *keywords.values())):
            return _really(func, args, keywords)
        # An operator without tensors makes a new one, as ``arange`` does. With the mode below it is
        # fake: if it is of whole numbers, it is made again, as a real one.
        made = func(*args, **keywords)
        if isinstance(made, torch.Tensor) and _is_of_whole_numbers(made):
            return _really(func, args, keywords)
        return made


class _EqualChunks(TorchFunctionMode):
    """Mode in which equally large chunks of a tensor without values are one tensor.

    It saves time: ``fully_shard`` makes a chunk for each rank, a thousand for a thousand ranks,
    though a rank needs its own alone. If the tensor has fewer rows than there are ranks,
    ``fully_shard`` makes an empty chunk for each further rank, by ``first_chunk.new_empty(0)``.
    This mode makes one of each size.
    """

    def __init__(self) -> None:
        super().__init__()
        #: The first chunk of the last ``torch.chunk``, and an empty one made of it.
        self._first = self._empty = torch.empty(0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.chunk and valueless(args[0]):
            chunks = _chunk(*args, **kwargs or {})
            self._first = chunks[0]
            self._empty = chunks[0].new_empty(0)
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
    """Return what ``torch.chunk`` returns, but with one tensor for all chunks of full size."""
    length = tensor.shape[dim]
    if not length:
        return (tensor.narrow(dim, 0, 0),)
    # Rounded up, as torch does.
    size = -(-length // chunks)
    full, rest = divmod(length, size)
    full_chunks = (tensor.narrow(dim, 0, size),) * full
    if not rest:
        return full_chunks
    return (*full_chunks, tensor.narrow(dim, length - rest, rest))


#: The types of real tensors.
_PLAIN = {torch.Tensor, torch.nn.Parameter}


def _really(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call an operator without any mode, so that its result has values."""
    with _disable_current_modes():
        return func(*args, **kwargs)


def _is_of_whole_numbers(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _number_one(dtype: torch.dtype) -> float | int | bool:
    """Return 1 as a number of that dtype."""
    if dtype.is_floating_point:
        return 1.0
    if dtype is torch.bool:
        return True
    return 1


def _has_tensor(values: Sequence[Any]) -> bool:
    """Tell whether there is a tensor among the values, or in lists and tuples of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return True
        if isinstance(value, (list, tuple)) and _has_tensor(value):
            return True
    return False


if __name__ == "__main__":
    main(sys.argv[1])

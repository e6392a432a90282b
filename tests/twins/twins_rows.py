"""Trainers that give ranks the wrong rows, count rows twice in a metric, or draw the wrong random numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pytest_distcompat.drivers.accelerate import AccelerateDriver
from pytest_distcompat.drivers.deepspeed import DeepSpeedDriver
from pytest_distcompat.drivers.torch import TorchDriver
from pytest_distcompat.drivers.trainer import TrainerDriver
from pytest_distcompat.ext.upstream.drivers import _rows
from pytest_distcompat.trace import LoadedBatch, Loader

from .declare import name_of, twin

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from pytest_distcompat.cell import Cell

    Start = tuple[int, int]

DDP = "ddp-fp32-w2"


class Rows(TorchDriver):
    """The loader of torch alone, to be got wrong."""

    loaders: ClassVar[Mapping[str, Loader]] = {"shuffle": Loader()}

    def read(self, start: Start, *, ranks: int = 0) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield this rank's batches, or those of one of another number of ranks, without a length."""
        ranks = ranks or self.world.size
        for given in _rows.torch_rows("shuffle", 23, start, self.world.rank % ranks, ranks):
            epoch, rows, *_ = given
            yield epoch, rows


@twin(
    "coverage",
    DDP,
    match=r"^shuffle: epoch 1: 23 rows are given (twice|up to \d times), first 0; expected less than 4, which fill the last batches",
)
class NoSampler(Rows):
    """No distributed sampler: each rank has all rows."""

    def rows(self, loader: str, count: int, start: Start, directory: Path) -> Iterator[tuple[int, Sequence[int]]]:
        del loader, count, directory
        return self.read(start, ranks=1)


@twin("coverage", DDP, match=r"^shuffle: epoch 1: rank 0 is given 6 batches; the loader's length is 12\n")
class LengthOfAllRanks(Rows):
    """The loader's length counts the batches of all ranks, so that a training has twice its steps."""

    def rows(self, loader: str, count: int, start: Start, directory: Path) -> Iterator[LoadedBatch]:
        del loader, count, directory
        for epoch, rows in self.read(start):
            yield LoadedBatch(epoch, rows, 12)


@twin("coverage", DDP, match=r"^shuffle: epoch 1: \d+ of 23 rows are given to no rank, first \d+\n")
class ShardedTwice(Rows):
    """The sampler shards, and the trainer once more."""

    def rows(self, loader: str, count: int, start: Start, directory: Path) -> Iterator[tuple[int, Sequence[int]]]:
        del loader, count, directory
        return ((epoch, rows[self.world.rank % 2 :: 2]) for epoch, rows in self.read(start) if len(rows) > 1)


@twin(
    "coverage",
    "fsdp2-fp32-w2-model_dropout-tp_2",
    match=r"^shuffle: ranks 1 and 0 are given different rows: .*; expected the same, as they hold parts of the same layers",
)
class CountsAllRanks(Rows):
    """The sampler counts all ranks, of which those of a tensor-parallel group must have the same rows."""

    def rows(self, loader: str, count: int, start: Start, directory: Path) -> Iterator[tuple[int, Sequence[int]]]:
        del loader, count, directory
        return self.read(start)


@twin(
    "coverage",
    DDP,
    match=r"shuffle: epoch 1: batch 6 of data parallel rank 1 has no rows: a mean over it is no number",
)
class GivesNothing(Rows):
    """The last batch of an epoch has no rows on a rank."""

    def rows(self, loader: str, count: int, start: Start, directory: Path) -> Iterator[tuple[int, Sequence[int]]]:
        del loader, count, directory
        done = [0, 0]
        for epoch, rows in self.read(start):
            done[epoch] += 1
            yield epoch, () if done[epoch] == 6 and self.world.rank else rows


class InOrderToo(Rows):
    """Two loaders of torch alone."""

    loaders: ClassVar[Mapping[str, Loader]] = {"shuffle": Loader(), "in order": Loader(shuffled=False)}


@twin(
    "coverage",
    DDP,
    match=r"^rank 1 raised ValueError: no such sampler \(in rows\(\) of the loader 'in order'\)\n",
)
class RaisesOnOneRank(InOrderToo):
    """The second loader raises on one rank, for which the other one waits."""

    def rows(self, loader: str, count: int, start: Start, directory: Path) -> Iterator[tuple[int, Sequence[int]]]:
        del count, directory
        if loader == "in order":
            torch.distributed.init_process_group(self.world.backend)
            if self.world.rank:
                raise ValueError("no such sampler")
            torch.distributed.barrier()
        return self.read(start)


class Prepared(AccelerateDriver):
    """accelerate with one loader that it shards."""

    loaders: ClassVar[Mapping[str, Loader]] = {"seedable": _rows.ACCELERATE["seedable"]}


@twin(
    "coverage",
    DDP,
    match=r"^seedable: epoch 1: \d+ of 23 rows are given to no rank, first \d+\n",
    sound="twins.twins_rows:Prepared",
)
class PreparedTwice(Prepared):
    """accelerate shards a loader whose sampler shards: https://github.com/huggingface/accelerate/issues/4199."""

    def rows(self, _loader: str, count: int, start: Start, _directory: Path) -> Iterator[tuple[int, Sequence[int]]]:
        from torch.utils.data import DataLoader, DistributedSampler

        accelerator, _ = _rows.accelerate_loader("seedable", count)
        sampler: DistributedSampler[int] = DistributedSampler(range(count), self.world.size, self.world.rank)  # type: ignore[arg-type]
        loader = accelerator.prepare(DataLoader(range(count), batch_size=2, sampler=sampler))  # type: ignore[arg-type]
        for epoch in range(start[0], 2):
            sampler.set_epoch(epoch)
            yield from ((epoch, batch.tolist()) for batch in loader)


class Seeded(AccelerateDriver):
    """accelerate with a loader, and the same one with another seed."""

    loaders: ClassVar[Mapping[str, Loader]] = {name: _rows.ACCELERATE[name] for name in ("seedable", "data_seed")}


@twin(
    "coverage",
    DDP,
    match=r"^data_seed: its order is that of seedable; expected another one, as the seed is another$",
    sound="twins.twins_rows:Seeded",
)
class OneSeedForAll(Seeded):
    """The loader ignores the seed."""

    def rows(self, _loader: str, count: int, start: Start, directory: Path) -> _rows.Batches:
        return super().rows("seedable", count, start, directory)


class Plain(AccelerateDriver):
    """accelerate with a loader for which nobody calls ``set_epoch``; accelerate loses its epoch in a checkpoint."""

    loaders: ClassVar[Mapping[str, Loader]] = {"seedable, no set_epoch": Loader(resumes=False, moves=False)}


@twin(
    "coverage",
    DDP,
    match=r"^seedable, no set_epoch: epoch 2 has the order of epoch 1; expected another one$",
    sound="twins.twins_rows:Plain",
)
class CountsNoEpochs(Plain):
    """A loop makes its loader anew for each epoch."""

    def rows(self, loader: str, count: int, start: Start, directory: Path) -> Iterator[tuple[int, Sequence[int]]]:
        for number in (0, 1):
            for epoch, rows, *_ in super().rows(loader, count, start, directory / str(number)):
                if epoch == 0:
                    yield number, rows


class OwnSamplers(AccelerateDriver):
    """accelerate with samplers of the user's own, of rows and of whole batches."""

    loaders: ClassVar[Mapping[str, Loader]] = {
        name: _rows.ACCELERATE[name]
        for name in (
            "sampler",
            "batch_sampler",
            "batch_sampler, drop_last",
            "batch_size=None",
            "batch_size=None, drop_last",
        )
    }


@twin(
    "coverage",
    DDP,
    match=r"^batch_size=None: epoch 1: 23 rows are given (twice|up to \d times), first 0; expected less than 4",
    sound="twins.twins_rows:OwnSamplers",
)
class WholeBatchesForAll(OwnSamplers):
    """Loaders without a batch size are not prepared, so that each rank has all batches."""

    def rows(self, loader: str, count: int, start: Start, directory: Path) -> _rows.Batches:
        if loader != "batch_size=None":
            yield from super().rows(loader, count, start, directory)
            return
        batches = [tuple(range(first, min(first + 2, count))) for first in range(0, count, 2)]
        for epoch in range(start[0], 2):
            done = start[1] if epoch == start[0] else 0
            yield from ((epoch, batch) for batch in batches[done:])


@twin("coverage", DDP, match=r"^shuffle: epoch 2 has the order of epoch 1; expected another one$")
class SameOrder(Rows):
    """Nobody calls ``set_epoch``."""

    def rows(self, loader: str, count: int, start: Start, directory: Path) -> Iterator[tuple[int, Sequence[int]]]:
        del loader, count, directory
        first = [rows for epoch, rows in self.read((0, 0)) if epoch == 0]
        for epoch in range(start[0], 2):
            yield from ((epoch, rows) for rows in first[start[1] if epoch == start[0] else 0 :])


@twin(
    "coverage",
    DDP,
    match=r"^shuffle: resumed in the middle of epoch 2 rank 0 is given rows [\d, .]+; [\d, .]+ in the run that never",
)
class ResumesTheEpoch(Rows):
    """A resumed run begins its epoch anew."""

    def rows(self, loader: str, count: int, start: Start, directory: Path) -> Iterator[tuple[int, Sequence[int]]]:
        del loader, count, directory
        return self.read((start[0], 0))


class Files(TorchDriver):
    """A data set that deals files out to ranks, with a state per rank."""

    loaders: ClassVar[Mapping[str, Loader]] = {_rows.BY_RANK: _rows.TORCH[_rows.BY_RANK]}


@twin(
    "coverage",
    DDP,
    match=r"^iterable by rank: resumed in the middle of epoch 2 rank 0 is given rows [\d, .]+; .*\n.* rank 1 is given rows ",
    sound="twins.twins_rows:Files",
    daily=True,
)
class ForgetsPlace(Files):
    """The data set saves its state, and does not take it over."""

    def rows(self, loader: str, count: int, start: Start, directory: Path) -> _rows.Batches:
        from pytest_distcompat.ext.upstream.drivers._iterables import FilesOfRank

        FilesOfRank.load_state_dict = lambda *_: None  # type: ignore[method-assign]
        return super().rows(loader, count, start, directory)


@twin(
    "coverage",
    DDP,
    match=r"^iterable by rank: resumed in the middle of epoch 2 rank 1 is given rows [\d, .]+; [\d, .]+ in the run that never stopped$",
    sound="twins.twins_rows:Files",
    daily=True,
)
class LoadsStateOfFirst(Files):
    """All ranks take over the state of rank 0."""

    def state_file(self, start: Start) -> str:
        return super().state_file(start) if start == (0, 0) else "0"


class Evaluates(AccelerateDriver):
    """accelerate with one loader, to be got wrong."""

    def metrics(self, count: int) -> Mapping[str, float]:
        accelerator, loader = _rows.accelerate_loader("in order", count)
        gathered = [accelerator.gather_for_metrics(batch) for batch in loader]
        return {"mean": float(sum(map(float, (batch.sum() for batch in gathered))) / sum(map(len, gathered)))}


@twin(
    "evaluation", DDP, match=r"^rank 0: mean is [\d.]+; 11 in one process\nrank 1", sound="twins.twins_rows:Evaluates"
)
class GathersAll(Evaluates):
    """Rows that fill the last batch are counted."""

    def metrics(self, count: int) -> Mapping[str, float]:
        accelerator, loader = _rows.accelerate_loader("in order", count)
        gathered = [accelerator.gather(batch) for batch in loader]
        return {"mean": float(sum(map(float, (batch.sum() for batch in gathered))) / sum(map(len, gathered)))}


@twin("evaluation", DDP, match=r"^rank 0: mean is [\d.]+; 11 in one process", sound="twins.twins_rows:Evaluates")
class OwnRowsOnly(Evaluates):
    """Each rank reports the metric of its own rows."""

    def metrics(self, count: int) -> Mapping[str, float]:
        _, loader = _rows.accelerate_loader("in order", count)
        rows = [row for batch in loader for row in batch.tolist()]
        return {"mean": sum(rows) / len(rows)}


class LeavesEarly(Evaluates):
    """A rank that has nothing left gathers no more, and the others wait for it."""

    def metrics(self, count: int) -> Mapping[str, float]:
        accelerator, loader = _rows.accelerate_loader("in order", count)
        for number, batch in enumerate(loader):
            if self.world.rank == 1 and number:
                break
            accelerator.gather(batch)
        return {"mean": 0.0}


class LeavesEarlyAndWaits(LeavesEarly):
    """It waits for the others, in another collective than theirs."""

    def metrics(self, count: int) -> Mapping[str, float]:
        metrics = super().metrics(count)
        torch.distributed.barrier()
        return metrics


ALIKE = r"^ranks 0 and 1 draw the same random numbers in step 2\nranks 0 and 1 draw the same random numbers in step 3$"


@twin("randomness", "ddp-fp32-w2-model_dropout", "fsdp2-fp32-w2-model_dropout", match=ALIKE)
class SeedsAlike(TorchDriver):
    """All ranks have the seed that they made the model with."""

    def seed_rank(self) -> None:
        import torch

        torch.manual_seed(1)


@twin("randomness", "zero1-fp32-w2-model_dropout", "zero3-fp32-w2-model_dropout", match=ALIKE)
class SeedsAlikeZero(DeepSpeedDriver):
    """The twin above with ZeRO's flat masters."""

    def seed_rank(self) -> None:
        import torch

        torch.manual_seed(1)


@twin(
    "randomness",
    "ddp-fp32-w2-model_dropout",
    match=r"^rank 1: other random numbers follow the load than in the run that never stopped$",
    also={"data": r"^rank 1: torch's random state after the load", "resume": r"rank 1: loss 1 after the load"},
)
class SavesOneState(TorchDriver):
    """Rank 0 saves its random state, which all ranks load."""

    def load_random(self, directory: Path, *, required: bool) -> None:
        del required
        import torch

        torch.set_rng_state(torch.load(directory / "rng_0.pt", weights_only=True)["cpu"])


@twin(
    "observers",
    "ddp-fp32-w2-model_mlp",
    "fsdp2-fp32-w2-model_mlp",
    match=r"^rank 0: the random state is another after the save\nrank 1",
)
class DrawsInSave(TorchDriver):
    """A name for the checkpoint is drawn."""

    def save(self, directory: Path) -> None:
        import torch

        torch.rand(1)
        super().save(directory)


@twin(
    "observers",
    "zero2-fp32-w2-model_mlp",
    "ddp-fp32-w2-model_mlp",
    match=r"^rank 0: parameter '[\w.]+' and \d+ others: other values after the export",
)
class RoundsInExport(AccelerateDriver):
    """The live model is rounded to be exported, and what is trained from then on is rounded too."""

    def export(self, directory: Path) -> None:
        import torch

        super().export(directory)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(parameter.to(torch.bfloat16))


class TrainerOnMesh(TrainerDriver):
    """Sound: two loaders of Trainer, of those that nothing is known against."""

    @classmethod
    def loaders_in(cls, cell: Cell) -> Mapping[str, Loader]:
        loaders = super().loaders_in(cell)
        return {name: loaders[name] for name in ("shuffle", "split_batches")}


@twin(
    "coverage",
    "fsdp2-fp32-w4-tp_2-save_only_model",
    match=r"^shuffle: ranks 1 and 0 are given different rows",
    sound=name_of(TrainerOnMesh),
)
class FeedsPeersApart(TrainerOnMesh):
    """Accelerate is not told of the mesh when it makes loaders: each rank has rows of its own."""

    reads_rows = False

    def rows(self, loader: str, count: int, start: Start, directory: Path) -> _rows.Batches:
        self.reads_rows = True
        return super().rows(loader, count, start, directory)

    def make_trainer(self, **settings: Any) -> Any:
        trainer = super().make_trainer(**settings)
        if self.reads_rows:
            trainer.accelerator.state.device_mesh = None
        return trainer

"""Checkpoints of the driver for DeepSpeed: the engine's own, universal ones, exported weights.

``DeepSpeedDriver`` (``deepspeed.py``) inherits ``DeepSpeedCheckpoints``. A run calls
``save(directory)`` on all ranks after some steps; another run calls ``load(directory)`` after
``build`` and must go on as the first one did. At the end of a training ``export`` writes the
weights alone.

A checkpoint of ZeRO has the optimizer's partitions of each rank, so that it can be loaded on as
many ranks only. If a run has another number, ``universal`` names a directory, and ``load`` first
converts the checkpoint there: to DeepSpeed's universal form, which has each parameter whole.

DeepSpeed writes into a subdirectory named by a tag, such as ``global_step3``, and the tag of the
last one into the file ``latest``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_distcompat.ext.upstream.drivers import _options
from pytest_distcompat.ext.upstream.drivers.tiny import TinyDriver

if TYPE_CHECKING:
    from pytest_distcompat.cell import Cell
    from pytest_distcompat.parallel.deepspeed_pipeline import DeepSpeedPipeline

#: Before the number of the step in the tag that DeepSpeed itself gives a checkpoint.
_STEP_TAG = "global_step"


class DeepSpeedCheckpoints(TinyDriver):
    """Driver that saves, loads and exports by a DeepSpeed engine, its ``model``."""

    #: The directory of the universal checkpoint, if one of another world size is loaded; else None.
    #: ``DeepSpeedDriver.train`` sets it.
    universal: Path | None = None
    #: The stages of the model; None without pipeline parallelism.
    pipeline: DeepSpeedPipeline | None = None
    #: The unwrapped model, around which ``build`` makes the engine.
    raw: Any = None

    @property
    def tag(self) -> dict[str, str]:
        """Return the argument that names a checkpoint, where each node has a disk of its own.

        It is empty elsewhere: there the engine names checkpoints itself. With disks of their own
        it would look for the name of the latest one, which DeepSpeed writes on the node of rank 0
        alone.
        """
        if not self.world.own_disks:
            return {}
        return {"tag": "saved"}

    def save(self, directory: Path) -> None:
        """Save by ``save_checkpoint``, and torch's random state, which DeepSpeed does not save.

        The random state is written beside the files of this checkpoint, in the directory that has
        its tag as name, so that a later save leaves it there.
        """
        settings = self.tag | self.cell.settings("save_checkpoint")
        client_state = {"ranks": self.world.size}
        self.model.save_checkpoint(str(directory), client_state=client_state, **settings)
        tag = settings.get("tag")
        if tag is None:
            # DeepSpeed's own name for the checkpoint of a step.
            tag = f"{_STEP_TAG}{self.model.global_steps}"
        tagged = directory / str(tag)
        # A rank that writes no file of DeepSpeed may be on a node of which no rank writes one.
        tagged.mkdir(exist_ok=True)
        self.save_random(tagged)

    def load(self, directory: Path) -> None:
        """Load by ``load_checkpoint``; a checkpoint of another world size is converted first.

        Random states must be there for each rank only if as many ranks saved them.
        """
        checkpoint = directory
        if self.universal is not None:
            self._convert(directory, self.universal)
            checkpoint = self.universal
        settings = self.tag | self.cell.settings("load_checkpoint")
        file, client_state = self.model.load_checkpoint(str(checkpoint), **settings)
        if file is None:
            # DeepSpeed found no checkpoint; it only warns. The check ``resume`` tells.
            return
        saved_ranks = client_state.get("ranks") if client_state else None
        # A universal checkpoint has the tag of the one that it was made of.
        tag = Path(file).parent.name
        self.load_random(directory / tag, required=saved_ranks == self.world.size)

    @classmethod
    def keeps_saves(cls, cell: Cell) -> bool:
        """Tell whether a second ``save`` into a directory leaves the first checkpoint there.

        It does if each has a tag of its own, which DeepSpeed makes of the number of the step. Then
        the check ``restarts`` saves twice and has ``load_first`` load the first one.
        """
        return not cell.own_disks and "tag" not in cell.settings("save_checkpoint")

    def load_first(self, directory: Path) -> None:
        """Load the checkpoint of the lowest step by its tag, and its random states."""
        steps = []
        for path in directory.glob(f"{_STEP_TAG}*"):
            steps.append(int(path.name.removeprefix(_STEP_TAG)))
        tag = f"{_STEP_TAG}{min(steps)}"
        settings = {**self.cell.settings("load_checkpoint"), "tag": tag}
        self.model.load_checkpoint(str(directory), **settings)
        self.load_random(directory / tag, required=True)

    def saved_name(self, key: str) -> str:
        """Return the model's name for a key; a pipeline's keys begin with the number of a layer."""
        if self.pipeline is None:
            return key
        return self.pipeline.saved_name(key)

    def _convert(self, directory: Path, universal: Path) -> None:
        """Convert a checkpoint to a universal one, on rank 0; the others wait.

        It is ``python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state`` in this
        process:
        https://www.deepspeed.ai/tutorials/universal-checkpointing/. The flag says that tensor
        parallelism split nothing, unless the checkpoint says what it did.

        Args:
            directory: The checkpoint.
            universal: The directory of the universal one.
        """
        from deepspeed.checkpoint import ds_to_universal
        from torch import distributed

        if self.world.rank == 0:
            tag = (directory / "latest").read_text(encoding="utf-8").strip()
            command = ["ds_to_universal", "--inject_missing_state"]
            command += ["--input_folder", str(directory / tag)]
            command += ["--output_folder", str(universal / tag)]
            command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
            with _command_line(command):
                arguments = ds_to_universal.parse_arguments()
            ds_to_universal.main(arguments)
        distributed.barrier()

    def export(self, directory: Path) -> None:
        """Write the whole weights on rank 0.

        Under ZeRO they are the float32 master weights where the engine has them, put together from
        a checkpoint that is saved for this purpose.
        """
        if self.pipeline is not None:
            state = self.pipeline.whole_weights()
        elif self.cell.tp > 1:
            state = whole_weights(self.model)
        else:
            state = self._whole_state(directory.parent / "shards")
        if self.world.rank == 0:
            _options.write_whole(self.raw, state, directory)

    def _whole_state(self, shards: Path) -> dict[str, Any]:
        """Return the whole weights by name, on rank 0 at least; other ranks may return none.

        Args:
            shards: The directory for a checkpoint, where the weights are combined from one.
        """
        own_disks = self.world.own_disks
        # A model that names the only driver for it: the one with DeepSpeed's layers of experts.
        if self.tiny.driver:
            return self._with_all_experts(shards)
        if own_disks and self.strategy.shards:
            # ZeRO-3. The shards of a checkpoint are on all machines, so none can be combined.
            return whole_weights(self.model)
        # Each rank has whole weights: at stage 0, and with disks of their own at stages 1 and 2,
        # whose float32 masters cannot be combined from checkpoints on several machines either.
        if own_disks or not self.strategy.zero_stage:
            weights: dict[str, Any] = self.model.module_state_dict()
            return weights
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        self.model.save_checkpoint(str(shards))
        if self.world.rank:
            return {}
        masters: dict[str, Any] = get_fp32_state_dict_from_zero_checkpoint(str(shards))
        return masters

    def _with_all_experts(self, shards: Path) -> dict[str, Any]:
        """Return the weights of a model with DeepSpeed's experts, on rank 0; none on the others.

        They are read from a checkpoint, which has a file for each expert: ``zero_to_fp32`` cannot
        read it.

        Args:
            shards: The directory for the checkpoint.
        """
        import torch

        self.model.save_checkpoint(str(shards), "export")
        if self.world.rank:
            return {}
        files = sorted((shards / "export").glob("*_model_states.pt"))
        weights: dict[str, Any] = {}
        for path in files:
            state = torch.load(path, map_location="cpu", weights_only=False)
            # The file of an expert has its weights alone.
            weights |= state.get("module", state)
        return weights


@contextlib.contextmanager
def _command_line(command: list[str]) -> Iterator[None]:
    """Have the process read these words as its own command line."""
    own = sys.argv
    sys.argv = command
    try:
        yield
    finally:
        sys.argv = own


def saved_on(directory: Path) -> tuple[int, int] | None:
    """Return on how many ranks a checkpoint of ZeRO was saved; None if it is not of ZeRO.

    With it comes how many ranks hold the model together: ``(4, 2)`` with a tensor parallel group of
    2, or a pipeline of 2 stages. Each rank writes a file of optimizer state,
    ``zero_pp_rank_1_mp_rank_00_optim_states.pt``: the first number is the rank among data parallel
    ones, the second one that among those that hold the model together.
    """
    checkpoint = _latest(directory)
    ranks = len(list(checkpoint.glob("*zero_pp_rank_*_optim_states.pt")))
    if not ranks:
        return None
    model_parallel = len(list(checkpoint.glob("*zero_pp_rank_0_*_optim_states.pt")))
    return ranks, model_parallel


def saved_by_layer(directory: Path) -> bool:
    """Tell whether a checkpoint has a file for each layer, as that of a pipeline has."""
    return any(_latest(directory).glob("layer_*-model_states.pt"))


def _latest(directory: Path) -> Path:
    """Return the directory of the latest checkpoint; the directory itself if no file names it."""
    latest = directory / "latest"
    if latest.exists():
        return directory / latest.read_text(encoding="utf-8").strip()
    return directory


def whole_weights(engine: Any) -> dict[str, Any]:
    """Return the state dict of a model whose weights are split, with whole weights on rank 0.

    Args:
        engine: A ``DeepSpeedEngine`` at ZeRO-3 or with tensor parallelism. All ranks must call it.
    """
    # The method is private, and accelerate and Trainer call it: ``save_16bit_model`` writes the
    # parts of rank 0 alone (docs/upstream.md). It leaves buffers out. A test of
    # ``tests/launch/test_private_names.py`` fails when it goes away.
    state = dict(engine.module_state_dict())
    whole = engine._consolidated_16bit_state_dict()  # noqa: SLF001 - see above
    return {**state, **(whole or {})}

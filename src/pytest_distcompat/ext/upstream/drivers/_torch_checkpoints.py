"""Checkpoints of the driver for plain torch, by torch.distributed.checkpoint (DCP) or as one file.

``TorchDriver`` (``torch.py``) inherits ``TorchCheckpoints``. A run calls ``save(directory)`` on all
ranks after some steps; another run, perhaps with another number of ranks, calls ``load(directory)``
after ``build``, and must go on as the first one did. At the end of a training ``export`` writes the
weights alone, for use without the trainer.

What a checkpoint has is one nested dictionary, ``_state()``: ``model``, ``optimizer``,
``scheduler``, ``ranks``, and ``scaler`` or ``averaged_model`` where the cell has them. A cell is
one configuration under test; its options decide on the form:

- ``fsdp2-fp32-w2``: each rank writes its shards by DCP, https://pytorch.org/docs/stable/distributed.checkpoint.html.
  A load reads in place: ``_state()`` of the new trainer says which shards each rank needs.
- ``state_dict_full``, and machines with disks of their own: one file ``checkpoint.pt``.
- ``save_only_model``: only the key ``model``.
- ``async_save``: DCP writes while the next step is taken.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pytest_distcompat.ext.upstream.drivers import _options
from pytest_distcompat.ext.upstream.drivers.tiny import TinyDriver, listed
from pytest_distcompat.parallel.pipeline_parallel import gathered


class TorchCheckpoints(TinyDriver):
    """Driver that saves, loads and exports a model wrapped by torch."""

    #: What writes a checkpoint while training goes on; it is waited for after the next step.
    saving: Any = None
    #: The process group for it: on the group of the training, its collectives would pair with those
    #: of steps.
    saving_group: Any = None
    #: The unwrapped model, which ``build`` gets.
    raw: Any = None
    #: This rank's stages; None without pipeline parallelism.
    pipeline: Any = None
    #: Whether a checkpoint has the optimizer's state by the name of each parameter alone, so that
    #: each stage has its own.
    flat: bool = False

    def _state_dict_options(self) -> Any:
        """Return the ``StateDictOptions`` of a checkpoint, which the cell's settings may change."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions

        # No cpu_offload: on CPU ranks FSDP1's crashes
        # (https://github.com/pytorch/pytorch/issues/188989).
        settings = {
            "full_state_dict": self.cell.option("state_dict") == "full",
            "flatten_optimizer_state_dict": self.flat,
        }
        return StateDictOptions(**self.cell.with_settings("StateDictOptions", settings))

    def _state(self) -> dict[str, Any]:
        """Return the state that a checkpoint has; into it one is loaded in place."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

        options = self._state_dict_options()
        if self.cell.option("save_only_model"):
            return {"model": get_model_state_dict(self.model, options=options)}
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        # ``load`` compares the number of ranks that saved with its own.
        state = {"model": model, "optimizer": optimizer, "ranks": self.world.size}
        # ``listed`` makes a list of a single one. There are several where there are several
        # optimizers.
        state["scheduler"] = [scheduler.state_dict() for scheduler in listed(self.scheduler)]
        if self.scaler:
            state["scaler"] = self.scaler.state_dict()
        if self.averaged_model is not None:
            state["averaged_model"] = get_model_state_dict(self.averaged_model, options=options)
        return state

    @property
    def whole(self) -> bool:
        """Tell whether a checkpoint is one file, on each node with a disk of its own."""
        return self.cell.option("state_dict") == "full" or self.world.own_disks

    def save(self, directory: Path) -> None:
        """Write one DCP checkpoint, or one file by rank 0.

        Where each node has a disk of its own, the first rank there writes that file.
        """
        import torch
        from torch.distributed.checkpoint.state_dict_saver import async_save, save

        state = self._state()
        if not self.cell.option("save_only_model"):
            # Each rank writes its random states to a file of its own.
            self.save_random(directory)
        if self.whole:
            if self.world.writes_first:
                torch.save(state, directory / "checkpoint.pt")
            return
        if self.cell.option("async_save"):
            self.saving = async_save(
                state, checkpoint_id=directory, process_group=self.saving_group
            )
        else:
            save(state, storage_writer=self._writer(directory), planner=self._save_planner())

    def _writer(self, directory: Path) -> Any:
        """Return the writer of a DCP checkpoint."""
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        return FileSystemWriter(directory, **self.cell.settings("FileSystemWriter"))

    def _save_planner(self) -> Any:
        """Return the planner that DCP saves with."""
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        return DefaultSavePlanner(**self.cell.settings("DefaultSavePlanner"))

    def _load_planner(self) -> Any:
        """Return the planner that DCP loads with."""
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        return DefaultLoadPlanner(**self.cell.settings("DefaultLoadPlanner"))

    def load(self, directory: Path) -> None:
        """Load the state, in place by DCP, then set it by ``set_state_dict``.

        Each rank loads the random states that the rank of its number saved. They must exist only if
        as many ranks saved as load.
        """
        from torch.distributed.checkpoint.state_dict import (
            set_model_state_dict,
            set_optimizer_state_dict,
            set_state_dict,
        )

        if self.whole:
            state = self._read_whole(directory)
        else:
            state = self._read_shards(directory)
        options = self._state_dict_options()
        if self.cell.option("save_only_model"):
            # Optimizer, scheduler and random states begin anew.
            set_model_state_dict(self.model, state["model"], options=options)
            return
        if options.broadcast_from_rank0:
            # A setting of the cell: rank 0 reads the file and sends it to the others. Not by one
            # call: set_state_dict hangs where other ranks have nothing (docs/upstream.md).
            set_model_state_dict(self.model, state["model"], options=options)
            set_optimizer_state_dict(
                self.model, self.optimizer, state["optimizer"], options=options
            )
        else:
            set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
                options=options,
            )
        saved_states = state["scheduler"]
        for scheduler, saved in zip(listed(self.scheduler), saved_states, strict=True):
            scheduler.load_state_dict(saved)
        if self.scaler:
            self.scaler.load_state_dict(state["scaler"])
        if self.averaged_model is not None:
            set_model_state_dict(self.averaged_model, state["averaged_model"], options=options)
        self.load_random(directory, required=state["ranks"] == self.world.size)

    def _read_whole(self, directory: Path) -> dict[str, Any]:
        """Return the state of a checkpoint of one file."""
        import torch

        state: dict[str, Any] = torch.load(
            directory / "checkpoint.pt", map_location="cpu", weights_only=True
        )
        if self._state_dict_options().broadcast_from_rank0 and self.world.rank:
            # The others get it from rank 0.
            state |= {"model": {}, "optimizer": {}}
        return state

    def _read_shards(self, directory: Path) -> dict[str, Any]:
        """Return the state of a DCP checkpoint, with this rank's shards.

        The checkpoint has the optimizer's state in one of two forms: with a list of param groups
        (key ``optimizer.param_groups``), or flat, by the name of each parameter alone, as the
        stages of a pipeline write it. The state that is loaded into must have the same form.
        """
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        keys = FileSystemReader(directory).read_metadata().state_dict_metadata
        # By parameter names the optimizer's state has no param groups.
        by_groups = {"optimizer.param_groups", "optimizer.param_groups.0.params"} & keys.keys()
        if not by_groups:
            # From here on this run saves in that form too, so that stages can load it again.
            self.flat = True
        state = self._state()
        load(state, checkpoint_id=directory, planner=self._load_planner())
        return state

    def export(self, directory: Path) -> None:
        """Write the full state dict on rank 0, in the format that the model's own library loads."""
        state = _options.whole_state(self.model)
        if self.pipeline:
            state = gathered(state, self.pipeline.group)
        if self.world.rank == 0:
            _options.write_whole(self.raw, state, directory)

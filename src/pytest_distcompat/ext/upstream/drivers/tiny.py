"""``TinyDriver``, base class of the built-in drivers: which cells can run, and common actions.

A driver is the class by which a trainer is tested: ``TorchDriver``, ``AccelerateDriver``,
``TrainerDriver`` and ``DeepSpeedDriver`` inherit this class, and so may users' drivers of such
libraries (``pytest_distcompat.drivers.TinyDriver``). What is trained is in ``_tiny_training.py``,
the same training in one process in ``_tiny_reference.py``.

Two sides call it:

- pytest, at collection, calls ``unsupported_reason(cell, device)`` for each cell of a suite, such
  as ``fsdp2-fp32-w2-tp_2``: strategy, precision, number of ranks, options. A sentence that comes
  back is the reason why the cell is skipped; None means that it runs.
- Each rank of a run makes an object ``Driver(cell, world)`` and calls its methods in the order of
  the run's actions: ``train`` with a plan of ``build``, ``step``, ``save``, ``load``;
  ``overflow``, a step with infinite gradients in fp16; ``evaluate``, the outputs of one batch;
  ``reload``, the exported model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_distcompat.ext.upstream.drivers import _loaded, _releases, _tiny_reasons
from pytest_distcompat.ext.upstream.drivers._tiny_reference import TinyReference
from pytest_distcompat.ext.upstream.drivers._tiny_training import (
    DECAY,
    EPOCH_STEPS,
    GAMMA,
    LEARNING_RATE,
    batches_of_one_row,
    listed,
)
from pytest_distcompat.models import TinyModel, model_of
from pytest_distcompat.parallel import (
    context_parallel,
    expert_parallel,
    pipeline_parallel,
    tensor_parallel,
)
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.strategies import STRATEGIES

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.driver import OnAction, Plan

__all__ = [
    "DECAY",
    "EPOCH_STEPS",
    "GAMMA",
    "HELD_OUT_BATCH",
    "LEARNING_RATE",
    "TinyDriver",
    "batches_of_one_row",
    "listed",
]

#: The number of the batch that ``evaluate`` computes on; no step trains on it.
HELD_OUT_BATCH = 999


class TinyDriver(TinyReference):
    """Driver that trains a tiny model, with a decaying learning rate and clipped gradients."""

    # An option with its value -> other options that a cell with it needs. AdamW8bit quantizes large
    # tensors only, which the model ``wide`` has alone, and that model is for this optimizer alone.
    needs_options: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "optimizer_adam8bit": {"model": "wide"},
        "model_wide": {"optimizer": "adam8bit"},
    }
    #: The values of option ``optimizer`` that compute the same on flat partitions of several
    #: parameters as on the parameters.
    update_flat: ClassVar[tuple[str, ...]] = ("adamw", "sgd")

    @classmethod
    def unsupported_reason(cls, cell: Cell, device: str = "cpu") -> str | None:
        """Return why the cell cannot run, for whatever reason; None if it can."""
        for reason in cls._reasons(cell, device):
            if reason:
                return reason
        return None

    @classmethod
    def _reasons(cls, cell: Cell, device: str) -> Iterator[str | None]:
        """Yield for each condition why the cell cannot run, or None; the first reason counts.

        A driver yields its own reasons before or after these. It is a generator: once there is a
        reason, nothing more is looked up.
        """
        yield super().unsupported_reason(cell, device)
        yield _releases.missing(cls.needs(cell))
        yield STRATEGIES.get(cell.strategy).unsupported_reason(cell)
        yield PRECISIONS.get(cell.precision).unsupported_reason(cell, device)
        tiny = model_of(cell)
        yield _tiny_reasons.model_reason(cell, tiny, device)
        yield _tiny_reasons.options_reason(cell, tiny, cls.name)
        yield _loaded.unsupported_reason(cell, tiny)
        if cell.option("lora") == "int8":
            yield _tiny_reasons.quantized_base_reason(cell, cls.name)
        yield _tiny_reasons.dtypes_reason(cell, tiny)
        if cell.tp > 1:
            yield tensor_parallel.unsupported_reason(cell, cls.plan_of(tiny))
        # Only the model for 8-bit optimizer state says how large its largest matrix is.
        if tiny.largest and cell.option("optimizer") != "adam8bit":
            yield (
                f"the model {tiny.name} is for optimizer=adam8bit, "
                "which others have too small layers for"
            )
        # A model may be for one driver alone.
        if tiny.driver not in {"", cls.name}:
            yield f"the model {tiny.name} is for the {tiny.driver} driver"
        experts = cls.experts_of(tiny)
        shards_experts = cell.tp > 1 and experts
        if cell.ep > 1 or tiny.driver or shards_experts:
            yield expert_parallel.unsupported_reason(cell, tiny, experts)
        if cell.pp > 1:
            yield cls._pipeline_reason(cell, tiny)
        if cell.cp > 1:
            yield context_parallel.unsupported_reason(cell)
        if cell.option("lora") and cell.option("frozen"):
            yield "with an adapter the base model is frozen anyway"
        if cell.option("optimizer") != "adamw":
            yield cls._optimizer_reason(cell, tiny, device)

    @classmethod
    def _pipeline_reason(cls, cell: Cell, tiny: TinyModel) -> str | None:
        """Return why the cell's model cannot be trained in stages (``pp``); None if it can."""
        return pipeline_parallel.unsupported_reason(cell, tiny.stages)

    @classmethod
    def _optimizer_reason(cls, cell: Cell, tiny: TinyModel, device: str) -> str | None:
        """Return why the cell cannot run with an optimizer other than AdamW; None if it can."""
        name = cell.option("optimizer")
        precision = PRECISIONS.get(cell.precision)
        # ``scaled`` is float16, in which the loss is multiplied so that gradients do not vanish.
        several_groups = bool(cell.option("param_groups"))
        flat_parameters = not cell.option("use_orig_params")
        if precision.scaled or several_groups or flat_parameters:
            return (
                "other optimizers are for one group of unscaled parameters, "
                "which keep their own tensors"
            )
        # Whether the optimizer gets pieces of flattened parameters in place of whole matrices:
        # FSDP1's, or DeepSpeed's flat master weights.
        flat = cell.strategy == "fsdp1" or STRATEGIES.get(cell.strategy).flat_masters
        if name == "adam8bit":
            loaded = precision.load if cls.name == "torch" else precision.master
            return _tiny_reasons.quantized_state_reason(cell, tiny, loaded, device, flat=flat)
        # The dtype of the parameters that are updated: plain torch upcasts nothing, nor do
        # accelerate and Trainer under DDP.
        keeps_load_dtype = cls.name == "torch" or cell.strategy == "ddp"
        masters = precision.load if keeps_load_dtype else precision.master
        if name == "sgd" and masters == "bfloat16":
            return (
                "SGD's steps at this rate are smaller than bfloat16 resolves, "
                "in which its parameters are"
            )
        if name not in cls.update_flat and flat:
            return f"{cell.strategy}'s shards have one dimension, and {name} updates matrices"
        return None

    @classmethod
    def plan_of(cls, tiny: TinyModel) -> Mapping[str, str]:
        """Return the plan of tensor parallelism: name of a layer -> how it is cut.

        For example ``"model.layers.*.self_attn.q_proj": "colwise"``. Empty if there is none.
        """
        return tiny.tp_plan

    @classmethod
    def experts_of(cls, tiny: TinyModel) -> str:
        """Return the name of the module of experts, such as ``moe.experts``; empty without one.

        Expert parallelism spreads these experts over ranks.
        """
        return tiny.experts

    @classmethod
    def needs(cls, cell: Cell) -> tuple[str, ...]:
        """Return the modules and releases that the cell requires, as ``torch>=2.9`` (PEP 508)."""
        modules = list(cls.libraries)
        if "deepspeed" in modules and STRATEGIES.get(cell.strategy).zero_stage is None:
            modules.remove("deepspeed")
        if cell.option("lora"):
            modules.append("peft")
        modules += model_of(cell).preload
        return (*modules, *_releases.required(cell, cls.libraries))

    def train(self, model: Module, plan: Plan, report: OnAction) -> None:
        """Do the plan's actions: build, steps, saves, loads.

        Models that are written and read again are so in the run's directory, which all its ranks
        share; the checkpoints are in a subdirectory.
        """
        self.run_directory = plan.save_to.parent
        deterministic = self.cell.settings("use_deterministic_algorithms")
        if deterministic:
            import torch

            # It fills memory that nobody wrote with NaN:
            # https://docs.pytorch.org/docs/stable/deterministic.html
            torch.use_deterministic_algorithms(**deterministic)
        super().train(model, plan, report)

    def seed_rank(self) -> None:
        """Seed torch differently on each rank: with one seed dropout would be the same on all.

        Ranks of one tensor-parallel group get one seed, as they have the same activations; but
        under ``sp`` each has another part of the sequence.
        """
        import torch

        rank = self.world.rank
        if not self.cell.option("sp"):
            rank = self.cell.tp_peers(rank)[0]
        torch.manual_seed(1 + rank)

    def save_random(self, directory: Path) -> None:
        """Save this rank's random states: the CPU's and, on a GPU, CUDA's, which dropout uses.

        It is for drivers whose trainer does not save them itself.
        """
        import torch

        states = {"cpu": torch.get_rng_state()}
        if self.world.device.startswith("cuda"):
            states["cuda"] = torch.cuda.get_rng_state(self.world.device)
        torch.save(states, directory / f"rng_{self.world.rank}.pt")

    def load_random(self, directory: Path, *, required: bool) -> None:
        """Restore this rank's random states.

        A rank without saved ones keeps its own, unless they are ``required``: a checkpoint that is
        loaded on more ranks has none for the additional ones.
        """
        import torch

        path = directory / f"rng_{self.world.rank}.pt"
        if required or path.exists():
            states = torch.load(path, map_location="cpu", weights_only=True)
            torch.set_rng_state(states["cpu"])
            if self.world.device.startswith("cuda"):
                torch.cuda.set_rng_state(states["cuda"], self.world.device)

    def overflow(self, number: int) -> float:
        """Take a step in which gradients overflow."""
        with self.overflowing():
            return self.step(number)

    @contextlib.contextmanager
    def overflowing(self) -> Iterator[None]:
        """Make the gradients of one layer infinite, on the highest rank alone, in this context.

        All ranks must skip the step then. Where partitions are flat, some ranks hold no part of
        that layer, so that only a collective tells them of the overflow.
        """

        def hook(_layer: Module, _inputs: Any, output: Any) -> None:
            if output.requires_grad and self.world.rank == self.world.size - 1:
                output.register_hook(lambda gradient: gradient * math.inf)

        handle = _first_trained_layer(self.model).register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    def outputs(self, model: Module) -> torch.Tensor:
        """Return the logits on a batch that no step trains on."""
        return self.tiny.outputs(model, self.batch_of(HELD_OUT_BATCH, 0))

    def evaluate(self, model: Module) -> torch.Tensor:
        """Return the logits on a batch that no step trains on, in evaluation mode.

        An adapter that was loaded is merged into its base first, as for inference: what it adds
        must be what it added in the training.
        """
        import torch

        model.eval()
        dtypes = {parameter.dtype for parameter in model.parameters()}
        # Of the reloaded model alone: the trained one has the trainer's autocast.
        if model is not self.model and len(dtypes) > 1:
            # Trained weights in float32 beside frozen ones in bfloat16 cannot be multiplied.
            model.float()
        if model is not self.model and self.cell.option("lora") is True:
            _merge_adapter(model)
        with torch.no_grad():
            return self.outputs(model)

    def reload(self, directory: Path) -> Module:
        """Load the exported files: by the ``from_pretrained`` of a library, or as a state dict.

        Of a LoRA adapter only the adapter is in the files.
        """
        if not self.cell.option("lora"):
            return self.tiny.reload(directory)
        from peft import PeftModel

        base, _ = self._trained_base()
        adapted: Module = PeftModel.from_pretrained(base, directory)
        return adapted


def _merge_adapter(adapted: Any) -> None:
    """Add an adapter's products to the weights of its base, where PEFT can.

    It cannot where an adapted weight is tied: the other layer would change too, as PEFT warns.
    """
    from pytest_distcompat.probe.live import tied_names

    for group in tied_names(adapted):
        if any(name.endswith(".base_layer.weight") for name in group):
            return
    # PEFT refuses some layers, as convolutions in groups, which then stay as they are.
    with contextlib.suppress(NotImplementedError):
        adapted.merge_adapter()


def _first_trained_layer(model: Module) -> Module:
    """Return the first module without children whose weight is trained."""
    trained = []
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not list(module.children()) and getattr(weight, "requires_grad", False):
            trained.append(module)
    return trained[0]

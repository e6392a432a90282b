"""Base class of the built-in drivers: a tiny model, its optimizer and data, and the reference."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_distcompat.cost import QUANTIZED_FROM
from pytest_distcompat.driver import Driver
from pytest_distcompat.ext.upstream.drivers import _loaded, _releases
from pytest_distcompat.installed import has_compiler
from pytest_distcompat.models import TinyModel, model_of
from pytest_distcompat.parallel import (
    context_parallel,
    expert_parallel,
    pipeline_parallel,
    tensor_parallel,
)
from pytest_distcompat.parallel.reasons import first_reason
from pytest_distcompat.precisions import PRECISIONS, Precision
from pytest_distcompat.strategies import MAX_NORM, STRATEGIES, Strategy, WrapSpec

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.driver import OnAction, Plan
    from pytest_distcompat.models import Batch
    from pytest_distcompat.world import World

LEARNING_RATE, DECAY, GAMMA = 3e-3, 0.01, 0.95
#: Steps of an epoch. With accumulation the last one has one micro-batch only, like the end of a
#: real epoch.
EPOCH_STEPS = 8
#: The number of the batch that ``evaluate`` computes on; no step trains on it.
HELD_OUT_BATCH = 999


class TinyDriver(Driver):
    """Driver that trains a tiny model, with a decaying learning rate and clipped gradients."""

    mean: ClassVar[str] = "micro_batch"
    needs_options: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "optimizer_adam8bit": {"model": "wide"},
        "model_wide": {"optimizer": "adam8bit"},
    }
    #: The values of option ``optimizer`` that compute the same on flat partitions of several
    #: parameters as on the parameters.
    update_flat: ClassVar[tuple[str, ...]] = ("adamw", "sgd")
    #: The values of option ``optimizer`` that compile their step themselves.
    compile_themselves: ClassVar[tuple[str, ...]] = ("adam8bit",)
    #: Whether the optimizer is fused, which needs parameters of one kind and state of one dtype.
    fused: ClassVar[bool] = True

    def __init__(self, cell: Cell, world: World) -> None:
        super().__init__(cell, world)
        self.strategy: Strategy = STRATEGIES.get(cell.strategy)
        self.precision: Precision = PRECISIONS.get(cell.precision)
        self.tiny: TinyModel = model_of(cell)
        self.blocks = self._block_names()
        self.accumulate = int(cell.option("grad_accum"))
        #: The directory of the run, which its ranks share; None before ``train``.
        self.run_directory: Path | None = None
        self.max_norm = self.setting_or_default(
            MAX_NORM,
            "TrainingArguments.max_grad_norm",
            "DeepSpeedPlugin.gradient_clipping",
            "ds_config.gradient_clipping",
        )
        if cell.option("ignored_modules"):
            self.ignored_modules = (self.tiny.ignored_module,)

    def _block_names(self) -> tuple[str, ...]:
        """Return the class names of the blocks. A driver of another model names its own classes."""
        if type(self).blocks:
            return type(self).blocks
        if self.tiny.blocks:
            return self.tiny.blocks
        if self.tiny.find_blocks is not None:
            return self.tiny.find_blocks()
        return ()

    def setting_or_default(self, default: Any, *keys: str) -> Any:
        """Return the cell's value of a setting, so that the reference follows it; else the default.

        The first of the keys that the cell sets counts.

        Args:
            default: The value without a setting, or with "auto".
            keys: Group and name of a setting, such as ``TrainingArguments.weight_decay``.
        """
        for key in keys:
            group, _, name = key.partition(".")
            value = self.cell.settings(group).get(name, "auto")
            if value != "auto":
                return value
        return default

    @property
    def wrap_spec(self) -> WrapSpec:
        """Return which modules are wrapped, recomputed and compiled one by one."""
        return WrapSpec(
            blocks=tuple(self.blocks),
            min_num_params=self.tiny.unit_size,
            ignored_modules=tuple(self.ignored_modules),
            tp_plan=self.tiny.tp_plan,
            experts=self.tiny.experts,
            find_unused=self.tiny.unused,
        )

    @classmethod
    def unsupported_reason(cls, cell: Cell, device: str = "cpu") -> str | None:
        """Return why the cell cannot run, for whatever reason; None if it can."""
        for reason in cls._reasons(cell, device):
            if reason:
                return reason
        return None

    @classmethod
    def _reasons(cls, cell: Cell, device: str) -> Iterator[str | None]:
        """Yield for each condition why the cell cannot run, or None; the first reason counts."""
        yield super().unsupported_reason(cell, device)
        yield _releases.missing(cls.needs(cell))
        yield STRATEGIES.get(cell.strategy).unsupported_reason(cell)
        yield PRECISIONS.get(cell.precision).unsupported_reason(cell, device)
        tiny = model_of(cell)
        yield _model_reason(cell, tiny, device)
        yield _options_reason(cell, tiny, cls.name)
        yield _loaded.unsupported_reason(cell, tiny)
        if cell.option("lora") == "int8":
            yield _no_quantized_base(cell, cls.name)
        yield _dtypes_reason(cell, tiny)
        if cell.tp > 1:
            yield tensor_parallel.unsupported_reason(cell, cls.plan_of(tiny))
        if tiny.largest and cell.option("optimizer") != "adam8bit":
            yield (
                f"the model {tiny.name} is for optimizer=adam8bit, "
                "which others have too small layers for"
            )
        if tiny.driver not in {"", cls.name}:
            yield f"the model {tiny.name} is for the {tiny.driver} driver"
        experts = cls.experts_of(tiny)
        shards_experts = cell.tp > 1 and experts
        if cell.ep > 1 or tiny.driver or shards_experts:
            yield expert_parallel.unsupported_reason(cell, tiny, experts)
        if cell.pp > 1:
            yield pipeline_parallel.unsupported_reason(cell, tiny.stages)
        if cell.cp > 1:
            yield context_parallel.unsupported_reason(cell)
        if cell.option("lora") and cell.option("frozen"):
            yield "with an adapter the base model is frozen anyway"
        if cell.option("optimizer") != "adamw":
            yield cls._optimizer_reason(cell, tiny, device)

    @classmethod
    def _optimizer_reason(cls, cell: Cell, tiny: TinyModel, device: str) -> str | None:
        """Return why the cell cannot run with an optimizer other than AdamW; None if it can."""
        name = cell.option("optimizer")
        precision = PRECISIONS.get(cell.precision)
        several_groups = bool(cell.option("param_groups"))
        flat_parameters = not cell.option("use_orig_params")
        if precision.scaled or several_groups or flat_parameters:
            return (
                "other optimizers are for one group of unscaled parameters, "
                "which keep their own tensors"
            )
        flat = cell.strategy == "fsdp1" or STRATEGIES.get(cell.strategy).flat_masters
        if name == "adam8bit":
            loaded = precision.load if cls.name == "torch" else precision.master
            return _not_quantized(cell, tiny, loaded, device, flat=flat)
        # torch upcasts nothing, nor do accelerate and Trainer under DDP.
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
        """Return the plan by which the driver cuts the model's layers; empty if there is none."""
        return tiny.tp_plan

    @classmethod
    def experts_of(cls, tiny: TinyModel) -> str:
        """Return the name of the experts that can be spread over ranks; empty if there are none."""
        return tiny.experts

    @classmethod
    def needs(cls, cell: Cell) -> tuple[str, ...]:
        """Return the modules and releases that the cell requires (PEP 508)."""
        modules = list(cls.libraries)
        if "deepspeed" in modules and STRATEGIES.get(cell.strategy).zero_stage is None:
            modules.remove("deepspeed")
        if cell.option("lora"):
            modules.append("peft")
        modules += model_of(cell).preload
        return (*modules, *_releases.required(cell, cls.libraries))

    def train(self, model: Module, plan: Plan, report: OnAction) -> None:
        """Do the plan, whose run has a directory that all its ranks share."""
        self.run_directory = plan.save_to.parent
        deterministic = self.cell.settings("use_deterministic_algorithms")
        if deterministic:
            import torch

            # It fills memory that nobody wrote with NaN:
            # https://docs.pytorch.org/docs/stable/deterministic.html
            torch.use_deterministic_algorithms(**deterministic)
        super().train(model, plan, report)

    def build_model(self) -> Module:
        """Return the tiny model, made from a fixed seed, with parameters in the load dtype."""
        model, trained_layers = self._base_model()
        if _loaded.changes_values(self.cell):
            # The reference trains what ranks train, and reading the model in this way changes its
            # values.
            model = _loaded.read(self.cell, self.precision, model, self.run_directory)
        self._freeze(model)
        if not self.cell.option("lora"):
            return model
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=list(self.tiny.lora_targets),
            lora_dropout=0.0,
            modules_to_save=trained_layers,
        )
        adapted: Module = get_peft_model(model, config, autocast_adapter_dtype=False)
        return adapted

    def _freeze(self, model: Module) -> None:
        """Freeze the modules that option ``frozen`` names."""
        if self.cell.option("frozen"):
            for name in self.tiny.frozen_modules:
                model.get_submodule(name).requires_grad_(requires_grad=False)

    def own_model(self, given: Module, zero_config: Mapping[str, Any] | None = None) -> Module:
        """Return the model to train.

        It is the given one or, with option ``loaded``, a model that the trainer makes, with its
        values.

        Args:
            given: The model that ``build_model`` returned.
            zero_config: DeepSpeed's JSON, for ``deepspeed.zero.Init``.
        """
        if self.cell.option("loaded") == "given":
            return given
        base = given
        if self.cell.option("lora") or _loaded.changes_values(self.cell):
            base, _ = self._base_model()
        made = _loaded.make(
            self.cell,
            self.precision,
            base,
            self.tiny.make,
            zero_config=zero_config,
            run_directory=self.run_directory,
        )
        self._freeze(made)
        if self.cell.option("lora"):
            return _loaded.with_adapter(made, given, self.run_directory)
        return made

    def _base_model(self) -> tuple[Module, list[str] | None]:
        """Return the model without an adapter, and the names of layers that are trained beside one.

        With ``lora`` at ``int8`` all linear layers but the last are quantized, and that one is
        trained.
        """
        import torch

        torch.manual_seed(0)
        model = self.tiny.make()
        load = getattr(torch, self.precision.load)
        for name, parameter in model.named_parameters():
            if not (self.cell.option("float32_norms") and "norm" in name):
                parameter.data = parameter.data.to(load)
        if self.cell.option("lora") != "int8":
            return model, None
        # Once its subpackage of the same name is imported, ``torchao.quantization.quantize_`` is
        # that.
        from torchao.quantization.quant_api import Int8WeightOnlyConfig, quantize_

        linear = torch.nn.Linear
        last = ""
        for name, module in model.named_modules():
            if isinstance(module, linear):
                last = name
        quantize_(
            model,
            Int8WeightOnlyConfig(),
            lambda module, name: isinstance(module, linear) and name != last,
        )
        return model, [last]

    def make_optimizer(self, model: Module) -> Any:
        """Return the optimizer of the trainable parameters; Muon and AdamW for option ``muon``."""
        name = self.cell.option("optimizer")
        if name == "adamw":
            return self.make_adamw(self.groups(model))
        from torch import optim

        groups = self.groups(model)
        if name == "sgd":
            return self.make_with_settings(optim.SGD, groups, momentum=0.9)
        if name == "adafactor":
            return self.make_with_settings(optim.Adafactor, groups)
        if name == "adam8bit":
            from torchao.optim import AdamW8bit

            self.compile_nothing()
            return self.make_with_settings(AdamW8bit, groups)
        return self.muon_and_adamw(groups)

    def make_with_settings(self, optimizer_class: Any, groups: Any, **arguments: Any) -> Any:
        """Return an optimizer of that class, with the driver's and the cell's arguments."""
        settings = {"lr": LEARNING_RATE, "weight_decay": DECAY, **arguments}
        return optimizer_class(
            groups, **self.cell.with_settings(optimizer_class.__name__, settings)
        )

    def compile_nothing(self) -> None:
        """Have an optimizer that compiles itself run uncompiled on the CPU.

        Its first step would take minutes there.
        """
        compiles_itself = self.cell.option("optimizer") in self.compile_themselves
        if compiles_itself and self.world.device == "cpu":
            import torch

            torch.compiler.set_stance("force_eager")

    def muon_and_adamw(self, groups: Any) -> list[torch.optim.Optimizer]:
        """Return Muon for the matrices among parameters or param groups, and AdamW for the rest."""
        from torch.optim import Muon

        if not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        matrix_groups = []
        other_groups = []
        for group in groups:
            matrices = [parameter for parameter in group["params"] if parameter.dim() == 2]
            others = [parameter for parameter in group["params"] if parameter.dim() != 2]
            # DeepSpeed removes empty groups.
            if matrices:
                matrix_groups.append({**group, "params": matrices})
            if others:
                other_groups.append({**group, "params": others})
        return [self.make_with_settings(Muon, matrix_groups), self.make_adamw(other_groups)]

    def make_adamw(self, groups: Any) -> torch.optim.Optimizer:
        """Return AdamW; option ``param_groups`` exempts biases and norms from weight decay."""
        # Fused, as in transformers.Trainer: unfused, its operations take a fifth of a suite on the
        # CPU.
        from torch.optim import AdamW

        # FSDP1's gradient scaler does not support a fused optimizer:
        # https://github.com/pytorch/pytorch/issues/140514
        scaled_fsdp1 = self.cell.strategy == "fsdp1" and self.precision.scaled
        arguments = {"fused": self.fused and not scaled_fsdp1}
        if self.cell.tp * self.cell.ep > 1:
            # Parameters on different meshes cannot be updated in one operation.
            arguments = {"fused": False, "foreach": False}
        optimizer: torch.optim.Optimizer = self.make_with_settings(AdamW, groups, **arguments)
        return optimizer

    def groups(self, model: Module) -> Any:
        """Return what the optimizer is made of: parameters, or param groups."""
        # Training code with frozen parameters usually passes all of ``model.parameters()``.
        with_frozen = bool(self.cell.option("frozen"))
        decayed = []
        undecayed = []
        parameters = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad and not with_frozen:
                continue
            parameters.append(parameter)
            # By name: FSDP1 makes every shard one-dimensional.
            if name.endswith("bias") or "norm" in name:
                undecayed.append(parameter)
            else:
                decayed.append(parameter)
        if not self.cell.option("param_groups"):
            return parameters
        return [
            {"params": decayed, "weight_decay": DECAY},
            {"params": undecayed, "weight_decay": 0.0},
        ]

    def make_scheduler(self, optimizer: Any, every: int = 1) -> Any:
        """Return a scheduler that multiplies the learning rate by 0.95 every ``every`` calls.

        For a list of optimizers it is a list.
        """
        from torch.optim.lr_scheduler import StepLR

        if isinstance(optimizer, list):
            return [self.make_scheduler(part, every) for part in optimizer]
        return StepLR(optimizer, step_size=every, gamma=GAMMA)

    def micros(self, number: int) -> range:
        """Return the indices in the epoch of a step's micro-batches; every epoch has the same."""
        start = number % EPOCH_STEPS * self.accumulate
        return range(start, min(start + self.accumulate, self.epoch))

    @property
    def epoch(self) -> int:
        """Return how many micro-batches an epoch has on each rank."""
        return (EPOCH_STEPS - 1) * self.accumulate + 1

    def batch_of(self, index: int, rank: int) -> Batch:
        """Return the micro-batch of any rank at that index of the epoch, on this rank's device."""
        return {
            name: value.to(self.world.device)
            for name, value in self.tiny.batch(index, rank).items()
        }

    def _joined(self, index: int, ranks: int) -> Batch:
        """Return the rows of that micro-batch of all ranks as one."""
        import torch

        batches = [self.batch_of(index, rank) for rank in range(ranks)]
        joined = {}
        for name in batches[0]:
            joined[name] = torch.cat([batch[name] for batch in batches])
        return joined

    def batches(self, number: int) -> Iterator[tuple[Batch, bool]]:
        """Yield this rank's micro-batches of a step, each with whether it is the last.

        Their tokens are counted in ``tokens``.
        """
        self.tokens = 0
        indices = self.micros(number)
        for index in indices:
            batch = self.batch_of(index, self.cell.dp_rank(self.world.rank))
            self.tokens += self.tiny.count(batch) // self.cell.cp
            yield batch, index == indices[-1]

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
        """Save this rank's random states: the CPU's and, on a GPU, CUDA's, which dropout uses."""
        import torch

        states = {"cpu": torch.get_rng_state()}
        if self.world.device.startswith("cuda"):
            states["cuda"] = torch.cuda.get_rng_state(self.world.device)
        torch.save(states, directory / f"rng_{self.world.rank}.pt")

    def load_random(self, directory: Path, *, required: bool) -> None:
        """Restore this rank's random states.

        A rank without saved ones keeps its own, unless they are ``required``.
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
        """Make the gradients of one layer infinite, on the highest rank alone.

        Where partitions are flat, some ranks hold no part of that layer and must hear of it.
        """

        def hook(_layer: Module, _inputs: Any, output: Any) -> None:
            if output.requires_grad and self.world.rank == self.world.size - 1:
                output.register_hook(lambda gradient: gradient * math.inf)

        handle = _first_trained_layer(self.model).register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    def dataset(self, ranks: int) -> list[dict[str, torch.Tensor]]:
        """Return the rows of an epoch: micro-batch by micro-batch, rank by rank, as samplers go.

        Ranks of a sequence load several micro-batches, which Ulysses hands out in turn, and want
        positions too.
        """
        cp = self.cell.cp
        rows: list[dict[str, torch.Tensor]] = []
        for first in range(0, self.epoch, cp):
            for rank in range(ranks):
                for index in range(first, first + cp):
                    batch = self.tiny.batch(index, rank)
                    if cp > 1:
                        batch["position_ids"] = context_parallel.positions_of(batch["input_ids"])
                    rows += _rows_of(batch)
        return rows

    def loss(self, model: Module, number: int, rank: int) -> torch.Tensor:
        """Return the loss on a rank's micro-batch; ``number`` counts on from epoch to epoch."""
        return self.tiny.loss(model, self.batch_of(number % self.epoch, rank))

    def outputs(self, model: Module) -> torch.Tensor:
        """Return the logits on a batch that no step trains on."""
        return self.tiny.outputs(model, self.batch_of(HELD_OUT_BATCH, 0))

    def evaluate(self, model: Module) -> torch.Tensor:
        """Return the logits on a batch that no step trains on, in evaluation mode."""
        import torch

        model.eval()
        dtypes = {parameter.dtype for parameter in model.parameters()}
        if model is not self.model and len(dtypes) > 1:
            # Trained weights in float32 beside frozen ones in bfloat16 cannot be multiplied.
            model.float()
        with torch.no_grad():
            return self.outputs(model)

    def reload(self, directory: Path) -> Module:
        """Load the exported files: by the ``from_pretrained`` of a library, or as a state dict."""
        if not self.cell.option("lora"):
            return self.tiny.reload(directory)
        from peft import PeftModel

        adapted: Module = PeftModel.from_pretrained(self._base_model()[0], directory)
        return adapted

    def reference(self, model: Module, number: int, ranks: int) -> float:
        """Take one step on the batches of all ranks in turn, in float32, and return the loss."""
        from torch.nn.utils import clip_grad_norm_

        if self.optimizer is None:
            self.optimizer = self.make_optimizer(model)
            self.scheduler = self.make_scheduler(self.optimizer)
        for optimizer in listed(self.optimizer):
            optimizer.zero_grad()
        batches = self._reference_batches(number, ranks)
        tokens = [self.tiny.count(batch) for batch in batches]
        weights = self._weights(tokens, ranks)
        losses = []
        total = 0.0
        for batch, weight in zip(batches, weights, strict=True):
            loss = self.reference_loss(model, batch)
            (loss * weight * self.ranks_added_up(ranks)).backward()  # type: ignore[no-untyped-call]
            losses.append(float(loss.detach()))
            total += losses[-1] * weight
        if not self.tiny.one_batch:
            self.averages = _averages(losses, tokens, ranks, self.accumulate)
        settings: dict[str, Any] = {"max_norm": self.max_norm or math.inf}
        settings = self.cell.with_settings("clip_grad_norm_", settings)
        self.grad_norm = float(clip_grad_norm_(model.parameters(), **settings))
        for scheduler in listed(self.scheduler):
            for _ in range(self.early_schedule_steps(number)):
                scheduler.step()
        for optimizer in listed(self.optimizer):
            optimizer.step()
        for scheduler in listed(self.scheduler):
            scheduler.step()
        return total

    def ranks_added_up(self, ranks: int) -> int:
        """Return how many ranks' means are added up: 1, or all where DeepSpeed's JSON says so."""
        reduction = self.setting_or_default("mean", "ds_config.gradient_allreduce_op")
        return ranks if reduction == "sum" else 1

    def early_schedule_steps(self, number: int) -> int:  # noqa: ARG002 - for those who override it
        """Return how often the reference steps its scheduler before the optimizer steps."""
        return 0

    def reference_loss(self, model: Module, batch: Batch) -> torch.Tensor:
        """Return the loss of one micro-batch in the reference."""
        return self.tiny.loss(model, batch)

    @property
    def averaged_over(self) -> str:
        """Return what has equal weight in the reference: ``mean``, or what a setting says."""
        return self.mean

    def _weights(self, tokens: Sequence[int], ranks: int) -> list[float]:
        """Return the weight of each micro-batch in the loss of a step.

        Args:
            tokens: The number of tokens of each micro-batch, those of rank 0 first.
            ranks: The number of ranks.
        """
        if self.averaged_over == "token":
            return [count / sum(tokens) for count in tokens]
        if self.averaged_over == "rank":
            micros = len(tokens) // ranks
            weights = []
            for number, count in enumerate(tokens):
                first = number // micros * micros
                tokens_of_rank = tokens[first : first + micros]
                weights.append(count / sum(tokens_of_rank) / ranks)
            return weights
        # A batch that has the rows of all ranks counts as one micro-batch of each.
        stands_for = ranks if self.tiny.one_batch else 1
        # The last step of an epoch has fewer micro-batches, and is divided by the full count too,
        # as in trainers that average micro-batches.
        return [stands_for / (self.accumulate * ranks)] * len(tokens)

    def _reference_batches(self, number: int, ranks: int) -> list[Batch]:
        """Return the micro-batches of a step, those of rank 0 first.

        For some models (``one_batch``) the rows of all ranks are joined to one micro-batch instead.
        """
        indices = self.micros(number)
        if self.tiny.one_batch:
            return [self._joined(index, ranks) for index in indices]
        batches = []
        for rank in range(ranks):
            batches += [self.batch_of(index, rank) for index in indices]
        return batches


def _rows_of(batch: Batch) -> list[dict[str, torch.Tensor]]:
    """Return the rows of a batch, each with all its fields."""
    count = len(next(iter(batch.values())))
    rows = []
    for number in range(count):
        rows.append({name: values[number] for name, values in batch.items()})
    return rows


def _first_trained_layer(model: Module) -> Module:
    """Return the first module without children whose weight is trained."""
    trained = []
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not list(module.children()) and getattr(weight, "requires_grad", False):
            trained.append(module)
    return trained[0]


def _averages(
    losses: list[float], tokens: list[int], ranks: int, accumulate: int
) -> dict[str, float]:
    """Return the means that a trainer may take of losses, by what has equal weight in them.

    A finding about a loss names the mean that it is equal to.

    Args:
        losses: The loss of each micro-batch, those of rank 0 first.
        tokens: The number of tokens of each.
        ranks: The number of ranks.
        accumulate: How many micro-batches a rank has in a full step.
    """
    micros = len(losses) // ranks
    rank_means = []
    for rank in range(ranks):
        own = slice(micros * rank, micros * (rank + 1))
        rank_means.append(_weighted_mean(losses[own], tokens[own]))
    micro_means = []
    for micro in range(micros):
        of_all_ranks = slice(micro, None, micros)
        micro_means.append(_weighted_mean(losses[of_all_ranks], tokens[of_all_ranks]))
    return {
        "each token": _weighted_mean(losses, tokens),
        "each rank": sum(rank_means) / ranks,
        "each micro-batch": sum(losses) / len(losses),
        "each micro-batch, also those that are missing,": sum(losses) / (accumulate * ranks),
        "each micro-batch of all ranks together": sum(micro_means) / micros,
    }


def _weighted_mean(values: list[float], weights: list[int]) -> float:
    """Return the mean of values; 0 if all weights are."""
    products = [value * weight for value, weight in zip(values, weights, strict=True)]
    return sum(products) / max(1, sum(weights))


def _model_reason(cell: Cell, tiny: TinyModel, device: str) -> str | None:
    """Return why the model cannot be trained in the cell on that kind of device; None if it can."""
    replicated = cell.option("dp_replicate") != 1
    other_parallelism = cell.dp_size < cell.world_size or cell.ep > 1 or replicated
    return first_reason(
        (
            cell.own_disks and (other_parallelism or bool(tiny.driver)),
            (
                "checkpoints on each node are tried with plain data parallel ranks alone, "
                "without experts"
            ),
        ),
        (bool(tiny.unsupported_reason), tiny.unsupported_reason),
        (device == "cpu" and bool(tiny.not_on_cpu), tiny.not_on_cpu),
    )


def _options_reason(cell: Cell, tiny: TinyModel, driver: str) -> str | None:
    """Return why the cell's options do not go with its model or the driver; None if they do."""
    compiled = bool(cell.option("compile"))
    plain_torch = driver == "torch" and cell.pp == 1 and not compiled
    # DeepSpeed's own function is re-entrant too, and is given the blocks as they are.
    by_deepspeed = cell.option("activation_checkpointing") == "deepspeed"
    reentrant = cell.option("activation_checkpointing") == "reentrant" or by_deepspeed
    partly_frozen = bool(cell.option("frozen")) or (by_deepspeed and bool(cell.option("lora")))
    # Models of transformers see to the inputs of their blocks.
    by_driver = by_deepspeed or driver == "torch" or "transformers" not in tiny.preload
    return first_reason(
        (
            cell.option("compile") is True and not has_compiler(),
            "inductor needs a C++ compiler, and there is none",
        ),
        (
            bool(cell.option("ignored_modules")) and not tiny.ignored_module,
            f"the model {tiny.name} has no frozen module to leave out of the sharding",
        ),
        (
            bool(cell.option("lora")) and not tiny.lora_targets,
            f"PEFT is for transformers' models, and {tiny.name} is not one",
        ),
        (
            cell.option("activation_checkpointing") == "selective" and not plain_torch,
            (
                "selective activation checkpointing is driven by the torch driver alone, "
                "uncompiled and without stages"
            ),
        ),
        (
            by_deepspeed and driver != "deepspeed",
            "deepspeed.checkpointing is driven by the deepspeed driver alone",
        ),
        (
            reentrant and cell.pp > 1,
            (
                "a stage asks for gradients by autograd.grad, which torch refuses for re-entrant "
                "recomputation"
            ),
        ),
        (
            reentrant and compiled,
            "torch.compile makes no graph of what is recomputed re-entrantly",
        ),
        (
            reentrant and tiny.name == "twice",
            (
                "each use of a block has a backward pass of its own, which DDP's documentation "
                "excludes, and FSDP and ZeRO-3 fail"
            ),
        ),
        (
            reentrant and partly_frozen and by_driver,
            (
                "behind a frozen part no input has a gradient, and re-entrant recomputation then "
                "has none, says its documentation"
            ),
        ),
    )


def _dtypes_reason(cell: Cell, tiny: TinyModel) -> str | None:
    """Return why the cell's precision does not go with its model or options; None if it does."""
    precision = PRECISIONS.get(cell.precision)
    bf16_gradients = precision.mixed and precision.compute == "bfloat16"
    low_products = precision.mixed and precision.compute != "float32"
    loads_low = precision.mixed and precision.load != "float32"
    return first_reason(
        (
            cell.precision == "fp8" and not tiny.in_8_bits,
            (
                f"the model {tiny.name} has no layer whose sizes 16 divides: "
                "nothing would be in 8 bits"
            ),
        ),
        (
            tiny.only_float32 and precision.compute != "float32",
            f"the statistics of the few rows of model {tiny.name} turn on rounding",
        ),
        (
            bool(cell.option("ignored_modules")) and precision.compute != precision.load,
            (
                f"a module that is left out computes in {precision.load}, as it was loaded, "
                f"the others in {precision.compute}"
            ),
        ),
        (
            bool(cell.option("float32_norms")) and not loads_low,
            f"{cell.precision} has one dtype for all parameters",
        ),
        (
            cell.option("grad_accum_dtype") == "fp32" and not bf16_gradients,
            (
                f"{cell.precision} has no bfloat16 gradients with float32 masters, "
                "so there is no other dtype to sum them in"
            ),
        ),
        (
            cell.option("reduce_dtype") == "fp32" and not low_products,
            (
                f"{cell.precision} has one dtype for products and optimizer, "
                "in which gradients travel"
            ),
        ),
        (
            bool(cell.option("param_groups")) and not cell.option("use_orig_params"),
            "a flat parameter cannot be split into param groups",
        ),
    )


def _not_quantized(
    cell: Cell, tiny: TinyModel, masters: str, device: str, *, flat: bool
) -> str | None:
    """Return why an 8-bit optimizer cannot step in the cell, or would keep no state in 8 bits.

    Args:
        cell: The cell, with ``optimizer`` at ``adam8bit``.
        tiny: Its model.
        masters: Dtype of the parameters that the optimizer updates.
        device: Kind of the ranks' devices.
        flat: Whether these parameters are flat partitions of several.
    """
    shards = 1
    if STRATEGIES.get(cell.strategy).shards:
        shards = cell.dp_size * cell.tp // int(cell.option("dp_replicate"))
    return first_reason(
        (
            flat,
            (
                f"torchao silently keeps state in float32 where {cell.strategy}'s flat shards are "
                "no multiple of its blocks"
            ),
        ),
        (
            cell.strategy == "zero0",
            (
                "DeepSpeed loads with a function for map_location, which torch refuses for "
                "torchao's tensors"
            ),
        ),
        (
            cell.strategy == "fsdp2" and masters != "float32",
            (
                "AdamW8bit cannot step on DTensors of bfloat16: "
                "lerp says 'expected dtype torch.bfloat16 for `end`'"
            ),
        ),
        (
            tiny.largest // shards < QUANTIZED_FROM,
            (
                f"torchao quantizes state from {QUANTIZED_FROM} elements on a rank on: "
                f"no part of model {tiny.name} has so many"
            ),
        ),
        (
            bool(cell.option("compile")) and device == "cpu",
            (
                "AdamW8bit compiles its step, on the CPU for minutes, so that nothing is compiled "
                "there beside it"
            ),
        ),
    )


def _no_quantized_base(cell: Cell, driver: str) -> str | None:
    """Return why the cell cannot train an adapter on a quantized model; None if it can.

    The reasons were found with torchao 0.18.
    """
    broadcasts_parameters = cell.strategy == "fsdp1" or (
        cell.strategy == "ddp" and driver != "torch"
    )
    return first_reason(
        (
            cell.strategy == "fsdp2",
            (
                "fully_shard cuts parameters by aten.split, which is 'unimplemented' for torchao's "
                "Int8Tensor"
            ),
        ),
        (
            broadcasts_parameters,
            (
                "FSDP1, and DDP unless its init_sync is False, for which accelerate has no "
                "argument, broadcast parameters by aten.view, which is 'unimplemented' for "
                "torchao's Int8Tensor"
            ),
        ),
        (
            cell.strategy != "ddp",
            (
                "DeepSpeed casts the model, and torchao's Int8Tensor does not allow it: "
                "'Couldn't swap Linear.weight'"
            ),
        ),
        (
            cell.precision not in {"fp32", "bf16_upcast"} or bool(cell.option("compile")),
            "an adapter on a quantized model is tried in fp32 and bf16_upcast alone, uncompiled",
        ),
    )


def listed(parts: Any) -> list[Any]:
    """Return several optimizers or schedulers as they are, and a single one in a list."""
    if isinstance(parts, list):
        return parts
    return [parts]

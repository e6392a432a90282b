"""Base class of the built-in drivers: a tiny model, its optimizer, schedule and data, and the reference."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_distcompat.cost import QUANTIZED_FROM
from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers import _releases
from pytest_distcompat.installed import has_compiler
from pytest_distcompat.models import TinyModel, model_of
from pytest_distcompat.precisions import PRECISIONS, Precision
from pytest_distcompat.strategies import STRATEGIES, Strategy, WrapSpec, _context, _expert, _pipeline, _tensor
from pytest_distcompat.strategies._base import MAX_NORM

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.models._base import Batch
    from pytest_distcompat.world import World

LEARNING_RATE, DECAY, GAMMA = 3e-3, 0.01, 0.95
#: Steps of an epoch. With accumulation the last one has one micro-batch only, like the end of a real epoch.
EPOCH_STEPS = 8
#: The number of the batch that ``evaluate`` computes on; no step trains on it.
HELD_OUT_BATCH = 999


class TinyDriver(Driver):
    """Driver that trains a tiny model with AdamW, a decaying learning rate and clipped gradients."""

    #: What the loss averages: ``rank``, the means of ranks and micro-batches; ``token``, all tokens of a step equally.
    mean: ClassVar[str] = "rank"
    needs_options: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "optimizer_adam8bit": {"model": "wide"},
        "model_wide": {"optimizer": "adam8bit"},
    }
    #: The values of option ``optimizer`` that update flat partitions of several parameters as they update parameters.
    update_flat: ClassVar[tuple[str, ...]] = ("adamw", "sgd")
    #: Those that compile their step themselves.
    compile_themselves: ClassVar[tuple[str, ...]] = ("adam8bit",)
    #: Whether the optimizer is fused, which needs parameters of one kind and state of one dtype.
    fused: ClassVar[bool] = True

    def __init__(self, cell: Cell, world: World) -> None:
        super().__init__(cell, world)
        self.strategy: Strategy = STRATEGIES.get(cell.strategy)
        self.precision: Precision = PRECISIONS.get(cell.precision)
        self.tiny: TinyModel = model_of(cell)
        # A driver of another model names its own classes.
        self.blocks = (
            type(self).blocks or self.tiny.blocks or (self.tiny.find_blocks() if self.tiny.find_blocks else ())
        )
        self.accumulate = int(cell.option("grad_accum"))
        self.max_norm = self.said(
            MAX_NORM,
            *("TrainingArguments.max_grad_norm", "DeepSpeedPlugin.gradient_clipping", "ds_config.gradient_clipping"),
        )
        if cell.option("ignored_modules"):
            self.ignored_modules = (self.tiny.ignored_module,)

    def said(self, default: Any, *places: str) -> Any:
        """Return what the cell's settings say in the first of these places, by which the reference follows; else the default."""
        names = (place.partition(".") for place in places)
        values = (self.cell.settings(name).get(field, "auto") for name, _, field in names)
        return next((value for value in values if value != "auto"), default)

    @property
    def wrap_spec(self) -> WrapSpec:
        """Return which modules are wrapped, recomputed and compiled one by one."""
        tiny, ignored = self.tiny, tuple(self.ignored_modules)
        return WrapSpec(tuple(self.blocks), tiny.unit_size, ignored, tiny.tp_plan, tiny.experts, tiny.unused)

    @classmethod
    def unsupported_reason(cls, cell: Cell, device: str = "cpu") -> str | None:
        """Return why the cell cannot run: the driver, strategy, precision or model cannot, or a library is missing."""
        problem = (
            super().unsupported_reason(cell, device)
            or _releases.missing(cls.needs(cell))
            or STRATEGIES.get(cell.strategy).unsupported_reason(cell)
            or PRECISIONS.get(cell.precision).unsupported_reason(cell, device)
        )
        if problem:
            return problem
        tiny = model_of(cell)
        if cell.per_node and (
            cell.dp_size < cell.world_size or cell.ep > 1 or cell.option("dp_replicate") != 1 or tiny.driver
        ):
            return "checkpoints on each node are tried with plain data parallel ranks alone, without experts"
        if tiny.unsupported_reason:
            return tiny.unsupported_reason
        if device == "cpu" and tiny.not_on_cpu:
            return tiny.not_on_cpu
        if cell.option("compile") is True and not has_compiler():
            return "inductor needs a C++ compiler, and there is none"
        if cell.option("ignored_modules") and not tiny.ignored_module:
            return f"the model {tiny.name} has no frozen module to leave out of the sharding"
        if cell.option("lora") and not tiny.lora_targets:
            return f"PEFT is for transformers' models, and {tiny.name} is not one"
        if cell.option("activation_checkpointing") == "selective" and (
            cls.name != "torch" or cell.pp > 1 or cell.option("compile")
        ):
            return (
                "selective activation checkpointing is driven by the torch driver alone, uncompiled and without stages"
            )
        if cell.option("lora") == "int8" and (problem := _no_quantized_base(cell, cls.name)):
            return problem
        if cell.precision == "fp8" and not tiny.in_8_bits:
            return f"the model {tiny.name} has no layer whose sizes 16 divides: nothing would be in 8 bits"
        precision = PRECISIONS.get(cell.precision)
        if tiny.only_float32 and precision.compute != "float32":
            return f"the statistics of the few rows of model {tiny.name} turn on rounding"
        if cell.option("ignored_modules") and precision.compute != precision.load:
            return f"a module that is left out computes in {precision.load}, as it was loaded, the others in {precision.compute}"
        if cell.option("float32_norms") and (precision.load == "float32" or not precision.mixed):
            return f"{cell.precision} has one dtype for all parameters"
        if cell.option("grad_accum_dtype") == "fp32" and not (precision.mixed and precision.compute == "bfloat16"):
            return f"{cell.precision} has no bfloat16 gradients with float32 masters, so there is no other dtype to sum them in"
        if cell.option("reduce_dtype") == "fp32" and not (precision.mixed and precision.compute != "float32"):
            return f"{cell.precision} has one dtype for products and optimizer, in which gradients travel"
        if cell.option("param_groups") and not cell.option("use_orig_params"):
            return "a flat parameter cannot be split into param groups"
        if cell.tp > 1 and (problem := _tensor.unsupported_reason(cell, cls.plan_of(tiny))):
            return problem
        if tiny.largest and cell.option("optimizer") != "adam8bit":
            return f"the model {tiny.name} is for optimizer=adam8bit, which others have too small layers for"
        if tiny.driver not in {"", cls.name}:
            return f"the model {tiny.name} is for the {tiny.driver} driver"
        experts = cls.experts_of(tiny)
        spread = cell.ep > 1 or tiny.driver or (cell.tp > 1 and experts)
        if spread and (problem := _expert.unsupported_reason(cell, tiny, experts)):
            return problem
        if cell.pp > 1 and (problem := _pipeline.unsupported_reason(cell, tiny.stages)):
            return problem
        if cell.cp > 1 and (problem := _context.unsupported_reason(cell)):
            return problem
        if cell.option("lora") and cell.option("frozen"):
            return "with an adapter the base model is frozen anyway"
        if cell.option("optimizer") != "adamw":
            if precision.scaled or cell.option("param_groups") or not cell.option("use_orig_params"):
                return "other optimizers are for one group of unscaled parameters, which keep their own tensors"
            flat = cell.strategy == "fsdp1" or STRATEGIES.get(cell.strategy).flat_masters
            if cell.option("optimizer") == "adam8bit":
                loaded = precision.load if cls.name == "torch" else precision.master
                return _not_quantized(cell, tiny, loaded, device, flat=flat)
            # torch upcasts nothing, nor do accelerate and Trainer under DDP.
            masters = precision.load if cls.name == "torch" or cell.strategy == "ddp" else precision.master
            if cell.option("optimizer") == "sgd" and masters == "bfloat16":
                return "SGD's steps at this rate are smaller than bfloat16 resolves, in which its parameters are"
            if cell.option("optimizer") not in cls.update_flat and flat:
                return f"{cell.strategy}'s shards have one dimension, and {cell.option('optimizer')} updates matrices"
        return None

    @classmethod
    def plan_of(cls, tiny: TinyModel) -> Mapping[str, str]:
        """Return the plan by which the driver cuts the model's layers; empty if there is none."""
        return tiny.tp_plan

    @classmethod
    def experts_of(cls, tiny: TinyModel) -> str:
        """Return the name of the experts that the driver can spread over ranks; empty if the model has none."""
        return tiny.experts

    @classmethod
    def needs(cls, cell: Cell) -> tuple[str, ...]:
        """Return the modules and releases that the cell requires (PEP 508)."""
        zero = STRATEGIES.get(cell.strategy).zero_stage is not None
        modules = [module for module in cls.libraries if module != "deepspeed" or zero]
        modules += ["peft"] if cell.option("lora") else []
        return (*modules, *model_of(cell).preload, *_releases.required(cell, cls.libraries))

    def build_model(self) -> Module:
        """Return the tiny model, made from a fixed seed, in the precision's load dtype; buffers keep their own."""
        model, trained = self._base_model()
        if self.cell.option("frozen"):
            for name in self.tiny.frozen_modules:
                model.get_submodule(name).requires_grad_(requires_grad=False)
        if not self.cell.option("lora"):
            return model
        from peft import LoraConfig, get_peft_model

        targets = list(self.tiny.lora_targets)
        config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, lora_dropout=0.0, modules_to_save=trained)
        adapted: Module = get_peft_model(model, config, autocast_adapter_dtype=False)
        return adapted

    def _base_model(self) -> tuple[Module, list[str] | None]:
        """Return the model without an adapter; quantized all but its last linear layer, with the name of that one."""
        import torch

        torch.manual_seed(0)
        model = self.tiny.make()
        load = getattr(torch, self.precision.load)
        for name, parameter in model.named_parameters():
            if not (self.cell.option("float32_norms") and "norm" in name):
                parameter.data = parameter.data.to(load)
        if self.cell.option("lora") != "int8":
            return model, None
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        linear = torch.nn.Linear
        last = [name for name, module in model.named_modules() if isinstance(module, linear)][-1]
        quantize_(model, Int8WeightOnlyConfig(), lambda module, name: isinstance(module, linear) and name != last)
        return model, [last]

    def make_optimizer(self, model: Module) -> Any:
        """Return the optimizer of the trainable parameters, of option ``muon`` two: Muon's are matrices alone."""
        name = self.cell.option("optimizer")
        if name == "adamw":
            return self.make_adamw(self.groups(model))
        from torch import optim

        groups = self.groups(model)
        if name == "sgd":
            return self.make_one(optim.SGD, groups, momentum=0.9)
        if name == "adafactor":
            return self.make_one(optim.Adafactor, groups)
        if name == "adam8bit":
            from torchao.optim import AdamW8bit

            self.compile_nothing()
            return self.make_one(AdamW8bit, groups)
        return self.muon_and_adamw(groups)

    def make_one(self, kind: Any, groups: Any, **given: Any) -> Any:
        """Return an optimizer of that class, with the driver's rate and decay and what the cell sets of its arguments."""
        settings = {"lr": LEARNING_RATE, "weight_decay": DECAY, **given}
        return kind(groups, **self.cell.with_settings(kind.__name__, settings))

    def compile_nothing(self) -> None:
        """Have an optimizer that compiles itself run uncompiled on the CPU, where its first step would take minutes."""
        if self.cell.option("optimizer") in self.compile_themselves and self.world.device == "cpu":
            import torch

            torch.compiler.set_stance("force_eager")

    def muon_and_adamw(self, groups: Any) -> list[torch.optim.Optimizer]:
        """Return Muon for the matrices among parameters or param groups, and AdamW for the rest."""
        from torch.optim import Muon

        given = groups if isinstance(groups[0], dict) else [{"params": groups}]
        split = [
            [{**group, "params": [p for p in group["params"] if (p.dim() == 2) is matrices]} for group in given]
            for matrices in (True, False)
        ]
        # DeepSpeed removes empty groups.
        matrices, rest = ([group for group in groups if group["params"]] for groups in split)
        return [self.make_one(Muon, matrices), self.make_adamw(rest)]

    def make_adamw(self, groups: Any) -> torch.optim.Optimizer:
        """Return AdamW; option ``param_groups`` exempts biases and norms from weight decay."""
        # Fused, as in transformers.Trainer: unfused, its operations take a fifth of a suite on the CPU.
        from torch.optim import AdamW

        # FSDP1's gradient scaler does not support a fused optimizer: https://github.com/pytorch/pytorch/issues/140514
        fused = self.fused and not (self.cell.strategy == "fsdp1" and self.precision.scaled)
        # Parameters on different meshes cannot be updated in one operation.
        one_by_one = {"fused": False, "foreach": False} if self.cell.tp * self.cell.ep > 1 else {}
        made: torch.optim.Optimizer = self.make_one(AdamW, groups, **{"fused": fused} | one_by_one)
        return made

    def groups(self, model: Module) -> Any:
        """Return what the optimizer is made of: parameters, or param groups."""
        # Training code with frozen parameters usually passes all of ``model.parameters()``.
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad or self.cell.option("frozen")]
        if not self.cell.option("param_groups"):
            return [p for _, p in trained]
        # By name: FSDP1 makes every shard one-dimensional.
        undecayed = [p for name, p in trained if name.endswith("bias") or "norm" in name]
        undecayed_ids = {id(p) for p in undecayed}
        decayed = [p for _, p in trained if id(p) not in undecayed_ids]
        return [{"params": decayed, "weight_decay": DECAY}, {"params": undecayed, "weight_decay": 0.0}]

    def make_scheduler(self, optimizer: Any, every: int = 1) -> Any:
        """Return a scheduler that multiplies the learning rate by 0.95 every ``every`` calls; of several optimizers a list."""
        from torch.optim.lr_scheduler import StepLR

        if isinstance(optimizer, list):
            return [self.make_scheduler(one, every) for one in optimizer]
        return StepLR(optimizer, step_size=every, gamma=GAMMA)

    def micros(self, number: int) -> range:
        """Return the micro-batches of a step, by their index in the epoch; every epoch has the same."""
        start = number % EPOCH_STEPS * self.accumulate
        return range(start, min(start + self.accumulate, self.epoch))

    @property
    def epoch(self) -> int:
        """Return how many micro-batches an epoch has on each rank."""
        return (EPOCH_STEPS - 1) * self.accumulate + 1

    def batch_of(self, index: int, rank: int) -> Batch:
        """Return the micro-batch of any rank at that index of the epoch, on this rank's device."""
        return {name: value.to(self.world.device) for name, value in self.tiny.batch(index, rank).items()}

    def _joined(self, index: int, ranks: int) -> Batch:
        """Return the rows of that micro-batch of all ranks as one."""
        import torch

        batches = [self.batch_of(index, rank) for rank in range(ranks)]
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}

    def batches(self, number: int) -> Iterator[tuple[Batch, bool]]:
        """Yield this rank's micro-batches of a step, each with whether it is the last, and count their tokens."""
        self.tokens = 0
        indices = self.micros(number)
        for index in indices:
            batch = self.batch_of(index, self.cell.dp_rank(self.world.rank))
            self.tokens += self.tiny.count(batch) // self.cell.cp
            yield batch, index == indices[-1]

    def seed_rank(self) -> None:
        """Seed torch differently on each rank, but alike where ranks of tensor parallelism have the same activations.

        With one seed all ranks would drop the same. Under ``sp`` the activations of peers are parts of the sequence.
        """
        import torch

        rank = self.world.rank if self.cell.option("sp") else self.cell.tp_peers(self.world.rank)[0]
        torch.manual_seed(1 + rank)

    def save_random(self, directory: Path) -> None:
        """Write this rank's random states: the CPU's and, on a GPU, also that of CUDA, from which dropout draws there."""
        import torch

        states = {"cpu": torch.get_rng_state()}
        if self.world.device.startswith("cuda"):
            states["cuda"] = torch.cuda.get_rng_state(self.world.device)
        torch.save(states, directory / f"rng_{self.world.rank}.pt")

    def load_random(self, directory: Path, *, required: bool) -> None:
        """Restore this rank's random states; a rank without saved ones keeps its own, unless they are ``required``."""
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
        """Make gradients of one layer infinite on the highest rank: some ranks hold none of it in a flat partition."""
        layers = (module for module in self.model.modules() if not list(module.children()))
        first = next(layer for layer in layers if getattr(getattr(layer, "weight", None), "requires_grad", False))

        def hook(_layer: Module, _inputs: Any, output: Any) -> None:
            if output.requires_grad and self.world.rank == self.world.size - 1:
                output.register_hook(lambda gradient: gradient * math.inf)

        handle = first.register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    def dataset(self, ranks: int) -> list[dict[str, torch.Tensor]]:
        """Return the rows of an epoch in the order of batch samplers: micro-batch by micro-batch, rank by rank.

        Ranks of a sequence load several micro-batches, which Ulysses hands out in turn, and want positions too.
        """
        rows, cp = [], self.cell.cp
        for first, rank, turn in itertools.product(range(0, self.epoch, cp), range(ranks), range(cp)):
            batch = self.tiny.batch(first + turn, rank)
            if cp > 1:
                batch["position_ids"] = _context.positions_of(batch["input_ids"])
            rows += [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
        return rows

    def loss(self, model: Module, number: int, rank: int) -> torch.Tensor:
        """Return the loss on a micro-batch, counted over epochs."""
        return self.tiny.loss(model, self.batch_of(number % self.epoch, rank))

    def outputs(self, model: Module) -> torch.Tensor:
        """Return the logits on a batch that no step trains on."""
        return self.tiny.outputs(model, self.batch_of(HELD_OUT_BATCH, 0))

    def evaluate(self, model: Module) -> torch.Tensor:
        """Return the logits on a batch that no step trains on, in evaluation mode."""
        import torch

        model.eval()
        if model is not self.model and len({parameter.dtype for parameter in model.parameters()}) > 1:
            # Trained weights in float32 beside frozen ones in bfloat16 cannot be multiplied.
            model.float()
        with torch.no_grad():
            return self.outputs(model)

    def reload(self, directory: Path) -> Module:
        """Load the exported files: ``from_pretrained`` for transformers' and PEFT's models, else the state dict."""
        if not self.cell.option("lora"):
            return self.tiny.reload(directory)
        from peft import PeftModel

        adapted: Module = PeftModel.from_pretrained(self._base_model()[0], directory)
        return adapted

    def reference(self, model: Module, number: int, ranks: int) -> float:
        """Take one step on the batches of all ranks, one after the other, in float32, and return the loss."""
        from torch.nn.utils import clip_grad_norm_

        if self.optimizer is None:
            self.optimizer = self.make_optimizer(model)
            self.scheduler = self.make_scheduler(self.optimizer)
        for one in listed(self.optimizer):
            one.zero_grad()
        batches = [self.batch_of(index, rank) for rank in range(ranks) for index in self.micros(number)]
        means = 1
        if self.tiny.one_batch:
            batches, means = [self._joined(index, ranks) for index in self.micros(number)], ranks
        weights = [self.tiny.count(batch) if self.mean == "token" else means for batch in batches]
        # The incomplete last step of an epoch is divided by the full count too, as trainers that average micro-batches do.
        divisor = sum(weights) if self.mean == "token" else self.accumulate * ranks
        losses = []
        for batch, weight in zip(batches, weights, strict=True):
            loss = self.tiny.loss(model, batch)
            (loss * weight / divisor).backward()  # type: ignore[no-untyped-call]
            losses.append(float(loss.detach()))
        total = sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / divisor
        if not self.tiny.one_batch:
            self.averages = _averages(losses, list(map(self.tiny.count, batches)), ranks, self.accumulate)
        self.grad_norm = float(clip_grad_norm_(model.parameters(), self.max_norm or math.inf))
        for one in (*listed(self.optimizer), *listed(self.scheduler)):
            one.step()
        return total


def _averages(losses: list[float], tokens: list[int], ranks: int, accumulate: int) -> dict[str, float]:
    """Return a step's loss by what counts alike in it, from the loss and the tokens of each micro-batch, rank by rank."""

    def mean(values: list[float], weights: list[int]) -> float:
        return sum(value * weight for value, weight in zip(values, weights, strict=True)) / max(1, sum(weights))

    each = len(losses) // ranks
    own = [slice(each * rank, each * (rank + 1)) for rank in range(ranks)]
    across = [slice(nth, None, each) for nth in range(each)]
    return {
        "each token": mean(losses, tokens),
        "each rank": sum(mean(losses[one], tokens[one]) for one in own) / ranks,
        "each micro-batch": sum(losses) / len(losses),
        "each micro-batch, also those that are missing,": sum(losses) / (accumulate * ranks),
        "each micro-batch of all ranks together": sum(mean(losses[one], tokens[one]) for one in across) / each,
    }


def _not_quantized(cell: Cell, tiny: TinyModel, masters: str, device: str, *, flat: bool) -> str | None:
    """Return why a cell's optimizer would have no state in 8 bits, or cannot step; None if it has and can."""
    if flat:
        return (
            f"torchao silently keeps state in float32 where {cell.strategy}'s flat shards are no multiple of its blocks"
        )
    if cell.strategy == "zero0":
        return "DeepSpeed loads with a function for map_location, which torch refuses for torchao's tensors"
    if cell.strategy == "fsdp2" and masters != "float32":
        return "AdamW8bit cannot step on DTensors of bfloat16: lerp says 'expected dtype torch.bfloat16 for `end`'"
    parts = cell.dp_size * cell.tp // int(cell.option("dp_replicate")) if STRATEGIES.get(cell.strategy).shards else 1
    if tiny.largest // parts < QUANTIZED_FROM:
        return f"torchao quantizes state from {QUANTIZED_FROM} elements on a rank on: no part of model {tiny.name} has so many"
    if cell.option("compile") and device == "cpu":
        return "AdamW8bit compiles its step, on the CPU for minutes, so that nothing is compiled there beside it"
    return None


def _no_quantized_base(cell: Cell, driver: str) -> str | None:
    """Return why the cell cannot train an adapter on a quantized model; None if it can. Measured with torchao 0.18."""
    if cell.strategy == "fsdp2":
        return "fully_shard cuts parameters by aten.split, which is 'unimplemented' for torchao's Int8Tensor"
    if cell.strategy == "fsdp1" or (cell.strategy == "ddp" and driver != "torch"):
        return (
            "FSDP1, and DDP unless its init_sync is False, for which accelerate has no argument, broadcast parameters by "
            "aten.view, which is 'unimplemented' for torchao's Int8Tensor"
        )
    if cell.strategy != "ddp":
        return "DeepSpeed casts the model, and torchao's Int8Tensor does not allow it: 'Couldn't swap Linear.weight'"
    if cell.precision not in {"fp32", "bf16_upcast"} or cell.option("compile"):
        return "an adapter on a quantized model is tried in fp32 and bf16_upcast alone, uncompiled"
    return None


def listed(one: Any) -> list[Any]:
    """Return several optimizers or schedulers as they are, and one in a list."""
    return one if isinstance(one, list) else [one]

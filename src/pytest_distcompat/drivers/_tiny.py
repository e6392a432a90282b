"""What the built-in drivers share: a tiny model, its optimizer and schedule, its data, and the reference."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers import _releases
from pytest_distcompat.models import MODELS, TinyModel
from pytest_distcompat.precisions import PRECISIONS, Precision
from pytest_distcompat.strategies import STRATEGIES, Strategy
from pytest_distcompat.strategies._base import MAX_NORM

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.models._base import Batch
    from pytest_distcompat.world import World

LEARNING_RATE, DECAY, GAMMA = 3e-3, 0.01, 0.95
#: Steps an epoch. With accumulation the last of them has one micro-batch only, as the end of a real epoch has.
EPOCH = 8
#: The batch that ``evaluate`` computes on: one that nobody trains on.
HELD_OUT = 999


class TinyDriver(Driver):
    """A driver that trains one of the tiny models with AdamW under a decaying learning rate, gradients clipped."""

    #: What a loss is the mean of: ``rank``, the mean of the ranks' and micro-batches' means; ``token``, all tokens alike.
    mean: ClassVar[str] = "rank"
    #: Whether one operation updates all parameters. It takes one kind of tensor, and one dtype of state.
    fused: ClassVar[bool] = True

    def __init__(self, cell: Cell, world: World) -> None:
        super().__init__(cell, world)
        self.strategy: Strategy = STRATEGIES.get(cell.strategy)
        self.precision: Precision = PRECISIONS.get(cell.precision)
        self.tiny: TinyModel = MODELS.get(str(cell.option("model")))
        # A driver of another model names its own.
        self.blocks = type(self).blocks or self.tiny.blocks
        self.accumulate = int(cell.option("grad_accum"))
        if cell.option("ignored_modules"):
            self.ignored_modules = (self.tiny.ignored_module,)

    def block_modules(self, model: Module) -> list[Module]:
        """Return the modules of the model that are wrapped, recomputed and compiled one by one."""
        return [module for module in model.modules() if type(module).__name__ in self.blocks]

    @classmethod
    def unsupported_reason(cls, cell: Cell, device: str = "cpu") -> str | None:
        """An option the driver does not speak, one that makes no sense for the strategy, the precision or the model, or a
        library that is not there.
        """
        problem = (
            super().unsupported_reason(cell, device)
            or _releases.missing(cls.needs(cell))
            or STRATEGIES.get(cell.strategy).unsupported_reason(cell)
            or PRECISIONS.get(cell.precision).unsupported_reason(cell, device)
        )
        if problem:
            return problem
        tiny = MODELS.get(str(cell.option("model")))
        if cell.option("ignored_modules") and not tiny.ignored_module:
            return f"the model {tiny.name} has no frozen module to leave out of the sharding"
        if cell.option("lora") and not tiny.adapted:
            return f"PEFT is for transformers' models, {tiny.name} is none"
        if cell.precision == "fp8" and not tiny.in_8_bits:
            return f"the model {tiny.name} has no layer whose sizes 16 divides: nothing would be in 8 bits"
        precision = PRECISIONS.get(cell.precision)
        if cell.option("ignored_modules") and precision.compute != precision.load:
            return f"a module that is left out computes in {precision.load}, as it was loaded, the others in {precision.compute}"
        if cell.option("float32_norms") and (precision.load == "float32" or not precision.mixed):
            return f"{cell.precision} has one dtype for all that is loaded"
        if cell.option("grad_accum_dtype") == "fp32" and not (precision.mixed and precision.compute == "bfloat16"):
            return f"{cell.precision} has no gradients in bfloat16 beside float32 masters, which could be added up in either"
        if cell.option("reduce_dtype") == "fp32" and not (precision.mixed and precision.compute != "float32"):
            return f"{cell.precision} has one dtype for products and optimizer, in which gradients travel"
        if cell.option("param_groups") and not cell.option("use_orig_params"):
            return "a flat parameter belongs to one group as a whole"
        if cell.option("lora") and cell.option("frozen"):
            return "with an adapter all else is frozen anyway"
        return None

    @classmethod
    def needs(cls, cell: Cell) -> tuple[str, ...]:
        """The modules without which the cell cannot be run, and releases from which on they can say it (PEP 508)."""
        zero = STRATEGIES.get(cell.strategy).zero_stage is not None
        found = [module for module in cls.libraries if module != "deepspeed" or zero]
        found += ["peft"] if cell.option("lora") else []
        return (*found, *MODELS.get(str(cell.option("model"))).preload, *_releases.needed(cell, cls.libraries))

    def build_model(self) -> Module:
        """The tiny model from a fixed seed, in the precision's load dtype (buffers keep their own)."""
        import torch

        torch.manual_seed(0)
        model = self.tiny.make()
        load = getattr(torch, self.precision.load)
        for name, parameter in model.named_parameters():
            if not (self.cell.option("float32_norms") and "norm" in name):
                parameter.data = parameter.data.to(load)
        if self.cell.option("frozen"):
            for name in self.tiny.part:
                model.get_submodule(name).requires_grad_(requires_grad=False)
        return self._adapted(model) if self.cell.option("lora") else model

    def _adapted(self, model: Module) -> Module:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=4, lora_alpha=8, target_modules=list(self.tiny.adapted), lora_dropout=0.0)
        adapted: Module = get_peft_model(model, config, autocast_adapter_dtype=False)
        return adapted

    def make_optimizer(self, model: Module) -> torch.optim.Optimizer:
        """AdamW on the trainable parameters; with the option ``param_groups``, those of one dimension without weight decay.

        Fused, as transformers.Trainer has it by default. One by one its operations are a fifth of a suite on the CPU: torch
        works out for each, and for each shape of a DTensor, anew in every process, what becomes of the placements.
        """
        from torch.optim import AdamW

        # FSDP1's gradient scaler and a fused optimizer do not go together: https://github.com/pytorch/pytorch/issues/140514
        fused = self.fused and not (self.cell.strategy == "fsdp1" and self.precision.scaled)
        return AdamW(self.groups(model), lr=LEARNING_RATE, weight_decay=DECAY, fused=fused)

    def groups(self, model: Module) -> Any:
        """What an optimizer is made of: parameters, or groups of them."""
        # Who freezes a part of a model hands ``model.parameters()`` over all the same.
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad or self.cell.option("frozen")]
        if not self.cell.option("param_groups"):
            return [p for _, p in trained]
        # By name: FSDP1 makes every shard one-dimensional.
        free = [p for name, p in trained if name.endswith("bias") or "norm" in name]
        known = {id(p) for p in free}
        decayed = [p for _, p in trained if id(p) not in known]
        return [{"params": decayed, "weight_decay": DECAY}, {"params": free, "weight_decay": 0.0}]

    def make_scheduler(self, optimizer: torch.optim.Optimizer, every: int = 1) -> Any:
        """Every step (or every ``every`` calls) multiplies the learning rate by 0.95, so that a scheduler left behind shows."""
        from torch.optim.lr_scheduler import StepLR

        return StepLR(optimizer, step_size=every, gamma=GAMMA)

    def micros(self, number: int) -> range:
        """The micro-batches of a step, by their place in the epoch; every epoch has the same."""
        start = number % EPOCH * self.accumulate
        return range(start, min(start + self.accumulate, self.epoch))

    @property
    def epoch(self) -> int:
        """Micro-batches an epoch has, on each rank."""
        return (EPOCH - 1) * self.accumulate + 1

    def batch_of(self, place: int, rank: int) -> Batch:
        """Any rank's micro-batch in that place of the epoch, on this one's device."""
        return {name: value.to(self.world.device) for name, value in self.tiny.batch(place, rank).items()}

    def batches(self, number: int) -> Iterator[tuple[Batch, bool]]:
        """This rank's micro-batches of a step, each with whether it is the last; counts what is learned from."""
        self.tokens = 0
        places = self.micros(number)
        for place in places:
            batch = self.batch_of(place, self.world.rank)
            self.tokens += self.tiny.count(batch)
            yield batch, place == places[-1]

    @contextlib.contextmanager
    def overflowing(self) -> Iterator[None]:
        """What is computed inside gives the highest rank infinite gradients in the first layer, and in no other.

        In one layer, so that of a flat partition some ranks hold nothing of it.
        """
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
        """An epoch row by row, in the order in which batch samplers deal it out: micro-batch by micro-batch, rank by rank."""
        found = []
        for place in range(self.epoch):
            for rank in range(ranks):
                batch = self.tiny.batch(place, rank)
                found += [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
        return found

    def evaluate(self, model: Module) -> torch.Tensor:
        """Logits on a batch that nobody trained on."""
        import torch

        model.eval()
        if model is not self.model and len({parameter.dtype for parameter in model.parameters()}) > 1:
            # Trained weights in float32 beside frozen ones in bfloat16: no model computes with both.
            model.float()
        with torch.no_grad():
            return self.tiny.outputs(model, self.batch_of(HELD_OUT, 0))

    def reload(self, directory: Path) -> Module:
        """``from_pretrained`` for transformers' models; a plain module's state dict."""
        if not self.cell.option("lora"):
            return self.tiny.reload(directory)
        from peft import PeftModel

        adapted: Module = PeftModel.from_pretrained(TinyDriver.base_model(self), directory)
        return adapted

    def base_model(self) -> Module:
        """The model below an adapter."""
        import torch

        torch.manual_seed(0)
        model = self.tiny.make()
        return model.to(getattr(torch, self.precision.load))

    def reference(self, model: Module, number: int, ranks: int) -> float:
        """All batches of all ranks, one after the other, in float32; the norm is that of all gradients together."""
        from torch.nn.utils import clip_grad_norm_

        if self.optimizer is None:
            self.optimizer = self.make_optimizer(model)
            self.scheduler = self.make_scheduler(self.optimizer)
        self.optimizer.zero_grad()
        batches = [self.batch_of(place, rank) for rank in range(ranks) for place in self.micros(number)]
        weights = [self.tiny.count(batch) if self.mean == "token" else 1 for batch in batches]
        # An incomplete step at the end of an epoch counts for as much less where micro-batches are averaged.
        whole = sum(weights) if self.mean == "token" else self.accumulate * ranks
        total = 0.0
        for batch, weight in zip(batches, weights, strict=True):
            loss = self.tiny.loss(model, batch) * weight / whole
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        self.grad_norm = float(clip_grad_norm_(model.parameters(), MAX_NORM))
        self.optimizer.step()
        self.scheduler.step()
        return total

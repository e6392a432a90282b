"""The training that all built-in drivers share: the tiny model, its optimizer and its batches.

A driver is the class by which a trainer is tested; a cell, such as ``fsdp2-fp32-w2-grad_accum_2``,
says what is trained: strategy, precision, number of ranks, options. The built-in drivers inherit,
one from the other, ``TinyTraining`` (what is trained), ``TinyReference`` (the same training in one
process, ``_tiny_reference.py``) and ``TinyDriver`` (``tiny.py``). Each rank of a run makes an
object of the driver. Its methods ``build_model``, ``build`` and ``step`` call the methods here:

- The model is the ``TinyModel`` of the cell's option ``model``, made from a fixed seed.
- The optimizer is AdamW, or what option ``optimizer`` says, with a learning rate that decays.
- Batches are numbered: the micro-batch of index 3 on rank 1 is the same in every process, so that
  the reference can train on the batches of all ranks. An epoch has 8 steps. With ``grad_accum`` at
  2 a step has two micro-batches, but the last one of an epoch has one: an epoch has 15.

Numbers may be changed by settings of the libraries, which option ``set`` of a cell holds, such as
``TrainingArguments.weight_decay=0.1``. The reference must follow these, so they are read here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_distcompat.driver import Driver
from pytest_distcompat.ext.upstream.drivers import _loaded
from pytest_distcompat.models import TinyModel, model_of
from pytest_distcompat.parallel import context_parallel
from pytest_distcompat.precisions import PRECISIONS, Precision
from pytest_distcompat.strategies import MAX_NORM, STRATEGIES, Strategy, WrapSpec

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.models import Batch
    from pytest_distcompat.world import World

#: The optimizer's learning rate and weight decay, and the factor on the learning rate at each step.
LEARNING_RATE, DECAY, GAMMA = 3e-3, 0.01, 0.95
#: Steps of an epoch. With accumulation the last one has one micro-batch only, like the end of a
#: real epoch.
EPOCH_STEPS = 8
#: PEFT's word for all linear layers but the last, which ``TinyModel.lora_targets`` may have alone.
ALL_LINEAR = "all-linear"


class TinyTraining(Driver):
    """Driver with a tiny model, its optimizer and its numbered batches.

    Attributes:
        strategy: The cell's strategy: its backend config for each library, and what must hold.
        precision: The cell's dtypes.
        tiny: The cell's model, with its batches and its loss.
        blocks: Class names of the modules to wrap, recompute and compile one by one.
        accumulate: How many micro-batches a full step has.
        max_norm: The norm to which gradients are clipped.
    """

    #: What has an equal weight in the loss of a step. Each micro-batch has, however many tokens it
    #: has; in the driver of transformers.Trainer each ``token`` has.
    mean: ClassVar[str] = "micro_batch"
    #: No library may change torch's settings of the process in which a user's own code runs.
    keeps_settings: ClassVar[bool] = True
    #: The values of option ``optimizer`` whose optimizers call ``torch.compile`` for their step.
    compile_themselves: ClassVar[tuple[str, ...]] = ("adam8bit",)
    #: Whether AdamW is fused (one operation updates all parameters), which needs parameters of one
    #: kind and state of one dtype.
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
        # The attribute of a user's subclass; that of the object is not set yet.
        if type(self).blocks:
            return type(self).blocks
        if self.tiny.blocks:
            return self.tiny.blocks
        # An architecture of transformers names its blocks only once its class is imported.
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
        """Return which modules are wrapped, recomputed and compiled one by one.

        The backend config of a strategy gets it.
        """
        # ``TinyModel`` explains the fields of ``tiny``.
        return WrapSpec(
            blocks=tuple(self.blocks),
            min_num_params=self.tiny.unit_size,
            ignored_modules=tuple(self.ignored_modules),
            tp_plan=self.tiny.tp_plan,
            experts=self.tiny.experts,
            find_unused=self.tiny.unused,
        )

    def build_model(self) -> Module:
        """Return the tiny model, made from a fixed seed, with parameters in the load dtype."""
        model, trained_layers = self._trained_base()
        self._freeze(model)
        if not self.cell.option("lora"):
            return model
        # An adapter around the frozen model.
        from peft import get_peft_model

        config = self._adapter_config(trained_layers)
        adapted: Module = get_peft_model(model, config, autocast_adapter_dtype=False)
        return adapted

    def _adapter_config(self, trained_layers: list[str] | None) -> Any:
        """Return PEFT's configuration of the adapter.

        It is LoRA's, or that of the method that the cell's setting ``PeftConfig.peft_type`` names,
        ``ADALORA`` say, with what that method needs.

        Args:
            trained_layers: The names of layers that are trained beside the adapter; None for none.
        """
        from peft import LoraConfig, get_peft_config

        targets: Any = list(self.tiny.lora_targets)
        if targets == [ALL_LINEAR]:
            # PEFT knows the word as a text, and not in a list.
            targets = ALL_LINEAR
        settings = {"target_modules": targets, "modules_to_save": trained_layers}
        method = self.cell.settings("PeftConfig")
        if method:
            return get_peft_config({**settings, **method})
        settings |= {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0}
        return LoraConfig(**self.cell.with_settings("LoraConfig", settings))

    def _freeze(self, model: Module) -> None:
        """Freeze the modules that option ``frozen`` names."""
        if self.cell.option("frozen"):
            for name in self.tiny.frozen_modules:
                model.get_submodule(name).requires_grad_(requires_grad=False)

    def own_model(self, given: Module, zero_config: Mapping[str, Any] | None = None) -> Module:
        """Return the model to train.

        It is the given one or, with option ``loaded``, a model that the trainer makes as its users
        do, for example by ``from_pretrained``. That model gets the values of the given one.
        Drivers call this while they build.

        Args:
            given: The model that ``build_model`` returned.
            zero_config: DeepSpeed's JSON, for ``deepspeed.zero.Init``.
        """
        if self.cell.option("loaded") == "given":
            return given
        # The model whose values are written to files, which the trainer's library then reads.
        base = given
        if self.cell.option("lora") or _loaded.changes_values(self.cell):
            # Without an adapter, and with the values from before ``build_model`` read such files.
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
            # The adapter of the given model is written and read in the same way.
            return _loaded.with_adapter(made, given, self.run_directory)
        return made

    def _trained_base(self) -> tuple[Module, list[str] | None]:
        """Return what ``_base_model`` returns, with the values and sizes that are trained.

        With some values of option ``loaded`` the trainer will read a model with other values, as of
        a head that is drawn anew. The reference must train the same values.
        """
        model, trained_layers = self._base_model()
        if _loaded.changes_values(self.cell):
            model = _loaded.read(self.cell, self.precision, model, self.run_directory)
        return model, trained_layers

    def _base_model(self) -> tuple[Module, list[str] | None]:
        """Return the model without an adapter, and the names of layers that are trained beside one.

        The names are None but for ``lora`` at ``int8``: then all linear layers but the last are
        quantized, and that one is trained, as in ``["lm_head"]``.
        """
        import torch

        torch.manual_seed(0)
        model = self.tiny.make()
        load = getattr(torch, self.precision.load)
        # Option ``float32_norms`` leaves norms in float32: a model of two dtypes.
        for name, parameter in model.named_parameters():
            if not (self.cell.option("float32_norms") and "norm" in name):
                parameter.data = parameter.data.to(load)
        if self.cell.option("lora") != "int8":
            return model, None
        # Not from ``torchao.quantization``: once its submodule ``quantize_`` is imported, that name
        # is the module and not the function.
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
        """Return an optimizer of that class, with the driver's and the cell's arguments.

        The cell's come last: a cell with the setting ``SGD.momentum=0.5`` overrides the driver's
        0.9.

        Args:
            optimizer_class: Such as ``torch.optim.SGD``.
            groups: Parameters or param groups.
            arguments: The driver's arguments beside learning rate and weight decay.
        """
        settings = {"lr": LEARNING_RATE, "weight_decay": DECAY, **arguments}
        return optimizer_class(
            groups, **self.cell.with_settings(optimizer_class.__name__, settings)
        )

    def compile_nothing(self) -> None:
        """Have an optimizer that compiles itself, as torchao's, run uncompiled on the CPU.

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
        """Return what the optimizer is made of: a list of parameters, or of param groups.

        With option ``param_groups`` there are two groups: norms and biases have no weight decay,
        and all else half the learning rate. With half of it the weights of norms, which begin as 1,
        would not move in bfloat16.
        """
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
            {"params": decayed, "weight_decay": DECAY, "lr": LEARNING_RATE / 2},
            {"params": undecayed, "weight_decay": 0.0},
        ]

    def make_scheduler(self, optimizer: Any, every: int = 1) -> Any:
        """Return a scheduler that multiplies the learning rate by 0.95 every ``every`` calls.

        For a list of optimizers it is a list. ``every`` is 1 but for accelerate, which calls a
        scheduler once for each rank in a step.
        """
        from torch.optim.lr_scheduler import StepLR

        if isinstance(optimizer, list):
            return [self.make_scheduler(part, every) for part in optimizer]
        return StepLR(optimizer, step_size=every, gamma=GAMMA)

    def micros(self, number: int) -> range:
        """Return the indices in the epoch of a step's micro-batches; every epoch has the same.

        With ``grad_accum`` at 2 step 1 has ``range(2, 4)``, and step 7, the last of the epoch, has
        ``range(14, 15)``.
        """
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

    def batches(self, number: int) -> Iterator[tuple[Batch, bool]]:
        """Yield this rank's micro-batches of a step, each with whether it is the last.

        Their tokens are counted in ``tokens``. Ranks of one sequence (context parallelism) share
        its tokens.
        """
        self.tokens = 0
        indices = self.micros(number)
        for index in indices:
            batch = self.batch_of(index, self.cell.dp_rank(self.world.rank))
            self.tokens += self.tiny.count(batch) // self.cell.cp
            yield batch, index == indices[-1]

    def dataset(self, ranks: int) -> list[dict[str, torch.Tensor]]:
        """Return the rows of an epoch: micro-batch by micro-batch, rank by rank, as samplers go.

        It is for trainers that load the data themselves, as transformers.Trainer.

        With option ``cp`` such a trainer uses DeepSpeed's Ulysses, in which ``cp`` ranks share each
        sequence. Each of them loads a micro-batch of its own; then all of them train together on
        these micro-batches, one after the other. So the next ``cp`` micro-batches of one data
        parallel rank follow one another here. Ulysses also needs the positions of the tokens.

        Args:
            ranks: The number of data parallel ranks.
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


def _rows_of(batch: Batch) -> list[dict[str, torch.Tensor]]:
    """Return the rows of a batch, each with all its fields."""
    count = len(next(iter(batch.values())))
    rows = []
    for number in range(count):
        rows.append({name: values[number] for name, values in batch.items()})
    return rows


def batches_of_one_row(batches: Sequence[Batch]) -> list[Batch]:
    """Return the rows of some batches, each as a batch of one row, for a pipeline."""
    rows: list[Batch] = []
    for batch in batches:
        for number in range(len(batch["labels"])):
            row: Batch = {}
            for name, values in batch.items():
                row[name] = values[number : number + 1]
            rows.append(row)
    return rows


def listed(parts: Any) -> list[Any]:
    """Return several optimizers or schedulers as they are, and a single one in a list.

    Of most trainers there is one; Muon has AdamW beside it.
    """
    if isinstance(parts, list):
        return parts
    return [parts]

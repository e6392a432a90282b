"""What a strategy is: what is true of it, and its dialects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_distcompat.cell import OPTIONS, Cell
from pytest_distcompat.precisions import Precision

if TYPE_CHECKING:
    import torch
    from torch.nn import Module


@dataclass(frozen=True)
class Dtypes:
    """One row of the dtype table: what each kind of tensor is, once the trainer is built, on every rank.

    ``storage``: the live parameter as this rank keeps it. ``compute``: the output of a matrix product in forward.
    ``reduce``: what gradients travel in. ``gradient``: the gradient that the optimizer sees. ``master``: what the
    optimizer updates. ``state``: its moments. ``buffer``: buffers of floating point; empty where they stay what they were.
    """

    storage: str
    compute: str
    reduce: str
    gradient: str
    master: str
    state: str
    buffer: str = ""


#: What the built-in drivers clip gradients to; DeepSpeed is told in its JSON.
MAX_NORM = 1.0

#: Why an option of DeepSpeed is none of torch's strategies.
OF_DEEPSPEED = dict.fromkeys(("conflict", "grad_accum_dtype_fp32"), "there is no DeepSpeed JSON to say it in")
NO_SHARDS = "there are no shards of parameters that it could be about"

#: Segments that options, not strategies, put into live names.
OPTION_WRAPPERS = {"compile": "_orig_mod", "activation_checkpointing": "_checkpoint_wrapped_module"}

#: (model, precision, cell, device) -> the model as plain torch trains it.
TorchDialect = Callable[["Module", Precision, Cell, "torch.device"], "Module"]
#: (precision, cell) -> keyword arguments for accelerate.Accelerator.
AccelerateDialect = Callable[[Precision, Cell], Mapping[str, Any]]
#: (precision, cell) -> keyword arguments for transformers.TrainingArguments.
TransformersDialect = Callable[[Precision, Cell], Mapping[str, Any]]
#: (precision, cell) -> the JSON that deepspeed.initialize is given.
DeepSpeedDialect = Callable[[Precision, Cell], Mapping[str, Any]]


@dataclass(frozen=True)
class Strategy:
    """How state is split.

    ``wrappers``: segments that the strategy puts into live names; ``leading``: those it puts in front of them.
    ``active``: what the probe must see, by the words of ``trace.ModelInfo``: the wrapper, and the kind of the live
    parameters. ``shards``: whether each rank stores only its part of the live parameters.
    ``reduces_each_micro_batch``: whether it must, for want of whole gradients to add to. ``dtypes`` gives the row of the
    dtype table.

    A dialect is None where the library does not speak the strategy.
    """

    name: str
    meaning: str
    dtypes: Callable[[Precision], Dtypes]
    wrapper: str
    kind: str
    shards: bool
    leading: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()
    zero_stage: int | None = None
    flat_masters: bool = False
    reduces_each_micro_batch: bool = False
    torch: TorchDialect | None = None
    accelerate: AccelerateDialect | None = None
    transformers: TransformersDialect | None = None
    deepspeed: DeepSpeedDialect | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    order: int = 0

    def canonical(self, name: str, cell: Cell, unwrapped: Iterable[str]) -> str:
        """The unwrapped model's name for a live one: without the segments that the cell's wrappers are known to put in.

        Only those: a wrapper that the cell does not ask for leaves its segment in the name, which is then no plain
        name. A segment that the unwrapped model has itself (a submodule called ``module``) stays.
        """
        known = set(unwrapped)
        removable = set(self.wrappers)
        removable |= {segment for option, segment in OPTION_WRAPPERS.items() if cell.option(option)}
        segments = [segment for segment in name.split(".") if segment not in removable]
        for leading in self.leading:
            if segments and segments[0] == leading and ".".join(segments) not in known:
                segments = segments[1:]
        return ".".join(segments)

    def unsupported_reason(self, cell: Cell) -> str | None:
        """Why this strategy cannot be run with the cell's options; None if it can.

        ``options`` maps an option's token ("state_dict_full") to the reason it makes no sense here.
        """
        for name, value in cell.options:
            reason = self.options.get(OPTIONS[name].token(value))
            if reason:
                return reason
        copies = int(cell.option("dp_replicate"))
        if copies > 1 and (cell.world_size % copies or cell.world_size < 2 * copies):
            return f"{copies} copies of two shards at least: that is for {2 * copies} ranks, or more by {copies}"
        return None

"""Strategy: what must hold under it, and its backend config for each library."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_distcompat.cell import OPTIONS, Cell
from pytest_distcompat.precisions import Precision

if TYPE_CHECKING:
    import torch
    from torch.nn import Module


@dataclass(frozen=True)
class Dtypes:
    """One row of the dtype table: the dtype of each kind of tensor on every rank, once the trainer is built.

    ``storage`` is that of the live parameter, ``compute`` of products, ``reduce`` of gradients in collectives,
    ``gradient`` of those that the optimizer sees, ``master`` of what it updates, ``state`` of its moments. ``buffer``
    is empty if buffers keep theirs.
    """

    storage: str
    compute: str
    reduce: str
    gradient: str
    master: str
    state: str
    buffer: str = ""


#: The norm that the built-in drivers clip gradients to; DeepSpeed reads it from its JSON.
MAX_NORM = 1.0

#: Options that only DeepSpeed's strategies have -> why torch's strategies have none.
DEEPSPEED_OPTIONS = dict.fromkeys(("conflict", "grad_accum_dtype_fp32"), "only DeepSpeed's JSON has this option")
#: Why a strategy without sharded parameters has no options for them.
NO_SHARDS = "parameters are not sharded"

#: Option -> the segment that it, and not a strategy, puts into live names.
OPTION_WRAPPERS = {"compile": "_orig_mod", "activation_checkpointing": "_checkpoint_wrapped_module"}


@dataclass(frozen=True)
class WrapSpec:
    """Which modules of a model a strategy wraps one by one, as its driver knows them.

    ``blocks`` are their class names. ``min_num_params`` make a unit under option ``wrap_policy``. ``ignored_modules``
    are the names of modules to leave out, empty unless the cell asks for some. ``tp_plan`` is that of the tiny model, ``experts``
    the module that expert parallelism cuts. ``find_unused``: a rank may leave out parameters that another uses. ``prepare``
    recomputes and compiles blocks; a strategy calls it
    where its library wants that. A plan of tensor parallelism names no layer of a block that is wrapped, so that layers are cut
    before, as https://github.com/pytorch/torchtitan orders it.
    """

    blocks: tuple[str, ...] = ()
    min_num_params: int = 1000
    ignored_modules: tuple[str, ...] = ()
    tp_plan: Mapping[str, str] = field(default_factory=dict)
    experts: str = ""
    find_unused: bool = False
    prepare: Callable[[Module], None] = lambda model: None  # noqa: ARG005

    def block_modules(self, model: Module) -> list[Module]:
        """Return the modules of the model to wrap."""
        return [module for module in model.modules() if type(module).__name__ in self.blocks]

    def units(self, model: Module) -> list[Module]:
        """Return the blocks to shard one by one: one that is tied to a module outside stays in the same unit as that one."""
        owners: dict[int, set[Module]] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), set()).add(module)
        inside = {block: set(block.modules()) for block in self.block_modules(model)}
        return [
            block
            for block, modules in inside.items()
            if all(owners[id(parameter)] <= modules for parameter in block.parameters())
        ]

    def modules_to_ignore(self, model: Module) -> list[Module]:
        """Return the modules of the model to leave out."""
        return [model.get_submodule(name) for name in self.ignored_modules]


#: Backend config for torch: (model, precision, cell, device, wrap) -> the wrapped model.
TorchConfig = Callable[["Module", Precision, Cell, "torch.device", WrapSpec], "Module"]
#: Backend config for accelerate and Trainer: -> keyword arguments for accelerate.Accelerator or TrainingArguments.
ArgumentsConfig = Callable[[Precision, Cell, WrapSpec], Mapping[str, Any]]
#: Backend config for DeepSpeed: (precision, cell) -> the JSON for deepspeed.initialize.
DeepSpeedConfig = Callable[[Precision, Cell], Mapping[str, Any]]


@dataclass(frozen=True)
class Strategy:
    """How state is split over the ranks, and how each library is configured for it.

    Attributes:
        name: The strategy's name in a cell's id.
        meaning: One line for the documentation.
        dtypes: Returns the strategy's row of the dtype table for a precision.
        wrapper: The wrapper that the model must have, as ``trace.ModelInfo.wrappers`` names it.
        kind: The kind of the live parameters, as ``trace.ParameterInfo.kind`` names it.
        shards: Whether each rank stores only its shard of the live parameters.
        bare_alone: Whether a library may leave out the wrapper where there is one rank, since nothing is to be reduced.
        kind_alone: The kind of the live parameters where there is one rank; empty if it is ``kind``.
        leading: Segments that the strategy puts in front of live names.
        wrappers: Segments that the strategy puts into live names.
        zero_stage: The ZeRO stage; None for strategies that are not DeepSpeed's.
        flat_masters: Whether the optimizer updates flat partitions of master weights.
        reduces_each_micro_batch: Whether gradients are reduced after each micro-batch, since no rank keeps whole ones.
        torch: Backend config for torch; None, as for the other libraries, if the library does not have the strategy.
        accelerate: Backend config for accelerate.
        transformers: Backend config for transformers.Trainer.
        deepspeed: Backend config for DeepSpeed's own API.
        options: Token of an option ("state_dict_full") -> why the strategy does not have it.
        order: Where the strategy stands in lists.
    """

    name: str
    meaning: str
    dtypes: Callable[[Precision], Dtypes]
    wrapper: str
    kind: str
    shards: bool
    bare_alone: bool = False
    kind_alone: str = ""
    leading: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()
    zero_stage: int | None = None
    flat_masters: bool = False
    reduces_each_micro_batch: bool = False
    torch: TorchConfig | None = None
    accelerate: ArgumentsConfig | None = None
    transformers: ArgumentsConfig | None = None
    deepspeed: DeepSpeedConfig | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    order: int = 0

    def canonical(self, name: str, cell: Cell, unwrapped: Iterable[str]) -> str:
        """Return the unwrapped model's name for a live one: without the segments that the cell's wrappers put in.

        The segment of a wrapper that the cell does not ask for stays, so that the name is not an unwrapped one. So does
        a segment that is part of one of the ``unwrapped`` names (a submodule called ``module``).
        """
        known = set(unwrapped)
        removable = set(self.wrappers)
        removable |= {segment for option, segment in OPTION_WRAPPERS.items() if cell.option(option)}
        segments = name.split(".")
        inserted = [index for index, segment in enumerate(segments) if segment in removable]
        found = []
        # All of them are the wrappers', if that is a name of the model, or else as many as can be.
        for count in range(len(inserted), -1, -1):
            for removed in itertools.combinations(inserted, count):
                kept = [segment for index, segment in enumerate(segments) if index not in removed]
                found.append(self._without_leading(kept, known))
                if found[-1] in known:
                    return found[-1]
        return found[0]

    def _without_leading(self, segments: Sequence[str], known: Collection[str]) -> str:
        """Return the name of these segments, without the first where that is the wrapper's."""
        for leading in self.leading:
            if segments and segments[0] == leading and ".".join(segments) not in known:
                segments = segments[1:]
        return ".".join(segments)

    def unsupported_reason(self, cell: Cell) -> str | None:
        """Return why this strategy cannot be run with the cell's options; None if it can."""
        for name, value in cell.options:
            reason = self.options.get(OPTIONS[name].token(value))
            if reason:
                return reason
        copies = int(cell.option("dp_replicate"))
        if copies > 1 and (cell.dp_size % copies or cell.dp_size < 2 * copies):
            return f"{copies} replicas of at least two shards need a multiple of {copies} ranks, {2 * copies} or more"
        if cell.option("pp_schedule") != OPTIONS["pp_schedule"].default and cell.pp == 1:
            return "a schedule is for the stages of a pipeline, and there is one"
        if cell.option("sp") and cell.tp == 1:
            return "sequence parallelism cuts along the ranks of tensor parallelism, and there is one"
        return None

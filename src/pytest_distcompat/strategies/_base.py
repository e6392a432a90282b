"""Strategy: what must hold under it, and its backend config for each library."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_distcompat.cell import OPTIONS, Cell
from pytest_distcompat.parallel.reasons import first_reason
from pytest_distcompat.precisions import Precision

if TYPE_CHECKING:
    import torch
    from torch.nn import Module


@dataclass(frozen=True)
class Dtypes:
    """One row of the dtype table: the dtype of each kind of tensor.

    It holds on every rank, once the trainer is built.

    Attributes:
        storage: Of the live parameters.
        compute: Of matrix products.
        reduce: Of gradients in collectives.
        gradient: Of the gradients that the optimizer sees.
        master: Of the parameters that the optimizer updates.
        state: Of the optimizer's moments.
        buffer: Of buffers; empty if they keep theirs.
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
DEEPSPEED_OPTIONS = dict.fromkeys(
    ("conflict", "grad_accum_dtype_fp32"), "only DeepSpeed's JSON has this option"
)
#: Why a strategy without sharded parameters has no options for them.
NO_SHARDS = "parameters are not sharded"

#: Option -> the segment that it, and not a strategy, puts into live names.
OPTION_WRAPPERS = {"compile": "_orig_mod", "activation_checkpointing": "_checkpoint_wrapped_module"}


@dataclass(frozen=True)
class WrapSpec:
    """Which modules of a model a strategy wraps one by one, as its driver knows them.

    A plan of tensor parallelism names no layer of a block that is already wrapped: layers are
    sharded before blocks are wrapped, as https://github.com/pytorch/torchtitan orders it.

    Attributes:
        blocks: Class names of the modules to wrap.
        min_num_params: How many parameters make a unit under option ``wrap_policy``.
        ignored_modules: Names of the modules to leave out; empty unless the cell asks for some.
        tp_plan: Name of a module -> its style of tensor parallelism, see
            ``parallel/tensor_parallel.py``.
        experts: Name of the module that expert parallelism shards; empty if there is none.
        find_unused: Whether a rank may leave out parameters that another uses.
        prepare: Recomputes and compiles blocks; a strategy calls it where its library wants that.
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
        modules = []
        for module in model.modules():
            if type(module).__name__ in self.blocks:
                modules.append(module)
        return modules

    def units(self, model: Module) -> list[Module]:
        """Return the blocks to shard one by one.

        A block that shares a parameter with a module outside it is none of them: both then are in
        the unit around them.
        """
        owners: dict[int, set[Module]] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                owners_of_parameter = owners.setdefault(id(parameter), set())
                owners_of_parameter.add(module)
        units = []
        for block in self.block_modules(model):
            owners_of_block: set[Module] = set()
            for parameter in block.parameters():
                owners_of_block |= owners[id(parameter)]
            if owners_of_block.issubset(block.modules()):
                units.append(block)
        return units

    def modules_to_ignore(self, model: Module) -> list[Module]:
        """Return the modules of the model to leave out."""
        return [model.get_submodule(name) for name in self.ignored_modules]


#: Backend config for torch: (model, precision, cell, device, wrap) -> the wrapped model.
TorchConfig = Callable[["Module", Precision, Cell, "torch.device", WrapSpec], "Module"]
#: Backend config for accelerate and Trainer: -> keyword arguments for accelerate.Accelerator or
#: TrainingArguments.
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
        shards: Whether each rank stores only its shard of the live parameters: its rows of each, or
            its part of flat ones.
        bare_alone: Whether a library may leave out the wrapper on a single rank, since nothing is
            to be reduced.
        kind_alone: The kind of the live parameters on a single rank; empty if it is ``kind``.
        leading: Segments that the strategy puts in front of live names.
        wrappers: Segments that the strategy puts into live names.
        zero_stage: The ZeRO stage; None for strategies that are not DeepSpeed's.
        flat_masters: Whether the optimizer updates flat partitions of master weights.
        reduces_each_micro_batch: Whether gradients are reduced after each micro-batch, since no
            rank keeps full ones.
        torch: Backend config for torch; None, as for the other libraries, if the library does not
            have the strategy.
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
        """Return the unwrapped model's name for a live one.

        It is without the segments that the cell's wrappers put in.

        The segment of a wrapper that the cell does not ask for stays, so that the name is not an
        unwrapped one. So does a segment that is part of one of the ``unwrapped`` names (a submodule
        called ``module``).
        """
        known = set(unwrapped)
        removable = set(self.wrappers)
        for option, segment in OPTION_WRAPPERS.items():
            if cell.option(option):
                removable.add(segment)
        segments = name.split(".")
        for candidate in self._candidates(segments, removable, known):
            if candidate in known:
                return candidate
        # The name without all of them.
        return next(self._candidates(segments, removable, known))

    def _candidates(
        self, segments: list[str], removable: set[str], known: set[str]
    ) -> Iterator[str]:
        """Yield the name without all removable segments, then without fewer and fewer of them."""
        inserted: list[int] = []
        for index, segment in enumerate(segments):
            if segment in removable:
                inserted.append(index)
        for count in range(len(inserted), -1, -1):
            for removed in itertools.combinations(inserted, count):
                kept = _without_indices(segments, removed)
                yield self._without_leading(kept, known)

    def _without_leading(self, segments: Sequence[str], known: Collection[str]) -> str:
        """Return the name of these segments, without the first where that is the wrapper's."""
        for leading in self.leading:
            if not segments or segments[0] != leading:
                continue
            if ".".join(segments) not in known:
                segments = segments[1:]
        return ".".join(segments)

    def unsupported_reason(self, cell: Cell) -> str | None:
        """Return why this strategy cannot be run with the cell's options; None if it can."""
        for name, value in cell.options:
            token = OPTIONS[name].token(value)
            reason = self.options.get(token)
            if reason:
                return reason
        replicas = int(cell.option("dp_replicate"))
        fewest_ranks = 2 * replicas
        uneven = cell.dp_size % replicas != 0 or cell.dp_size < fewest_ranks
        other_schedule = cell.option("pp_schedule") != OPTIONS["pp_schedule"].default
        return first_reason(
            (
                replicas > 1 and uneven,
                (
                    f"{replicas} replicas of at least two shards "
                    f"need a multiple of {replicas} ranks, {fewest_ranks} or more"
                ),
            ),
            (
                other_schedule and cell.pp == 1,
                "a schedule is for the stages of a pipeline, and there is one",
            ),
            (
                bool(cell.option("sp")) and cell.tp == 1,
                "sequence parallelism cuts along the ranks of tensor parallelism, and there is one",
            ),
        )


def _without_indices(segments: list[str], indices: Collection[int]) -> list[str]:
    """Return the segments but those at these indices."""
    kept: list[str] = []
    for index, segment in enumerate(segments):
        if index not in indices:
            kept.append(segment)
    return kept

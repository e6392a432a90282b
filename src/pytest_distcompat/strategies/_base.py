"""``Strategy``: what must hold under it, and its backend config for each library.

``ddp.py``, ``fsdp1.py``, ``fsdp2.py`` and ``zero.py`` make one ``Strategy`` each, or a few. Three
sides read it:

- at collection, ``unsupported_reason(cell)`` says why a cell, one configuration under test such as
  ``fsdp2-fp32-w2-tp_2``, cannot run under its strategy;
- on ranks, drivers (the classes by which trainers are tested) call the *backend config* of their
  library: ``torch``, ``accelerate``, ``transformers`` or ``deepspeed``. They pass a ``WrapSpec``,
  which says which modules of the model are wrapped one by one;
- checks compare what they read of the ranks with ``dtypes``, ``wrapper``, ``kind`` and others.
  *Live names* are those of the wrapped model's parameters, ``module.blocks.0.weight`` under DDP;
  ``canonical`` returns the name in the model before anything wraps it, ``blocks.0.weight``.
"""

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
    """The dtype of each kind of tensor, by torch's names: ``bfloat16``.

    It holds on every rank, once the trainer is built. The dtypes of a strategy and a precision are
    a row of the table in the documentation.

    Attributes:
        storage: Of the live parameters.
        compute: Of matrix products.
        reduce: Of gradients in collectives.
        gradient: Of the gradients that the optimizer sees.
        master: Of the parameters that the optimizer updates: master weights, or the live ones.
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

#: Options that only DeepSpeed's strategies have, as a cell's id spells them -> why torch's
#: strategies have none. For ``Strategy.options``. Under ``conflict`` the JSON asks for another
#: precision than the trainer.
DEEPSPEED_OPTIONS = dict.fromkeys(
    ("conflict", "grad_accum_dtype_fp32"), "only DeepSpeed's JSON has this option"
)
#: Why a strategy without sharded parameters has no options for them. For ``Strategy.options``.
NO_SHARDS = "parameters are not sharded"

#: Option -> the segment that it, and not a strategy, puts into live names: torch.compile makes
#: ``_orig_mod.blocks.0.weight`` of ``blocks.0.weight``.
OPTION_WRAPPERS = {"compile": "_orig_mod", "activation_checkpointing": "_checkpoint_wrapped_module"}


@dataclass(frozen=True)
class WrapSpec:
    """Which modules of a model a strategy wraps one by one, as its driver knows them.

    Strategies shard layers by ``tp_plan`` before they wrap blocks, in the order of
    https://github.com/pytorch/torchtitan, so the names in the plan are those of the unwrapped
    model.

    Attributes:
        blocks: Class names of the modules to wrap: ``("LlamaDecoderLayer",)``.
        min_num_params: How many parameters make a unit of FSDP under option ``wrap_policy``.
        ignored_modules: Names of the modules to leave out; empty unless the cell asks for some.
        tp_plan: Name of a module -> its style of tensor parallelism, see
            ``parallel/tensor_parallel.py``.
        experts: Name of the module that expert parallelism shards; empty if there is none.
        find_unused: Whether a rank may leave out parameters that another uses, as DDP's
            ``find_unused_parameters`` allows.
        prepare: Changes the blocks in place for activation checkpointing and torch.compile, as the
            cell asks; a strategy calls it at the moment at which its library wants that.
    """

    blocks: tuple[str, ...] = ()
    min_num_params: int = 1000
    ignored_modules: tuple[str, ...] = ()
    tp_plan: Mapping[str, str] = field(default_factory=dict)
    experts: str = ""
    find_unused: bool = False
    prepare: Callable[[Module], None] = lambda model: None  # noqa: ARG005

    def block_modules(self, model: Module) -> list[Module]:
        """Return the modules of the model to wrap, in the order of ``model.modules()``."""
        modules = []
        for module in model.modules():
            if type(module).__name__ in self.blocks:
                modules.append(module)
        return modules

    def units(self, model: Module) -> list[Module]:
        """Return the blocks to shard one by one.

        A unit of FSDP is what is gathered at once. A block that shares a parameter with a module
        outside it (tied weights) is none: both then are in the unit around them.
        """
        # Parameter -> the modules that have it.
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
#: Backend config for accelerate and Trainer: (precision, cell, wrap) -> keyword arguments for
#: accelerate.Accelerator or TrainingArguments.
ArgumentsConfig = Callable[[Precision, Cell, WrapSpec], Mapping[str, Any]]
#: Backend config for DeepSpeed: (precision, cell) -> the JSON for deepspeed.initialize.
DeepSpeedConfig = Callable[[Precision, Cell], Mapping[str, Any]]


@dataclass(frozen=True)
class Strategy:
    """How state is split over the ranks, and how each library is configured for it.

    Attributes:
        name: The strategy's name in a cell's id: ``fsdp2``.
        meaning: One line for the documentation.
        dtypes: Returns the strategy's row of the dtype table for a precision.
        wrapper: The wrapper that the model must have, as ``trace.ModelInfo.wrappers`` names it:
            ``FSDP2``.
        kind: The kind of the live parameters, as ``trace.ParameterInfo.kind`` names it:
            ``DTensor``.
        shards: Whether each rank stores only its shard of the live parameters: its rows of each, or
            its part of flat ones.
        bare_alone: Whether a library may leave out the wrapper on a single rank, since nothing is
            to be reduced.
        kind_alone: The kind of the live parameters on a single rank; empty if it is ``kind``.
        leading: Segments that the strategy puts in front of live names: ``("module",)``.
        wrappers: Segments that it may put into live names anywhere: ``("_fsdp_wrapped_module",)``.
        zero_stage: The ZeRO stage; None for strategies that are not DeepSpeed's.
        flat_masters: Whether the optimizer updates flat partitions of master weights: all weights
            in one vector, of which each rank has a piece.
        reduces_each_micro_batch: Whether gradients are reduced after each micro-batch, since no
            rank keeps full ones.
        torch: Backend config for torch; None, as for the other libraries, if the library does not
            have the strategy.
        accelerate: Backend config for accelerate.
        transformers: Backend config for transformers.Trainer.
        deepspeed: Backend config for DeepSpeed's own API.
        options: Option as a cell's id spells it ("state_dict_full") -> why the strategy does not
            have it.
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
        """Return the unwrapped model's name for a live one: without the segments of wrappers.

        Under DDP with torch.compile ``_orig_mod.module.blocks.0.weight`` becomes
        ``blocks.0.weight``. A trainer with several networks may wrap each, so that
        ``critic.module.0.weight`` becomes ``critic.0.weight``. The segment of a wrapper that the
        cell does not ask for stays: the name then is no unwrapped one, and a check reports it. A
        segment that is a part of the unwrapped name stays too, as that of a submodule which is
        called ``module``.

        Args:
            name: The live name of a parameter or buffer.
            cell: The cell, whose options say which wrappers there may be.
            unwrapped: All names of the unwrapped model.
        """
        known = set(unwrapped)
        removable = set(self.wrappers)
        for option, segment in OPTION_WRAPPERS.items():
            if cell.option(option):
                removable.add(segment)
        segments = name.split(".")
        of_networks = set(removable)
        # Where the whole model is wrapped, its networks are not.
        if segments[0] not in self.leading:
            of_networks.update(self.leading)
        for candidate in self._candidates(segments, of_networks, known):
            if candidate in known:
                return candidate
        # None of them is a name of the unwrapped model: the name without the segments of the whole
        # model's wrappers, which is the first candidate.
        return next(self._candidates(segments, removable, known))

    def _candidates(
        self, segments: list[str], removable: set[str], known: set[str]
    ) -> Iterator[str]:
        """Yield the name without all removable segments, then without fewer and fewer of them.

        Args:
            segments: Those of the live name.
            removable: Segments that wrappers put in.
            known: The names of the unwrapped model.
        """
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
            # Not a module of the model's own that is called so.
            if ".".join(segments) not in known:
                segments = segments[1:]
        return ".".join(segments)

    def unsupported_reason(self, cell: Cell) -> str | None:
        """Return why this strategy cannot be run with the cell's options; None if it can.

        First what ``options`` says, then what is alike for all strategies: sizes of a mesh.
        """
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

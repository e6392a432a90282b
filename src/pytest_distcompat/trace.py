"""Traces: what the probes of all ranks recorded, as plain data.

Nothing else leaves the ranks. Dtypes are torch's names without the prefix (``"float32"``), shapes
tuples of ints, a digest a hash of a tensor's local values, in whatever dtype (``digests``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pytest_distcompat.spread import Hosts

T = TypeVar("T")

#: Placement along a dimension whose ranks all hold the same.
REPLICATE = "Replicate"
#: Placement along a dimension whose ranks hold pieces of the flattened tensor.
FLAT = "Flat"
#: Placement of a dimension of which this rank's coordinate alone holds the tensor: a stage of a
#: pipeline, an expert.
STAGE = "Stage"
#: Products of float32 that a GPU computes with 10 bits of each factor:
#: https://docs.pytorch.org/docs/stable/notes/cuda.html
TF32 = "tf32"


@dataclass(frozen=True)
class MeshDim:
    """One dimension of a device mesh, and how a tensor is placed along it.

    A mesh arranges ranks in a grid: four ranks as ``dp_shard`` of size 2 times ``tp`` of size 2,
    say, with ranks 0 and 1 as neighbours in the innermost dimension, ``tp``.

    Attributes:
        name: The name of the dimension; empty where the mesh has no names.
        size: How many ranks it has.
        coordinate: This rank's index along it.
        placement: ``Replicate`` (each rank holds the same), ``Shard(0)`` (each holds a piece of the
            tensor's dimension 0), ``StridedShard(0, 2)`` (a piece of each of 2 pieces that another
            mesh dimension has made) or ``Partial`` (their sum is the tensor), as torch's DTensor
            has them; ``Flat``: pieces of the flattened tensor in the order of the ranks, as FSDP1
            and ZeRO shard it; ``Stage``: this coordinate alone holds the tensor, as in ``pp``, and
            in ``ep`` of DeepSpeed's experts.
    """

    name: str
    size: int
    coordinate: int
    placement: str


@dataclass(frozen=True)
class Layout:
    """Which part of a tensor this rank holds.

    Attributes:
        dims: The dimensions of the tensor's mesh, the outermost first; none for a tensor that lies
            on no mesh.
        holders: The ranks that together hold one copy of the tensor (its shard group), in the order
            of their pieces if it is sharded flat; empty if this rank alone holds all of it. Of an
            expert that is a tensor of its own: the ranks that together hold one copy of all
            experts.
    """

    dims: tuple[MeshDim, ...] = ()
    holders: tuple[int, ...] = ()

    @property
    def region(self) -> tuple[tuple[str, int, int], ...]:
        """Return which part of the tensor it is; equal for replicas.

        It has (placement, size, coordinate) of each mesh dimension that shards the tensor.
        """
        cuts: list[tuple[str, int, int]] = []
        for dim in self.dims:
            if dim.size > 1 and dim.placement not in {REPLICATE, STAGE}:
                cuts.append((dim.placement, dim.size, dim.coordinate))
        return tuple(cuts)

    @property
    def flat(self) -> bool:
        """Tell whether it is a piece of the flattened tensor.

        Where it begins follows from the sizes of the pieces before it.
        """
        return {dim.placement for dim in self.dims} - {REPLICATE, STAGE} == {FLAT}

    def dim(self, name: str) -> MeshDim | None:
        """Return the dimension of that name, None if the tensor's mesh has none."""
        for dim in self.dims:
            if dim.name == name:
                return dim
        return None

    def __str__(self) -> str:
        # A dimension may have no name.
        texts = [f"{dim.name}={dim.placement}".lstrip("=") for dim in self.dims]
        return ", ".join(texts)


@dataclass(frozen=True)
class ParameterInfo:
    """One live parameter (or buffer) on one rank.

    ``kind`` is ``Tensor``, ``DTensor``, ``FSDP1 shard``, ``FlatParameter`` or ``ZeRO-3``; ``shape``
    the global shape, ``local_numel`` what this rank stores of it, ``dtype`` that of the local
    storage. ``held`` says how many entries of the optimizer's param_groups are this very tensor, or
    None where the optimizer holds flat copies (ZeRO). ``persistent`` tells of a buffer of the
    unwrapped model whether it is saved. ``rounded`` is the digest of a tensor of the unwrapped
    model in the dtype in which the precision computes, empty where that is no other one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    kind: str = "Tensor"
    layout: Layout = Layout()
    local_numel: int = 0
    digest: str = ""
    held: int | None = None
    persistent: bool = False
    rounded: str = ""


@dataclass(frozen=True)
class UnwrappedInfo:
    """The model before anything wrapped it: the oracle for names, shapes and what is trainable.

    ``blocks`` (of ``block_classes``) are to be wrapped one by one, ``ignored_modules`` to stay
    whole; 8 bits are for ``linears``. ``products`` counts the modules that multiply by a matrix,
    None where they were not counted. ``obeyed`` are the options of a cell that the driver supports:
    only for these does a check know what the trainer was configured with. ``written_names`` may be
    in files in place of the model's own names. ``evaluating`` are the names of modules in
    evaluation mode, ``noncontiguous`` those of parameters whose elements lie in another order in
    memory than in the tensor. ``mean`` is what the driver says that gradients are means over.
    """

    parameters: tuple[ParameterInfo, ...]
    buffers: tuple[ParameterInfo, ...] = ()
    state_dict: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    blocks: tuple[str, ...] = ()
    block_classes: tuple[str, ...] = ()
    ignored_modules: tuple[str, ...] = ()
    linears: int = 0
    products: int | None = None
    obeyed: tuple[str, ...] = ()
    written_names: tuple[str, ...] = ()
    evaluating: tuple[str, ...] = ()
    noncontiguous: tuple[str, ...] = ()
    mean: str = ""


@dataclass(frozen=True)
class ModelInfo:
    """The live model on one rank.

    ``wrappers`` counts what wraps it (``DDP``, ``FSDP1``, ``FSDP2``, ``DeepSpeedEngine``).
    ``zero_stage`` is None without an engine. ``world_size`` is the process group's,
    ``trainer_world_size`` what the trainer believes. ``units``, ``checkpointed`` and ``compiled``
    are live names of modules that FSDP wraps, whose activations are recomputed, that torch.compile
    wraps (the root is ``""``). ``float8`` counts layers that compute in 8 bits, ``graphs`` those
    that torch.compile has made in this process. The ``pp_ranks`` hold the stages of one pipeline,
    of which the model is one, in their order; empty for a whole model.
    """

    type: str
    wrappers: Mapping[str, int]
    parameters: tuple[ParameterInfo, ...]
    buffers: tuple[ParameterInfo, ...] = ()
    world_size: int = 1
    trainer_world_size: int | None = None
    backend: str = ""
    zero_stage: int | None = None
    units: tuple[str, ...] = ()
    checkpointed: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()
    float8: int = 0
    graphs: int = 0
    pp_ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class StateInfo:
    """One tensor (or number) of the optimizer's state, such as ``exp_avg``.

    ``owner`` is the parameter or the flat partition that it belongs to. ``dtype`` is that of what
    is stored, of a quantized tensor its codes'; ``nbytes`` counts its scales too.
    """

    owner: str
    key: str
    dtype: str
    numel: int
    digest: str
    layout: Layout = Layout()
    nbytes: int = 0


@dataclass(frozen=True)
class OptimizerInfo:
    """The optimizer on one rank.

    ``chain`` goes from the outermost wrapper to the torch optimizer that steps. ``foreign`` counts
    entries that are no live parameter of the model (a stale optimizer has nothing but these).
    ``partitioned`` maps a live parameter's name to how many of its elements this rank's flat master
    holds (ZeRO); ``masters`` are these parts. ``accumulates`` is what ZeRO adds gradients up in;
    ``param_groups`` each group's numbers: ``lr``. ``without_gradient`` names the live parameters
    whose gradient was None, not zero, in all steps since the last snapshot.
    """

    chain: tuple[str, ...]
    entries: int
    foreign: int = 0
    states: tuple[StateInfo, ...] = ()
    partitioned: Mapping[str, int] = field(default_factory=dict)
    masters: tuple[StateInfo, ...] = ()
    accumulates: str = ""
    param_groups: tuple[Mapping[str, float], ...] = ()
    without_gradient: tuple[str, ...] = ()


@dataclass(frozen=True)
class GradientInfo:
    """This rank's part of the gradient of one live parameter.

    ``numel`` is its number of elements, ``square`` the sum of their squares. ``group`` is the place
    of the parameter's group in ``StepInfo.param_groups``.
    """

    name: str
    numel: int
    square: float
    layout: Layout = Layout()
    group: int = 0


@dataclass(frozen=True)
class StepInfo:
    """State of the torch optimizer that steps, during a step.

    ``master``, ``gradient`` and ``state`` are the dtypes of masters, their gradients, and states.
    ``square`` is this rank's share of the sum of the squares of all gradients as the optimizer got
    them, in float64: after unscaling and clipping. The shares of the ``holders``, which hold one
    copy of the gradients together (empty: this rank alone), add up to the sum: what several of them
    hold counts once. ``gradients`` are the same gradients by live parameter, those of ZeRO's flat
    partitions too. Among ``secondary`` ranks ZeRO++ has cut the weights a second time, 0 if not all
    of them. ``param_groups`` are the numbers of each group as this step had them.
    """

    optimizer: str
    master: tuple[str, ...]
    gradient: tuple[str, ...]
    state: tuple[str, ...]
    square: float = 0.0
    gradients: tuple[GradientInfo, ...] = ()
    holders: tuple[int, ...] = ()
    secondary: int = 0
    param_groups: tuple[Mapping[str, float], ...] = ()


@dataclass(frozen=True)
class CollectiveInfo:
    """One kind of collective inside a step.

    ``calls`` is how many there were, ``numel`` the most elements of one, ``total`` those of all.
    ``ranks`` are those of its process group, in their order there.
    """

    op: str
    dtype: str
    calls: int
    numel: int
    total: int = 0
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class FileInfo:
    """One saved file: its path relative to the checkpoint, what it holds and under which keys.

    ``shapes`` has the global shape of what stands under a key of a model, ``dtypes`` its dtype,
    where the file has it; ``digests`` its value, in ``Snapshot.saved`` only. An index holds no
    values: ``files`` says in which file each key stands, and ``total_size`` how many bytes they
    are, where it does.
    """

    path: str
    format: str
    holds: str
    keys: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    total_size: int | None = None

    def renamed(self, name: Callable[[str], str]) -> FileInfo:
        """Return the file with ``name(key)`` in place of each key."""

        def with_names(mapping: Mapping[str, T]) -> dict[str, T]:
            return {name(key): value for key, value in mapping.items()}

        return dataclasses.replace(
            self,
            keys=tuple(name(key) for key in self.keys),
            shapes=with_names(self.shapes),
            dtypes=with_names(self.dtypes),
            digests=with_names(self.digests),
            files=with_names(self.files),
        )


#: How many elements of a tensor are here, their sum, and the sum of their squares.
Sums = tuple[int, float, float]


@dataclass(frozen=True)
class CallInfo:
    """Data by which calls of the live trainer are compared, besides that of any snapshot.

    ``observes``: the call must change nothing. ``gradients`` are digests by live name, empty for
    none; ``evaluating`` the modules in evaluation mode. ``sums`` are this rank's part of what is
    optimized and of buffers, by live name; ``returned`` those of what the call returned, None for
    nothing to compare.
    """

    observes: bool
    gradients: Mapping[str, str]
    evaluating: tuple[str, ...]
    sums: Mapping[str, Sums]
    returned: Mapping[str, Sums] | None = None


@dataclass(frozen=True)
class Loader:
    """Expectations of a loader of rows that do not divide by the ranks.

    Attributes:
        shuffled: Each epoch has another order.
        filled: The last batches are filled with rows of the beginning, so that all ranks have
            equally many.
        dropped: Rows that fill no batch are left out.
        resumes: It goes on in the middle of an epoch, in a fresh process group.
        moves: It does so with another number of ranks too.
        rows: The number of its rows, if not that of all loaders: a data set may have fewer than
            there are ranks.
        reseeded: The name of the loader that it is with another seed, if there is such: its order
            is another.
    """

    shuffled: bool = True
    filled: bool = True
    dropped: bool = False
    resumes: bool = True
    moves: bool = True
    rows: int = 0
    reseeded: str = ""


@dataclass(frozen=True)
class ExtraState:
    """Expectations of a state beside model and optimizer.

    For example an average of the weights, the place in the data, or a curriculum.

    Attributes:
        changes: It changes within the first three steps.
        alike: All ranks have the same. Shards of a DTensor are compared where ranks hold the same
            part.
        comes_back: A checkpoint brings it back.
    """

    changes: bool = True
    alike: bool = True
    comes_back: bool = True


@dataclass(frozen=True)
class ExtraStateInfo:
    """Values of one extra state on one rank, by their place in it.

    They are texts of numbers, and digests of tensors. ``rounded`` are numbers with a fraction,
    which computing the same in another order may change.
    """

    name: str
    expected: ExtraState
    exact: Mapping[str, str]
    rounded: Mapping[str, str] = field(default_factory=dict)

    @property
    def values(self) -> Mapping[str, str]:
        """Return all values."""
        return {**self.exact, **self.rounded}


@dataclass(frozen=True)
class RowsInfo:
    """Rows that one loader gave this rank, by epoch and batch.

    They begin with batch ``done`` of ``epoch``.
    """

    loader: str
    epoch: int
    done: int
    expected: Loader
    epochs: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class RowWeight:
    """How many tokens of a row are trained on, and what each of them weighs.

    ``weight`` is the weight of one such token in the gradients of this rank.
    """

    tokens: int
    weight: float


@dataclass(frozen=True)
class TokenWeights:
    """Weights of the rows of one micro-batch that have tokens to train on.

    They are not ``known`` of a loss that is no cross-entropy, or that weights the tokens of a row.
    """

    rows: tuple[RowWeight, ...]
    known: bool = False

    @property
    def tokens(self) -> int:
        """Return how many tokens are trained on."""
        return sum(row.tokens for row in self.rows)


@dataclass(frozen=True)
class DropoutInfo:
    """One forward of a module that drops activations.

    ``input`` is a digest of what it was given, ``zeros`` one of where it put zeros.
    """

    name: str
    input: str
    zeros: str


#: The entry of ``Snapshot.recomputed`` for blocks that are recomputed re-entrantly without an input
#: that requires a gradient.
WITHOUT_GRADIENT = "without gradient"


@dataclass(frozen=True)
class StandIn:
    """What took a snapshot in place of some ranks.

    It is one process without peers, whose tensors have no values. The launcher of an extension has
    such runs. What a check may read of them are a run's abilities: ``RunTrace.has_values``,
    ``RunTrace.has_every_rank``.

    Attributes:
        status: The name of the status of a claim that holds in such a run; it never passes
            (``status.ADDED_STATUSES``).
        ranks: The ranks for which the snapshot was taken: all that hold as much.
        steps: How many steps of the training it takes, instead of three.
    """

    status: str
    ranks: tuple[int, ...]
    steps: int


@dataclass(frozen=True)
class Snapshot:
    """Record of one rank's probe after one action.

    It has what the probe read of model, optimizer, process and files. Empty values are those of an
    action after which a field is not read.
    """

    # Of which action it is.

    #: The rank.
    rank: int
    #: The name of the run in its scenario.
    run: str
    #: The action: ``build_model``, ``build``, ``step``, ``save``, ...
    action: str
    #: The number of the action in its run, from 0.
    index: int
    #: How long the action took.
    seconds: float = 0.0

    # What a step of the trainer reports.

    #: This rank's loss.
    loss: float | None = None
    #: The norm of all gradients before clipping, as the trainer reports it.
    grad_norm: float | None = None
    #: How many tokens, or samples, this rank learned from.
    tokens: int = 0

    # How a step was computed. ``float8``, ``recomputed`` and ``collectives`` are recorded in the
    # third step of a training, or in its last if it has fewer; with gradient accumulation in every
    # step; and never in a training that resumes from a checkpoint.

    #: The number of tensors made in 8 bits.
    float8: int = 0
    #: Where activations are to be recomputed: how many operators of each kind blocks ran in the
    #: forward pass, and how many after it, as ``KIND again``.
    recomputed: Mapping[str, int] = field(default_factory=dict)
    #: The peak memory in bytes until then: allocated on the GPU, else resident in the process.
    memory: int = 0

    # What the model is fed, and what it computes.

    #: Digests of what the model was fed, one a forward.
    inputs: tuple[str, ...] = ()
    #: The names of the modules that were in evaluation mode then.
    evaluating: tuple[str, ...] = ()
    #: What its modules dropped.
    dropouts: tuple[DropoutInfo, ...] = ()
    #: The weights of tokens in the gradients of each micro-batch, in the first steps of a run.
    token_weights: tuple[TokenWeights, ...] = ()
    #: At the end of a script: sums of this rank's parts of what is optimized and of buffers, by
    #: live name.
    sums: Mapping[str, Sums] = field(default_factory=dict)
    #: A sample of what the model computes on a fixed batch.
    outputs: tuple[float, ...] = ()

    # The live trainer after the action.

    #: A digest of torch's random states.
    rng: str = ""
    #: The numbers of the loss scaler of fp16.
    scaler: Mapping[str, float] = field(default_factory=dict)
    #: The model before anything wraps it.
    unwrapped: UnwrappedInfo | None = None
    #: The model as the trainer has it: its parameters and buffers.
    model: ModelInfo | None = None
    #: The optimizer: its state and its parameter groups.
    optimizer: OptimizerInfo | None = None
    #: A digest of the state of the learning rate scheduler.
    scheduler: str = ""
    #: The states that the driver names in ``extra_state``.
    extra: tuple[ExtraStateInfo, ...] = ()

    # What was seen inside a step.

    #: The step of each optimizer: dtypes, and the gradients that it got.
    steps: tuple[StepInfo, ...] = ()
    #: The dtypes of the model's matrix products.
    compute: tuple[str, ...] = ()
    #: The collectives of the step, by kind.
    collectives: tuple[CollectiveInfo, ...] = ()

    # What is on disk.

    #: The files of the checkpoint, and those of an export.
    files: tuple[FileInfo, ...] = ()
    #: The files of the checkpoint with digests of their values, where a check compares them.
    saved: tuple[FileInfo, ...] = ()

    # What other actions return.

    #: What a call of the live trainer left behind, in a walk.
    call: CallInfo | None = None
    #: What loaders gave this rank.
    rows: tuple[RowsInfo, ...] = ()
    #: What an evaluation found, by name.
    metrics: Mapping[str, float] = field(default_factory=dict)
    #: Of a reference: what its loss would be if something else were averaged: what counts alike ->
    #: loss.
    averages: Mapping[str, float] = field(default_factory=dict)

    # Of the machine, and of what stood in for ranks.

    #: How the GPU multiplies: ``matmul`` and ``conv`` the precision of float32 (``ieee``,
    #: ``tf32``), ``autocast`` its dtype if it is on between steps; empty on the CPU.
    products: Mapping[str, str] = field(default_factory=dict)
    #: What took the snapshot in place of ranks; None for a rank itself.
    stand_in: StandIn | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that the snapshot is of: one, or each that a stand-in took it for."""
        if self.stand_in is None:
            return (self.rank,)
        return self.stand_in.ranks

    @property
    def parameters(self) -> tuple[ParameterInfo, ...]:
        """Return the live parameters, none without a model."""
        return self.model.parameters if self.model else ()

    @property
    def buffers(self) -> tuple[ParameterInfo, ...]:
        """Return the live buffers, none without a model."""
        return self.model.buffers if self.model else ()

    @property
    def param_groups(self) -> tuple[Mapping[str, float], ...]:
        """Return the numbers of the optimizer's groups, none without an optimizer."""
        return self.optimizer.param_groups if self.optimizer else ()

    @property
    def states(self) -> tuple[StateInfo, ...]:
        """Return the optimizer's state, none without an optimizer."""
        return self.optimizer.states if self.optimizer else ()

    @property
    def masters(self) -> tuple[StateInfo, ...]:
        """Return this rank's parts of flat masters, none without an optimizer."""
        return self.optimizer.masters if self.optimizer else ()


@dataclass(frozen=True)
class RunFailure:
    """Failure of a run: what happened, where, and its messages.

    ``kind`` is ``raised``, ``crashed`` or ``hung``. ``action`` is what the first failing ``rank``
    was in ("" = outside any action; the rank None where it was none), ``index`` its place in the
    run; ``message`` the exception's one line, ``text`` the whole story, first cause first.
    """

    kind: str
    message: str
    text: str
    action: str = ""
    index: int = -1
    rank: int | None = None


@dataclass(frozen=True)
class RunTrace:
    """One run on all its ranks.

    ``cell`` is the id of the cell that it ran in; ``hosts`` has the machine of each rank.
    """

    name: str
    world_size: int
    snapshots: tuple[Snapshot, ...]
    end: RunFailure | None = None
    cell: str = ""
    hosts: Hosts = field(default_factory=Hosts)

    def at(self, action: str, nth: int = 0) -> tuple[Snapshot, ...]:
        """Return the snapshots after the nth such action, one per rank in rank order.

        There are none if no rank reached it.
        """
        indices = self.indices(action)
        if not -len(indices) <= nth < len(indices):
            return ()
        return self.at_index(indices[nth])

    def indices(self, action: str) -> list[int]:
        """Return the index in the run of each such action that any rank reached, in order."""
        return sorted({snapshot.index for snapshot in self.snapshots if snapshot.action == action})

    def at_index(self, index: int) -> tuple[Snapshot, ...]:
        """Return the snapshots after the action with that index in the run."""
        snapshots: list[Snapshot] = []
        for snapshot in self.snapshots:
            if snapshot.index == index:
                snapshots.append(snapshot)
        snapshots.sort(key=lambda snapshot: snapshot.rank)
        return tuple(snapshots)

    @property
    def trained(self) -> tuple[Snapshot, ...]:
        """Return the snapshots after three steps, or after those that stand-ins take."""
        steps = 3
        if self.stand_in is not None:
            steps = self.stand_in.steps
        return self.at("step", steps - 1)

    @property
    def on_gpu(self) -> bool:
        """Tell whether its ranks computed on GPUs."""
        return any(snapshot.products for snapshot in self.snapshots)

    @property
    def tf32(self) -> bool:
        """Tell whether a rank's GPU multiplied float32 matrices in TF32."""
        return any(snapshot.products.get("matmul") == TF32 for snapshot in self.snapshots)

    @property
    def tf32_since_build(self) -> bool:
        """Tell whether a GPU changed from full float32 to TF32 once the trainer was built."""
        before = self.first("build_model")
        if not self.tf32 or before is None:
            return False
        return before.products.get("matmul", TF32) != TF32

    @property
    def stand_in(self) -> StandIn | None:
        """Return what took the place of the lowest rank that did not run itself.

        None if all ranks ran.
        """
        for snapshot in self.snapshots:
            if snapshot.stand_in is not None:
                return snapshot.stand_in
        return None

    @property
    def has_values(self) -> bool:
        """Tell whether its tensors had values, so that it can train on and save."""
        return self.stand_in is None

    @property
    def has_every_rank(self) -> bool:
        """Tell whether each rank recorded its own part."""
        return self.stand_in is None

    @property
    def unwrapped(self) -> UnwrappedInfo | None:
        """Return the model before anything wrapped it, None if it was not seen."""
        first = self.first("build_model") or self.first("reload")
        return first.unwrapped if first else None

    def first(self, action: str) -> Snapshot | None:
        """Return the snapshot of the lowest rank after the first such action.

        None if no rank reached it.
        """
        snapshots = self.at(action)
        return snapshots[0] if snapshots else None


def shard_groups(
    holders: Mapping[int, tuple[int, ...]], world_size: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each copy, from the ``holders`` that each rank reports.

    Without reports they are the ranks of one process group. A rank that reports nothing, or itself
    alone because it holds no element, is in the group of its peers.
    """
    reported = {group or (rank,) for rank, group in holders.items()}
    ranks_with_peers: set[int] = set()
    for group in reported:
        if len(group) > 1:
            ranks_with_peers.update(group)
    groups: list[tuple[int, ...]] = []
    for group in reported:
        if len(group) > 1 or group[0] not in ranks_with_peers:
            groups.append(group)
    if not groups and world_size:
        groups = [tuple(range(world_size))]
    return tuple(sorted(groups))


def held_indices(
    shape: Iterable[int], cuts: Iterable[tuple[int, int, int, int]]
) -> list[Sequence[int]]:
    """Return which indices of each dimension of a whole tensor a rank holds, ascending.

    Args:
        shape: That of the whole tensor.
        cuts: For each mesh dimension that cuts it, from the outermost: the tensor's dimension, into
            how many pieces that was cut before (``StridedShard``), the size of the mesh dimension,
            and the rank's coordinate.
    """
    indices_by_dim: list[Sequence[int]] = [range(size) for size in shape]
    for dim, pieces, size, coordinate in cuts:
        if pieces == 1:
            indices_by_dim[dim] = _chunk(indices_by_dim[dim], size, coordinate)
            continue
        # This rank has its chunk of each piece.
        indices: list[int] = []
        for nth in range(pieces):
            piece = _chunk(indices_by_dim[dim], pieces, nth)
            indices += _chunk(piece, size, coordinate)
        indices_by_dim[dim] = indices
    return indices_by_dim


def _chunk(indices: Sequence[int], count: int, nth: int) -> Sequence[int]:
    """Return a chunk as torch makes them, a missing one empty."""
    # https://docs.pytorch.org/docs/stable/generated/torch.chunk.html
    # Rounded up.
    size = -(-len(indices) // count)
    start = nth * size
    return indices[start : start + size]


def together(parts: Iterable[tuple[tuple[int, ...], float]]) -> tuple[tuple[int, ...], float]:
    """Return all holders of some squares, and one rank's share of their sum.

    ``parts`` has the holders and the square of each part. What fewer ranks hold together, several
    of the holders have: of each of them it is a part.
    """
    parts = tuple(parts)
    ranks: set[int] = set()
    for holders_of_part, _square in parts:
        ranks.update(holders_of_part)
    share = 0.0
    # What has no holders is held by this rank alone.
    holder_count = max(1, len(ranks))
    for holders_of_part, square in parts:
        part_holder_count = max(1, len(holders_of_part))
        share += square * part_holder_count / holder_count
    return tuple(sorted(ranks)), share


@dataclass(frozen=True)
class Trace:
    """All runs of a scenario, as the checks read them.

    ``limits`` are what the user demands of measured numbers. ``saves`` is False for the run of a
    script that saved nothing, so that nothing is known about files.
    """

    driver: str
    runs: Mapping[str, RunTrace]
    notes: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    saves: bool = True

    def run(self, name: str = "train") -> RunTrace:
        """Return the run of that name. Raises KeyError where the scenario has none."""
        return self.runs[name]

    @property
    def stand_in(self) -> StandIn | None:
        """Return what took the place of ranks, in the first such run; None if all ran."""
        for run in self:
            if run.stand_in is not None:
                return run.stand_in
        return None

    def __iter__(self) -> Iterator[RunTrace]:
        return iter(self.runs.values())

    def name_hosts(self, text: str) -> str:
        """Return a finding with the machines of the ranks that it names.

        Runs of several world sizes spread their ranks otherwise, and a finding may be about either:
        then a line says how.
        """
        failed_runs: list[RunTrace] = []
        for run in self:
            if run.end is not None and run.end.message in text:
                failed_runs.append(run)
        # A dictionary, to have each only once.
        all_hosts: dict[Hosts, None] = {}
        for run in failed_runs or self:
            if run.hosts.names:
                all_hosts[run.hosts] = None
        if not text or not all_hosts:
            return text
        if len(all_hosts) == 1:
            (only_hosts,) = all_hosts
            return only_hosts.name_in(text)
        places: list[str] = []
        for hosts in all_hosts:
            numbers = range(len(hosts.names))
            ranks = ", ".join(map(str, numbers))
            places.append(hosts.name_in(f"ranks {ranks}"))
        return f"{text}\n\nwhere ranks are: {'; '.join(places)}"

    @classmethod
    def of(cls, driver: str, runs: Iterable[RunTrace]) -> Trace:
        """Return a trace of these runs, in order."""
        return cls(driver, {run.name: run for run in runs})

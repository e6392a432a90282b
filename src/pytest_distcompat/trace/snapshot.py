"""Snapshots: everything that one rank's probe recorded after one action of its run.

A rank of a suite performs the actions of its run in order. After each one ``worker`` has the probe
read model, optimizer and files, and writes the result to the rank's log. ``runner`` decodes the
logs of all ranks into a ``RunTrace``. Ranks of scripts record snapshots in the same way
(``ext.scripts``).

The snapshot of a ``step`` has a loss, the steps of the optimizer, and the model and the optimizer
after it; that of ``files`` has nothing but ``files`` and ``saved``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_distcompat.trace.declared import ExchangeInfo, ExtraStateInfo, RowsInfo
from pytest_distcompat.trace.files import FileInfo
from pytest_distcompat.trace.forward import CollectiveInfo, DropoutInfo, TokenWeights
from pytest_distcompat.trace.model import ModelInfo, ParameterInfo, UnwrappedInfo
from pytest_distcompat.trace.optimizer import OptimizerInfo, StateInfo, StepInfo

#: Products of float32 that a GPU computes with 10 bits of each factor:
#: https://docs.pytorch.org/docs/stable/notes/cuda.html
TF32 = "tf32"

#: Of this rank's part of a tensor: the number of elements, their sum, the sum of their squares.
Sums = tuple[int, float, float]


@dataclass(frozen=True)
class CallInfo:
    """Data by which calls of the live trainer are compared, besides that of any snapshot.

    A walk is a run that makes calls such as ``step()`` or ``zero_grad()`` on a live trainer in
    random order. After each call it is compared with the same calls in one process.
    """

    #: Whether the call must change nothing: True for ``evaluate()``, False for ``step()``.
    observes: bool
    #: Live name of a parameter -> digest of its gradient, empty if that is None.
    gradients: Mapping[str, str]
    #: The live names of the modules in evaluation mode.
    evaluating: tuple[str, ...]
    #: Live name of a parameter or buffer -> sums of this rank's part of it; of a parameter with a
    #: master in float32, of the master.
    sums: Mapping[str, Sums]
    #: The same of the tensors that the call returned; None if it returned none to compare.
    returned: Mapping[str, Sums] | None = None


@dataclass(frozen=True)
class StandIn:
    """What took a snapshot in place of some ranks.

    It is one process without peers, whose tensors have shapes and no values. An extension runs
    cells of many ranks in this way. Before a check reads values it asks ``RunTrace.has_values``,
    and ``RunTrace.has_every_rank`` before it compares ranks.

    Attributes:
        status: The name of the status of a check without findings in such a run. It never is
            ``passed``, since less was checked (``status.ADDED_STATUSES``).
        ranks: The ranks for which the snapshot was taken: all whose shards have the same shapes.
        steps: How many steps it takes before the snapshots that checks read. Ranks take three.
    """

    status: str
    ranks: tuple[int, ...]
    steps: int


@dataclass(frozen=True)
class Snapshot:
    """Record of one rank's probe after one action.

    It has what the probe read of model, optimizer, process and files. A field keeps its empty
    default after an action for which it is not read: ``loss`` is None after ``save``.
    """

    # Of which action it is.

    #: The rank.
    rank: int
    #: The name of the run in its scenario: ``train``.
    run: str
    #: The action: ``build_model``, ``build``, ``step``, ``save``, ...
    action: str
    #: The number of the action in its run, from 0.
    index: int
    #: How long the action took, in seconds.
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
    #: Where activations are to be recomputed: how many operators of each kind the model's blocks
    #: ran in the forward pass, and how many after it, as ``KIND again``:
    #: ``{"products": 14, "products again": 14, "others": 90, "others again": 90}``. ``calls`` is
    #: the number of forward passes of blocks.
    recomputed: Mapping[str, int] = field(default_factory=dict)
    #: The peak memory in bytes until then: allocated on the GPU, else resident in the process.
    memory: int = 0

    # What the model is fed, and what it computes.

    #: Digests of what the model was fed, one text for each forward pass: a rank whose texts are
    #: those of another rank trained on the same batch.
    inputs: tuple[str, ...] = ()
    #: The names of the modules that were in evaluation mode in one of these forward passes.
    evaluating: tuple[str, ...] = ()
    #: What each forward pass of a dropout module dropped.
    dropouts: tuple[DropoutInfo, ...] = ()
    #: The weights of tokens in the gradients of each micro-batch, in the first steps of a run.
    token_weights: tuple[TokenWeights, ...] = ()
    #: At the end of a script: live name -> sums of this rank's part of each buffer and of each
    #: parameter. Of a parameter with a float32 master in ZeRO's flat partition it is the master's.
    sums: Mapping[str, Sums] = field(default_factory=dict)
    #: A sample of what the model computes on a fixed batch.
    outputs: tuple[float, ...] = ()

    # The live trainer after the action.

    #: A digest of torch's random states.
    rng: str = ""
    #: The numbers of the loss scaler of fp16: ``{"scale": 1024.0}``.
    scaler: Mapping[str, float] = field(default_factory=dict)
    #: The model before anything wraps it.
    unwrapped: UnwrappedInfo | None = None
    #: The model as the trainer has it: its parameters and buffers.
    model: ModelInfo | None = None
    #: The optimizer: its state and its parameter groups.
    optimizer: OptimizerInfo | None = None
    #: The state of the learning rate scheduler as a text with a digest:
    #: ``last_epoch=3 lr=[0.001] 5f1c...``.
    scheduler: str = ""
    #: The states that the driver names in ``extra_state``.
    extra: tuple[ExtraStateInfo, ...] = ()

    # What was seen inside a step.

    #: Each step of a torch optimizer since the last snapshot: dtypes, and the gradients that it
    #: got. A trainer with two optimizers has two.
    steps: tuple[StepInfo, ...] = ()
    #: The dtypes of the model's matrix products: ``("bfloat16",)``.
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
    #: The metrics of an evaluation by name: ``{"accuracy": 0.5}``.
    metrics: Mapping[str, float] = field(default_factory=dict)
    #: What each call of a function such as ``gather`` gave this rank.
    exchanges: tuple[ExchangeInfo, ...] = ()
    #: Of a reference run, which repeats the training in one process: what its loss would be if the
    #: mean were taken over something else, ``{"each token": 2.31, "each micro-batch": 2.29}``. The
    #: key says what has an equal weight in the mean.
    averages: Mapping[str, float] = field(default_factory=dict)

    # Of the machine, and of what stood in for ranks.

    #: How the GPU multiplies, empty on the CPU: ``{"matmul": "ieee", "conv": "tf32"}`` is the
    #: precision of float32 products. ``autocast`` has torch.autocast's dtype if that is on between
    #: steps.
    products: Mapping[str, str] = field(default_factory=dict)
    #: Settings of torch for the whole process, which a user's own code works by: ``{"threads": "1",
    #: "default dtype": "torch.float32"}``. Empty if the trainer may set them.
    settings: Mapping[str, str] = field(default_factory=dict)
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

"""Traces: what the probes of all ranks recorded, as plain data that checks read.

A rank is one process of a run: of one process group from start to end. A rank performs its run's
actions in order (``build_model``, ``build``, ``step``, ``save``, ...). After each action the probe,
code of this package on the rank, reads model, optimizer and files into one ``Snapshot``. The rank
writes the snapshot to its log as a line of JSON. pytest's process decodes the lines of all ranks
into a ``RunTrace``. The runs that a check needs together (its scenario, such as train, then resume)
are a ``Trace``. A check is a function of a cell (one point of the matrix, such as
``fsdp2-fp32-w2``) and a ``Trace``: it sees nothing else of the ranks.

- ``layout``: which part of a tensor a rank holds.
- ``model``: parameters, buffers and wrappers, before and after wrapping.
- ``optimizer``: the optimizer's state, and what it stepped on.
- ``forward``: what forward and backward passes showed: collectives, dropouts, weights of tokens.
- ``files``: the files of checkpoints and exports.
- ``declared``: data loaders and further state, which a driver declares.
- ``snapshot``: all of these after one action on one rank.
- ``runs``: all snapshots of a run, and all runs of a scenario.

Everywhere a dtype is torch's name without the prefix (``"float32"``), a shape is a tuple of ints,
and a digest is a hash of a tensor's local values in whatever dtype (``digests``).
"""

from pytest_distcompat.trace.declared import (
    ExchangeInfo,
    ExtraState,
    ExtraStateInfo,
    LoadedBatch,
    Loader,
    RowsInfo,
)
from pytest_distcompat.trace.files import FileInfo
from pytest_distcompat.trace.forward import (
    WITHOUT_GRADIENT,
    CollectiveInfo,
    DropoutInfo,
    RowWeight,
    TokenWeights,
)
from pytest_distcompat.trace.layout import (
    FLAT,
    REPLICATE,
    STAGE,
    WHOLE,
    Layout,
    MeshDim,
    held_indices,
    shard_groups,
    together,
)
from pytest_distcompat.trace.model import ModelInfo, ParameterInfo, UnwrappedInfo
from pytest_distcompat.trace.optimizer import GradientInfo, OptimizerInfo, StateInfo, StepInfo
from pytest_distcompat.trace.runs import RunFailure, RunTrace, Trace
from pytest_distcompat.trace.snapshot import TF32, CallInfo, Snapshot, StandIn, Sums

__all__ = [
    "FLAT",
    "REPLICATE",
    "STAGE",
    "TF32",
    "WHOLE",
    "WITHOUT_GRADIENT",
    "CallInfo",
    "CollectiveInfo",
    "DropoutInfo",
    "ExchangeInfo",
    "ExtraState",
    "ExtraStateInfo",
    "FileInfo",
    "GradientInfo",
    "Layout",
    "LoadedBatch",
    "Loader",
    "MeshDim",
    "ModelInfo",
    "OptimizerInfo",
    "ParameterInfo",
    "RowWeight",
    "RowsInfo",
    "RunFailure",
    "RunTrace",
    "Snapshot",
    "StandIn",
    "StateInfo",
    "StepInfo",
    "Sums",
    "TokenWeights",
    "Trace",
    "UnwrappedInfo",
    "held_indices",
    "shard_groups",
    "together",
]

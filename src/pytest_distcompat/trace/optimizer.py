"""Records of an optimizer: its state after an action, and what it stepped on during a step.

The *probe* reads on each rank what the trainer has there. ``probe.optimizer`` makes an
``OptimizerInfo`` after each action. ``probe.observe`` makes a ``StepInfo`` when torch's hooks
announce a step; ``probe.gradients`` reads its gradients.

A master is the float32 copy of a parameter in lower precision, which the optimizer updates in place
of the parameter. ZeRO (DeepSpeed) joins the masters of many parameters into flat partitions, of
which each rank has one part. *Live* are the parameters of the wrapped model that is trained; their
names may have the wrapper's segments: ``module.lm_head.weight`` under DDP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_distcompat.trace.layout import WHOLE, Layout


@dataclass(frozen=True)
class StateInfo:
    """One tensor (or number) of the optimizer's state on one rank, such as an ``exp_avg``."""

    #: The live name of the parameter that it belongs to, or ``partition 0`` for a flat partition.
    owner: str
    #: Its key in the state: ``exp_avg``, ``step``; ``master`` for a master.
    key: str
    #: The dtype of what is stored; of a quantized tensor that of its codes. Of a Python number its
    #: type: ``float``.
    dtype: str
    #: How many elements this rank has.
    numel: int
    #: A digest of them.
    digest: str
    #: Which part of the state's tensor this rank has.
    layout: Layout = WHOLE
    #: The stored bytes; a quantized tensor's scales count too. 0 for a Python number.
    nbytes: int = 0


@dataclass(frozen=True)
class OptimizerInfo:
    """The optimizer on one rank, after an action."""

    #: The class names from the outermost wrapper to the torch optimizer that steps:
    #: ``("AcceleratedOptimizer", "AdamW")``.
    chain: tuple[str, ...]
    #: The number of tensors in its ``param_groups``.
    entries: int
    #: How many of these are no parameter of the model that is trained. If the optimizer was made
    #: before the model was wrapped, they may be parameters that the wrapper has replaced.
    foreign: int = 0
    #: The state of each parameter or flat partition.
    states: tuple[StateInfo, ...] = ()
    #: Live name of a parameter -> how many of its elements this rank's flat partition has (ZeRO).
    partitioned: Mapping[str, int] = field(default_factory=dict)
    #: The masters in that partition and their moments (``exp_avg``, ...), as one entry for each
    #: parameter: the elements of it that this rank has. ``states`` has the partition as one tensor.
    masters: tuple[StateInfo, ...] = ()
    #: The dtype in which ZeRO adds up gradients; empty without DeepSpeed.
    accumulates: str = ""
    #: The numbers of each parameter group: ``({"lr": 0.001, "betas.0": 0.9},)``.
    param_groups: tuple[Mapping[str, float], ...] = ()
    #: The live names of the parameters whose gradient was None (not zero) in all steps since the
    #: last snapshot.
    without_gradient: tuple[str, ...] = ()


@dataclass(frozen=True)
class GradientInfo:
    """This rank's part of the gradient of one live parameter, as the optimizer got it."""

    #: The live name of the parameter.
    name: str
    #: How many elements this rank has of the gradient.
    numel: int
    #: The sum of their squares.
    square: float
    #: Which part of the gradient it is.
    layout: Layout = WHOLE
    #: The index of the parameter's group in ``StepInfo.param_groups``.
    group: int = 0


@dataclass(frozen=True)
class StepInfo:
    """What the torch optimizer that steps had on one rank, during one step."""

    #: The class name of the optimizer: ``AdamW``.
    optimizer: str
    #: The dtypes of the tensors that it updates: ``("float32",)``.
    master: tuple[str, ...]
    #: The dtypes of their gradients.
    gradient: tuple[str, ...]
    #: The dtypes of its state, without step counts.
    state: tuple[str, ...]
    #: This rank's share of the sum of the squares of all gradients as the optimizer got them, after
    #: unscaling and clipping, computed in float64. The shares of all ``holders`` add up to that
    #: sum, in which replicas count once.
    square: float = 0.0
    #: The same gradients by live parameter, those in ZeRO's flat partitions too.
    gradients: tuple[GradientInfo, ...] = ()
    #: The ranks that hold one copy of all gradients together; empty for this rank alone.
    holders: tuple[int, ...] = ()
    #: The number of ranks over which ZeRO++ shards a second copy of all weights; 0 if it does not,
    #: or not all weights.
    secondary: int = 0
    #: The numbers of each parameter group in this step, as ``OptimizerInfo.param_groups``.
    param_groups: tuple[Mapping[str, float], ...] = ()

"""Calls of a live trainer in one process, in plain torch: ``step``, ``zero_grad``, ``load``, ...

A *walk* makes random calls on a trainer that runs on several ranks (``ext.walk``). Each rank has a
subclass of ``Calls`` that knows the trainer's library; a driver names it in ``live_calls``. The
same calls are made in one process with ``Calls`` itself, which is the *reference*: a plain model, a
torch optimizer and a scheduler, trained on the batches of all ranks. ``worker`` makes both,
performs the calls by their text, ``step(clip='no')``, and records the trainer after each. A check
compares them.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pytest_distcompat.calls import Call, observer, training
from pytest_distcompat.strategies import MAX_NORM

#: The value to which calls clip gradients.
CLIP_VALUE = 0.01
#: What ``slower`` multiplies learning rates by.
SLOWER = 0.5


class Calls:
    """Calls in one process, without a strategy: the reference of walks, and the base of drivers'.

    Methods that are marked ``training`` (it changes the training) or ``observer`` (it must not) are
    calls, which a walk may make. Their arguments have annotations ``bool`` or ``Literal``, whose
    values are drawn. All other methods are for subclasses to use or override. A driver whose
    library has no such call, or not with each value of an argument, lists that in ``refused``.

    Args:
        trainer: Has ``model``, ``optimizer``, ``scheduler``, ``epoch``, ``loss(model, number,
            rank)``, ``outputs(model)``.
        directory: Where calls may write; all ranks share it.
        ranks: The ranks whose batches this process trains on.
        position: The number of the next batch.
    """

    #: Strategy (``*`` for all) -> pattern of calls, such as ``freeze*`` -> the reason why the
    #: driver does not have them.
    refused: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    #: Call -> public method (``module:Class.method``) whose further arguments it passes on. The
    #: reference has none of them: with such an argument a call does what it does without.
    passes_on: ClassVar[Mapping[str, str]] = {}
    #: The names of calls that the trainer itself does as an action of its plan, such as ``step``: a
    #: walk has it do them so, and does not call the method here.
    own: ClassVar[tuple[str, ...]] = ()
    #: Strategy -> code that makes the trainer of ``model``, for the script that shows a walk
    #: without this plugin.
    script: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self, trainer: Any, directory: Path, ranks: Sequence[int], position: int = 0
    ) -> None:
        self.trainer = trainer
        self.directory = directory
        self.ranks = ranks
        self.position = position
        #: What ``save`` saved: the states of model, optimizer and scheduler.
        self.saved: Any = None

    @property
    def model(self) -> Any:
        """Return the model as the trainer has it."""
        return self.trainer.model

    def perform(self, text: str) -> Any:
        """Do a call, given as ``step(clip='no')``, and return its result.

        One that this class lacks does nothing: a driver may have further observers, which the
        reference need not have, since they change nothing.
        """
        call = Call.parse(text)
        method = getattr(self, call.name, None)
        if method is None:
            return None
        return method(**_accepted(method, dict(call.arguments)))

    def sync(self, last: bool) -> contextlib.AbstractContextManager[Any]:  # noqa: ARG002 - for those who override it
        """Return the context of a forward and backward pass.

        Gradients are reduced over ranks in it if the pass is the ``last`` one before an update.
        Drivers override it, with DDP's ``no_sync`` for example; one process has nothing to reduce.
        """
        return contextlib.nullcontext()

    def backward(self, last: bool) -> float:
        """Run forward and backward of the next batch and return the loss.

        The reference does so with the batch of each rank, and takes the mean.
        """
        total = 0.0
        for rank in self.ranks:
            with self.sync(last):
                loss = self.trainer.loss(self.model, self.position, rank) / len(self.ranks)
                loss.backward()
            total += float(loss.detach())
        self.position += 1
        return total

    def clip_norm(self) -> Any:
        """Clip gradients by their norm and return it."""
        from torch.nn.utils import clip_grad_norm_

        return clip_grad_norm_(self.model.parameters(), MAX_NORM)

    def clip_value(self) -> None:
        """Clip gradients by value."""
        from torch.nn.utils import clip_grad_value_

        clip_grad_value_(self.model.parameters(), CLIP_VALUE)

    @training
    def step(
        self,
        clip: Literal["norm", "value", "no"] = "norm",
        zero: Literal["none", "zeros", "keep"] = "none",
    ) -> float:
        """Train on a batch, as an optimizer step does.

        Forward, backward, clip, step optimizer and scheduler, zero gradients or keep them.
        """
        loss = self.backward(last=True)
        self.update(clip, zero)
        return loss

    def update(self, clip: str, zero: str) -> None:
        """Do all of a step that follows the backward pass."""
        if clip == "norm":
            norm = self.clip_norm()
            if hasattr(norm, "full_tensor"):
                # The norm of DTensors is a DTensor too, of which each rank has a part.
                norm = norm.full_tensor()
            self.trainer.grad_norm = None if norm is None else float(norm)
        elif clip == "value":
            self.clip_value()
        self.trainer.optimizer.step()
        self.trainer.scheduler.step()
        if zero != "keep":
            self.zero_grad(set_to_none=zero == "none")

    @training
    def micro(self) -> float:
        """Add the gradients of a batch up, without reducing them."""
        return self.backward(last=False)

    @training
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients."""
        self.trainer.optimizer.zero_grad(set_to_none=set_to_none)

    @training
    def slower(self) -> None:
        """Lower the learning rate by hand."""
        for group in self.trainer.optimizer.param_groups:
            group["lr"] *= SLOWER

    def part(self, name: str) -> Iterator[Any]:
        """Yield the parameters of the module that has this name in the unwrapped model.

        Wrappers put segments before the name, as in ``module.blocks.1.weight``, and FSDP1 also
        inside it.
        """
        for live, parameter in self.model.named_parameters():
            without_fsdp1 = live.replace("_fsdp_wrapped_module.", "")
            # With dots around both, so that ``blocks.1`` is not found in ``blocks.10``.
            if f".{name}." in f".{without_fsdp1}":
                yield parameter

    @training
    def add_group(self) -> None:
        """Unfreeze the layer that was frozen from the beginning.

        The optimizer gets it as a group of its own. The models that walks train have layers of the
        names ``frozen``, ``inlet`` and ``blocks.1``.
        """
        added = list(self.part("frozen"))
        for parameter in added:
            parameter.requires_grad_(requires_grad=True)
        self.trainer.optimizer.add_param_group({"params": added, "lr": 1e-3})

    @training
    def freeze(self, part: Literal["inlet", "blocks.1"] = "inlet") -> None:
        """Freeze a part of the model between two steps."""
        for parameter in self.part(part):
            parameter.requires_grad_(requires_grad=False)

    @training
    def unfreeze(self, part: Literal["inlet", "blocks.1"] = "inlet") -> None:
        """Train a part again that was frozen."""
        for parameter in self.part(part):
            parameter.requires_grad_(requires_grad=True)

    @training
    def mode(self, train: bool = True) -> None:
        """Switch to training mode or evaluation mode."""
        self.model.train(train)

    @training
    def skip(self) -> None:
        """Skip a batch."""
        self.position += 1

    @training
    def new_epoch(self) -> None:
        """Begin the next epoch before this one is at its end."""
        done = self.position % self.trainer.epoch
        self.position += self.trainer.epoch - done

    @training
    def resume(self) -> None:
        """Save, and go on in a new process group. What is not saved is lost.

        On several ranks this method is not called: the walk ends a run and begins the next. The
        reference goes on in its process. It only discards what the ranks lose: gradients, and that
        the model is in evaluation mode.
        """
        self.zero_grad()
        self.model.train()

    @observer
    def save(self) -> None:
        """Save a checkpoint."""
        stateful_objects = (self.model, *self._stateful())
        states = [stateful.state_dict() for stateful in stateful_objects]
        self.saved = copy.deepcopy(states)

    @training
    def load(self, optimizer: bool = True, scheduler: bool = True) -> None:
        """Load the last checkpoint in the same process group.

        The arguments say whether the states of optimizer and scheduler are loaded, beside the
        weights.
        """
        stateful_objects = (self.model, *self._stateful())
        states = copy.deepcopy(self.saved)
        loaded = (True, optimizer, scheduler)
        for stateful, state, is_loaded in zip(stateful_objects, states, loaded, strict=True):
            if is_loaded:
                stateful.load_state_dict(state)

    @training
    def load_weights(self) -> None:
        """Load nothing but the weights of the last checkpoint."""
        self.load(optimizer=False, scheduler=False)

    def _stateful(self) -> tuple[Any, Any]:
        """Return the objects beside the model that have a state dict: optimizer and scheduler."""
        return self.trainer.optimizer, self.trainer.scheduler

    @observer
    def evaluate(self, context: Literal["no_grad", "inference_mode"] = "no_grad") -> Any:
        """Evaluate without gradients and go back to training."""
        return self.outputs(context)

    def accessors(self, of: Any = "fp32_param") -> Any:
        """Return what a driver's reads of single tensors are compared with, by name.

        Without a mark it is not a call. DeepSpeed's class overrides it as a call, which reads each
        tensor by ``safe_get_full_fp32_param`` and its like. ``of`` is ``fp32_param``, ``grad`` or
        ``optimizer_state`` (Adam's first moments). Tensors that do not exist are left out.
        """
        state = self.trainer.optimizer.state
        tensors: dict[str, Any] = {}
        for name, parameter in self.model.named_parameters():
            if of == "fp32_param":
                tensors[name] = parameter
            elif of == "grad" and parameter.grad is not None:
                tensors[name] = parameter.grad
            elif (
                of == "optimizer_state"
                and parameter in state
                and state[parameter].get("exp_avg") is not None
            ):
                tensors[name] = state[parameter]["exp_avg"]
        return tensors

    def optimizer_state(self, how: Any = "own") -> Any:
        """Return what a driver's read of the optimizer's state is compared with.

        Like ``accessors`` it is a call only where a driver overrides it. ``how`` says how the
        driver takes the state: by the optimizer's ``own`` state dict, of which nothing is compared,
        or by a function of its library.
        """
        if how == "own":
            return None
        return self.accessors("optimizer_state")

    @property
    def exports(self) -> Path:
        """Return where weights are exported to.

        It is a directory of its own: checkpoints may have files of the same names.
        """
        return self.directory / "exported"

    def written(self, name: str) -> Any:
        """Return the weights that rank 0 has exported, and remove their files.

        They are in a file of that name, or in its parts.

        Returns:
            The weights by name on rank 0, None on others.
        """
        import torch
        from safetensors.torch import load_file

        # On a rank this list has its number alone, in the reference those of all ranks from 0 on.
        if self.ranks[0] != 0:
            return None
        path = self.exports / name
        paths = sorted(self.exports.glob(f"{path.stem}-*-of-*{path.suffix}"))
        if not paths:
            # It is in one file.
            paths = [path]
        weights: dict[str, Any] = {}
        for part in paths:
            if part.suffix == ".safetensors":
                weights |= load_file(part)
            else:
                weights |= torch.load(part, weights_only=True)
            part.unlink()
        return weights

    def outputs(self, context: str = "no_grad") -> Any:
        """Return what the model computes in evaluation mode.

        The model is left in the mode that it was in.
        """
        import torch

        was_training = self.model.training
        self.model.eval()
        with getattr(torch, context)():
            outputs = self.trainer.outputs(self.model)
        self.reshard()
        self.model.train(was_training)
        return outputs

    def reshard(self) -> None:
        """Have FSDP2 free what a forward pass gathered.

        It expects a backward pass, for which it keeps the parameters of its last units whole.
        """
        for module in self.model.modules():
            if hasattr(module, "reshard"):
                module.reshard()


def _accepted(method: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a method has; all of them if it takes ``**kwargs``.

    A driver's call may have arguments of its library, which the reference's does not have.
    """
    parameters = inspect.signature(method).parameters
    kinds = [parameter.kind for parameter in parameters.values()]
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}

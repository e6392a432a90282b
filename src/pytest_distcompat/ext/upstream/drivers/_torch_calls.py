"""Calls on a live model that DDP or FSDP wraps, for walks with the driver for plain torch.

A walk is a list of calls in random order, such as ``step()``, ``save()``, ``micro()``,
``step(clip='value')``. The profile ``walk`` (``ext/walk``) draws it, makes the calls on each rank
of a run, and makes the same calls in one process with the base class ``Calls``. After each call the
parameters, losses and outputs of both are compared. A call is a method, and its arguments are drawn
from ``bool`` or ``Literal`` annotations. A call marked as ``observer`` must change no bit of the
training; a method without a mark here has that of ``Calls``.

The class attributes, as ``Calls`` explains them: ``script`` has, for each strategy, code that makes
the trainer in a script without this plugin; ``refused`` has, for each strategy (``*`` for all),
patterns of calls that walks leave out -> the reason.

``TorchDriver.live_calls`` names the class ``TorchCalls``. Its attribute ``trainer`` is the driver
after ``build``, ``model`` the trainer's wrapped model, ``directory`` where checkpoints go. In the
script of a walk ``trainer`` is an object with the same attributes, since methods of this class are
copied into the script (``ext/walk/script.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pytest_distcompat.calls import observer
from pytest_distcompat.live_calls import Calls
from pytest_distcompat.strategies import MAX_NORM

#: Why parameters of a model that DDP wraps cannot be frozen.
_FIXED = (
    "DDP reduces what was trainable when it wrapped the model: "
    "DistributedDataParallel's documentation warns of changes"
)

#: The same of FSDP1.
_NO_FSDP1 = "FSDP1 flattens what was trainable when it wrapped the model"

#: The end of each strategy's code in the script of a walk. The rest of the script defines
#: ``trainer_of`` and ``optimizer_of``, ``Block`` and ``RANKS`` (``ext/walk/script.py.tmpl``).
_BUILT = """
    return trainer_of(model, *optimizer_of(model))
"""


class TorchCalls(Calls):
    """Calls on a model that DDP or FSDP wraps."""

    script: ClassVar[Mapping[str, str]] = {
        "ddp": """
    model = nn.parallel.DistributedDataParallel(model)
"""
        + _BUILT,
        "fsdp1": """
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    policy = ModuleWrapPolicy({Block})
    model = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))
"""
        + _BUILT,
        "fsdp2": """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (RANKS,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
"""
        + _BUILT,
    }
    refused: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "ddp": {
            **dict.fromkeys(("freeze*", "unfreeze*", "add_group*"), _FIXED),
            "gather*": "DDP shards nothing",
        },
        "fsdp1": {
            **dict.fromkeys(("freeze*", "unfreeze*", "add_group*"), _NO_FSDP1),
            "gather(how='uns*": "FSDP2's method",
            "gather(how='full*": "FSDP1 has no DTensors",
            "state_dict(how='cpu_offload')": (
                "a segmentation fault: https://github.com/pytorch/pytorch/issues/188989"
            ),
            "unwrap*": "FSDP1's wrapper is not taken off",
        },
        "fsdp2": {"gather()": "FSDP1's method", "unwrap*": "FSDP2 wraps nothing"},
    }

    def sync(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Return ``no_sync`` for all but the last pass; FSDP2 has a switch instead.

        Only in the ``last`` pass before a step are gradients reduced over the ranks.
        """
        if hasattr(self.model, "set_requires_gradient_sync"):
            self.model.set_requires_gradient_sync(last)
            return contextlib.nullcontext()
        return contextlib.nullcontext() if last else self.model.no_sync()

    def clip_norm(self) -> Any:
        """Clip by FSDP1's own method, which knows that parameters are shards, else by torch's."""
        own = getattr(self.model, "clip_grad_norm_", None)
        if own is not None:
            return own(MAX_NORM)
        return super().clip_norm()

    def _state(self, optimizer: bool = True, scheduler: bool = True) -> dict[str, Any]:
        """Return the state to save or to load in place: the model's and, if wanted, the others'."""
        from torch.distributed.checkpoint.state_dict import (
            get_model_state_dict,
            get_optimizer_state_dict,
        )

        state: dict[str, Any] = {"model": get_model_state_dict(self.model)}
        if optimizer:
            state["optimizer"] = get_optimizer_state_dict(self.model, self.trainer.optimizer)
        if scheduler:
            state["scheduler"] = self.trainer.scheduler.state_dict()
        return state

    @observer
    def save(self) -> None:
        """Save by ``torch.distributed.checkpoint``."""
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self._state(), checkpoint_id=self.directory)

    def load(self, optimizer: bool = True, scheduler: bool = True) -> None:
        """Load in place what is wanted of the checkpoint, then set it.

        The distributed checkpoint is read into the tensors of a state dict of the live model, which
        says which shards this rank needs.
        """
        from torch.distributed.checkpoint.state_dict import (
            set_model_state_dict,
            set_optimizer_state_dict,
        )
        from torch.distributed.checkpoint.state_dict_loader import load

        state = self._state(optimizer, scheduler)
        load(state, checkpoint_id=self.directory)
        set_model_state_dict(self.model, state["model"])
        if optimizer:
            set_optimizer_state_dict(self.model, self.trainer.optimizer, state["optimizer"])
        if scheduler:
            self.trainer.scheduler.load_state_dict(state["scheduler"])

    @observer
    def unwrap(self) -> Any:
        """Take the wrapper off."""
        return self.model.module

    @observer
    def state_dict(
        self, how: Literal["full_state_dict", "cpu_offload", "ignore_frozen_params", "own"] = "own"
    ) -> Any:
        """Take the model's state dict: its own, or by ``get_model_state_dict`` with an option."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        if how == "own":
            return self.model.state_dict()
        settings: dict[str, Any] = {"full_state_dict": True, how: True}
        return get_model_state_dict(self.model, options=StateDictOptions(**settings))

    @observer
    def optimizer_state(
        self, how: Literal["full_state_dict", "flatten_optimizer_state_dict", "own"] = "own"
    ) -> Any:
        """Take the optimizer's state dict, and return Adam's first moments by parameter.

        It is its own, of which nothing is returned, or that of ``get_optimizer_state_dict`` with an
        option. With ``full_state_dict`` the moments are in nested dictionaries; flattened, the key
        of one is ``state.blocks.0.weight.exp_avg``.
        """
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_optimizer_state_dict,
        )

        if how == "own":
            self.trainer.optimizer.state_dict()
            return None
        settings: dict[str, Any] = {how: True}
        options = StateDictOptions(**settings)
        state_dict: Any = get_optimizer_state_dict(
            self.model, self.trainer.optimizer, options=options
        )
        moments: dict[str, Any] = {}
        if how == "full_state_dict":
            for name, state in state_dict.get("state", {}).items():
                if "exp_avg" in state:
                    moments[name] = state["exp_avg"]
            return moments
        for key, value in state_dict.items():
            # FSDP1's are ShardedTensors, which the probe cannot add up to whole tensors.
            if key.endswith(".exp_avg") and not hasattr(value, "local_shards"):
                moments[key.removeprefix("state.").removesuffix(".exp_avg")] = value
        return moments

    @observer
    def gather(
        self, how: Literal["summon_full_params", "full_tensor", "unshard"] = "summon_full_params"
    ) -> Any:
        """Return copies of the whole parameters by name.

        ``summon_full_params`` is FSDP1's method; the other two are for FSDP2, by the DTensors'
        ``full_tensor``, or by gathering each FSDP module and sharding it again.
        """
        import torch
        from torch.distributed.fsdp import FullyShardedDataParallel

        if how == "full_tensor":
            with torch.no_grad():
                return {
                    name: parameter.full_tensor()
                    for name, parameter in self.model.named_parameters()
                }
        if how == "unshard":
            # The modules to which ``fully_shard`` was applied.
            units = [module for module in self.model.modules() if hasattr(module, "unshard")]
            for unit in units:
                unit.unshard()
            parameters = {
                name: parameter.detach().clone()
                for name, parameter in self.model.named_parameters()
            }
            for unit in units:
                unit.reshard()
            return parameters
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            parameters = {}
            for name, parameter in self.model.named_parameters():
                parameters[name.replace("_fsdp_wrapped_module.", "")] = parameter.detach().clone()
            return parameters

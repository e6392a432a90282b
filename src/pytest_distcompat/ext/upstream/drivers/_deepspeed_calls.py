"""Calls of a live DeepSpeed engine, for walks with the driver for DeepSpeed.

A walk is a list of calls in random order, such as ``step()``, ``save()``, ``micro()``,
``step(clip='value')``. The profile ``walk`` (``ext/walk``) draws it, makes the calls on each rank
of a run, and makes the same calls in one process with the base class ``Calls``. After each call the
parameters, losses and outputs of both are compared. A call is a method, and its arguments are drawn
from ``bool`` or ``Literal`` annotations. A call marked as ``observer`` must change no bit of the
training; a method without a mark here has that of ``Calls``.

The class attributes, as ``Calls`` explains them: ``script`` has, for each strategy, code that makes
the trainer in a script without this plugin; ``refused`` has, for each strategy (``*`` for all),
patterns of calls that walks leave out -> the reason; ``passes_on`` has calls -> the library's
method that gets their further arguments (``**more``).

``DeepSpeedDriver.live_calls`` names the class ``DeepSpeedCalls``. Its attribute ``trainer`` is the
driver after ``build``, whose ``model`` is the engine; in the script of a walk it is an object with
the same attributes, since methods of this class are copied into the script
(``ext/walk/script.py``). Other attributes come from ``Calls``: ``position`` (the number of the next
batch), ``ranks`` (this rank alone), ``directory`` (for checkpoints) and ``exports`` (for weights).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pytest_distcompat.calls import observer
from pytest_distcompat.ext.upstream.drivers._refused import NO_SECOND_LOAD
from pytest_distcompat.live_calls import Calls

#: Pattern of calls -> why walks have none of them under ZeRO-1 and ZeRO-2. ``*`` stands for any
#: text: ``gather*`` is each call that begins so.
_WHOLE_PARAMETERS = {
    "gather*": "it keeps whole parameters",
    "accessors(of='grad')": "gradients are there before step() alone",
}

#: Pattern of calls -> why walks have none of them at stage 0, without ZeRO.
_WITHOUT_ZERO = dict.fromkeys(("gather*", "accessors*", "offload*"), "it is an interface of ZeRO")

#: Pattern of calls -> why walks have none of them under ZeRO-3.
_NOT_OFFLOADED = {
    "offload()": "of a model with a frozen layer: docs/upstream/deepspeed_offload_frozen.py",
    **dict.fromkeys(
        ("offload(state='hp_params')", "offload(state='optim_states')"),
        "under ZeRO-3 it moves these of DeepSpeed's FusedAdam alone, which needs a GPU",
    ),
}

#: Code that makes the trainer in the script of a walk; ``STAGE`` stands for the stage of ZeRO. The
#: rest of the script defines ``trainer_of``, ``optimizer_of`` and MAX_NORM
#: (``ext/walk/script.py.tmpl``). ``deepspeed_shm_comm`` is DeepSpeed's own all-reduce on the CPU:
#: switched off, gloo does the work. ``initialize`` returns engine, optimizer, loader and scheduler.
_SCRIPT = """
    import deepspeed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    optimizer, scheduler = optimizer_of(model)
    zero = {
        "stage": STAGE,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": MAX_NORM,
        "zero_optimization": zero,
    }
    parts = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    strategy = SimpleNamespace(shards=STAGE == 3)
    return trainer_of(
        parts[0], parts[1], parts[3], strategy=strategy, forget_activations=lambda: None)
"""

#: The class whose methods get the further arguments of calls.
_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"


class DeepSpeedCalls(Calls):
    """Calls of a DeepSpeed engine, which clips and zeroes gradients itself."""

    script: ClassVar[Mapping[str, str]] = {
        "zero0": _SCRIPT.replace("STAGE", "0"),
        "zero1": _SCRIPT.replace("STAGE", "1"),
        "zero2": _SCRIPT.replace("STAGE", "2"),
        "zero3": _SCRIPT.replace("STAGE", "3"),
    }
    refused: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "*": {
            **dict.fromkeys(
                ("step(clip*", "step(zero*"),
                "the engine clips as its JSON says, and zeroes gradients in step()",
            ),
            **dict.fromkeys(
                ("freeze*", "unfreeze*", "add_group*"),
                "the engine partitions what it was built with",
            ),
            "load(*load_module_only=*": "load_weights does that",
            **dict.fromkeys(
                ("save(*save_latest=False*", "save(*exclude_frozen_parameters=True*"),
                "leaves out what load needs",
            ),
        },
        "zero0": _WITHOUT_ZERO,
        "zero1": _WHOLE_PARAMETERS,
        "zero2": _WHOLE_PARAMETERS,
        "zero3": {**NO_SECOND_LOAD, **_NOT_OFFLOADED},
    }
    passes_on: ClassVar[Mapping[str, str]] = {
        "export": f"{_ENGINE}.save_16bit_model",
        "load": f"{_ENGINE}.load_checkpoint",
        "load_weights": f"{_ENGINE}.load_checkpoint",
        "module_state_dict": f"{_ENGINE}.module_state_dict",
        "save": f"{_ENGINE}.save_checkpoint",
    }

    def backward(self, last: bool) -> float:
        """Run forward and backward of the next batch and return the loss.

        Args:
            last: Whether gradient accumulation ends with it: only then does the engine step.
        """
        self.model.set_gradient_accumulation_boundary(last)
        loss = self.trainer.loss(self.model, self.position, self.ranks[0])
        self.model.backward(loss)
        self.position += 1
        return float(loss.detach())

    def micro(self) -> float:
        """Add the gradients of a batch up, without updating parameters."""
        loss = super().micro()
        # ``super().micro()`` calls ``backward(last=False)``.
        # The engine wants a step() after each backward(); it updates where accumulation ends.
        self.model.step()
        return loss

    def update(self, clip: str, zero: str) -> None:  # noqa: ARG002 - see ``refused``
        """Do all of a call ``step()`` that follows its backward pass.

        The engine itself clips, steps the scheduler and zeroes gradients. So ``clip`` and ``zero``
        always have the default values: ``refused`` leaves out calls with others.
        """
        self.model.step()
        self.trainer.grad_norm = self.model.get_global_grad_norm()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients: by the optimizer, or else by the engine, which sets None too."""
        if set_to_none:
            self.model.optimizer.zero_grad()
        else:
            self.model.zero_grad()

    def outputs(self, context: str = "no_grad") -> Any:
        """Return what the model computes in evaluation mode, by way of ``Calls.outputs``."""
        outputs = super().outputs(context)
        # DeepSpeed's activation checkpointing keeps them for a backward pass, and none follows.
        self.trainer.forget_activations()
        return outputs

    @observer
    def save(self, **more: Any) -> None:
        """Save by ``save_checkpoint``."""
        self.model.save_checkpoint(str(self.directory), **more)

    def load(self, optimizer: bool = True, scheduler: bool = True, **more: Any) -> None:
        """Load by ``load_checkpoint``."""
        self.model.load_checkpoint(
            str(self.directory),
            load_optimizer_states=optimizer,
            load_lr_scheduler_states=scheduler,
            **more,
        )

    def load_weights(self, **more: Any) -> None:
        """Load the weights alone, by an argument of ``load_checkpoint``."""
        self.model.load_checkpoint(str(self.directory), load_module_only=True, **more)

    @observer
    def gather(self) -> Any:
        """Return copies of the whole parameters, by ``GatheredParameters``."""
        import deepspeed

        parameters = dict(self.model.module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(parameters.values())):
            return {name: parameter.detach().clone() for name, parameter in parameters.items()}

    @observer
    def accessors(self, of: Literal["fp32_param", "optimizer_state", "grad"] = "fp32_param") -> Any:
        """Read what belongs to each parameter, by ``safe_get_full_fp32_param`` and its like.

        ``of`` ends the function's name: ``fp32_param`` stands for ``safe_get_full_fp32_param``. Of
        the optimizer's state it reads Adam's first moment.
        """
        from deepspeed import utils

        accessor = getattr(utils, f"safe_get_full_{of}")
        arguments = ["exp_avg"] if of == "optimizer_state" else []
        values: dict[str, Any] = {}
        for name, parameter in self.model.module.named_parameters():
            if parameter.requires_grad:
                values[name] = accessor(parameter, *arguments)
        return values

    @observer
    def offload(
        self,
        state: Literal[
            "lp_params", "lp_grads", "contiguous_grad_buffer", "hp_params", "optim_states"
        ] = "lp_params",
    ) -> None:
        """Move a part of the engine's state away, by ``offload_states``, and back.

        Users do between training and generation:
        https://deepspeed.readthedocs.io/en/latest/zero3.html#offload-states
        """
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

        # Pinned memory is of GPUs.
        self.model.offload_states(include=[OffloadStateTypeEnum(state)], pin_memory=False)
        self.model.reload_states()

    @observer
    def module_state_dict(self, exclude_frozen_parameters: bool = False, **more: Any) -> Any:
        """Return the module's state dict; None under ZeRO-3, where each rank has shards of it."""
        state = self.model.module_state_dict(
            exclude_frozen_parameters=exclude_frozen_parameters, **more
        )
        if self.trainer.strategy.shards:
            return None
        return state

    @observer
    def export(self, exclude_frozen_parameters: bool = False, **more: Any) -> Any:
        """Write the weights by ``save_16bit_model``; return them by name, on rank 0 alone."""
        self.model.save_16bit_model(
            str(self.exports), exclude_frozen_parameters=exclude_frozen_parameters, **more
        )
        return self.written("pytorch_model.bin")

    @observer
    def memory(self) -> None:
        """Print how much memory is used."""
        from deepspeed.runtime.utils import see_memory_usage

        see_memory_usage("walk", force=True)

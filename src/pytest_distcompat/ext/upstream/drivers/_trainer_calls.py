"""Calls of a callback while ``Trainer.train`` runs, for walks with the driver for Trainer.

A walk is a list of calls in random order, such as ``step()``, ``save()``, ``micro()``,
``step(clip='value')``. The profile ``walk`` (``ext/walk``) draws it, makes the calls on each rank
of a run, and makes the same calls in one process with the base class ``Calls``. After each call the
parameters, losses and outputs of both are compared. A call is a method, and its arguments are drawn
from ``bool`` or ``Literal`` annotations. A call marked as ``observer`` must change no bit of the
training.

The class attributes, as ``Calls`` explains them: ``own`` names the calls that the trainer makes
itself, as actions of its plan; ``refused`` has, for each strategy (``*`` for all), patterns of
calls that walks leave out -> the reason.

``TrainerDriver.live_calls`` names the class ``TrainerCalls``. Its attribute ``trainer`` is the
driver, whose own ``trainer`` is the ``transformers.Trainer``. The callback of
``_trainer_callback.py`` makes these calls between two steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pytest_distcompat.calls import observer
from pytest_distcompat.ext.upstream.drivers._refused import OFFLOADS
from pytest_distcompat.live_calls import Calls


class TrainerCalls(Calls):
    """Calls of a callback while Trainer trains."""

    own: ClassVar[tuple[str, ...]] = ("step", "save")
    refused: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "*": {
            **dict.fromkeys(
                ("step(clip*", "step(zero*", "micro*", "zero_grad*"),
                "Trainer clips and zeroes gradients itself",
            ),
            **dict.fromkeys(
                ("skip*", "new_epoch*", "mode*", "load*"), "Trainer's own loop decides that"
            ),
            **dict.fromkeys(
                ("freeze*", "unfreeze*", "add_group*"),
                "what was trainable when it was wrapped stays so",
            ),
        },
        "fsdp1": dict.fromkeys(("get_state_dict*", "save_model*"), OFFLOADS),
    }

    @observer
    def evaluate(self) -> None:  # type: ignore[override]  # no choice of context: no_grad alone
        """Evaluate by ``Trainer.evaluate``, on four rows for each rank."""
        ranks = self.trainer.world.size
        rows = self.trainer.dataset(ranks)
        # Trainer looks for labels among the arguments of the model's forward, and model mlp has
        # none.
        self.trainer.trainer.label_names = ["labels"]
        self.trainer.trainer.evaluate(rows[: ranks * 4])
        # Trainer switches to training mode in its next step; the probe looks before that. FSDP2
        # keeps what the forward gathered, since no backward pass follows: ``reshard`` frees it.
        self.model.train()
        self.reshard()

    @observer
    def predict(self) -> Any:
        """Compute outputs by ``Trainer.predict``: each rank computes some, and all get all."""
        import torch

        # Its loader draws a seed, as that of ``evaluate`` does: known issue
        # transformers-evaluate-rng.
        with torch.random.fork_rng():
            outputs = self.trainer.predictions()
        # As in ``evaluate``.
        self.model.train()
        self.reshard()
        return outputs

    @observer
    def save_model(self, _internal_call: bool = False) -> Any:
        """Write the weights by ``Trainer.save_model``, and return them.

        While FSDP's state dicts are sharded it would write nothing, so they are full meanwhile.
        ``_internal_call`` is Trainer's own argument: if true, nothing is pushed to the Hub.
        """
        plugin = getattr(self.trainer.trainer.accelerator.state, "fsdp_plugin", None)
        state_dict_type = getattr(plugin, "state_dict_type", None)
        if plugin is not None:
            plugin.set_state_dict_type("FULL_STATE_DICT")
        self.trainer.trainer.save_model(str(self.exports), _internal_call=_internal_call)
        if plugin is not None:
            plugin.set_state_dict_type(state_dict_type)
        return self.written("model.safetensors")

    @observer
    def unwrap_model(self, keep_fp32_wrapper: bool = True) -> Any:
        """Take all wrappers off."""
        accelerator = self.trainer.trainer.accelerator
        return accelerator.unwrap_model(self.trainer.trainer.model_wrapped, keep_fp32_wrapper)

    @observer
    def get_state_dict(self) -> Any:
        """Take the model's whole state dict."""
        return self.trainer.trainer.accelerator.get_state_dict(self.trainer.trainer.model_wrapped)

    @observer
    def save_state(self) -> None:
        """Write the Trainer's own state, as example scripts do at the end."""
        self.trainer.trainer.save_state()

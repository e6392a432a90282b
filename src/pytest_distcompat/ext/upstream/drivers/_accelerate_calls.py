"""Calls of a live ``Accelerator``, for walks with the driver for accelerate.

A walk is a list of calls in random order, such as ``step()``, ``save()``, ``step(clip='value')``,
``micro()`` (forward and backward without an update). The profile ``walk`` (``ext/walk``) draws it,
makes the calls on each rank of a run, and makes the same calls in one process with the base class
``Calls``. After each call the parameters, losses and outputs of both are compared. A call is a
method, and its arguments are drawn from ``bool`` or ``Literal`` annotations. A call marked as
``observer`` must change no bit of the training; a method without a mark here has that of ``Calls``.

The class attributes, as ``Calls`` explains them: ``script`` has, for each strategy, code that makes
the trainer in a script without this plugin; ``refused`` has, for each strategy (``*`` for all),
patterns of calls that walks leave out -> the reason; ``passes_on`` has calls -> the library's
method that gets their further arguments (``**more``).

``AccelerateDriver.live_calls`` names the class ``AccelerateCalls``. Its attribute ``trainer`` is
the driver after ``build``; in the script of a walk it is an object with the same attributes, since
methods of this class are copied into the script (``ext/walk/script.py``). ``trainer.tiny`` is the
tiny model that is trained, and ``position`` the number of the next batch, from 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, ClassVar

from pytest_distcompat.calls import observer
from pytest_distcompat.ext.upstream.drivers._refused import NO_SECOND_LOAD, OFFLOADS
from pytest_distcompat.live_calls import CLIP_VALUE, Calls
from pytest_distcompat.strategies import MAX_NORM

# The next five are parts of ``refused``: pattern of calls -> why walks leave them out.

#: Under DeepSpeed, where ``accelerator.backward`` does the work of several calls.
_ENGINE = {
    **dict.fromkeys(
        ("step(clip*", "step(zero*", "zero_grad*"),
        "DeepSpeed's engine clips and zeroes gradients in backward",
    ),
    "micro*": (
        "under DeepSpeed accelerate counts micro-batches itself, by gradient_accumulation_steps"
    ),
    **dict.fromkeys(
        ("freeze*", "unfreeze*", "add_group*"),
        "DeepSpeed's optimizer partitions what it was built with",
    ),
}

#: Under FSDP1.
_FSDP1 = dict.fromkeys(("get_state_dict*", "export*"), OFFLOADS)

#: Under DDP and FSDP1, whose wrappers note what is trainable.
_WRAPPED = dict.fromkeys(
    ("freeze*", "unfreeze*", "add_group*"), "what was trainable when it was wrapped stays so"
)

#: Under DDP and FSDP: only DeepSpeed can load without the optimizer's state.
_WHOLE_STATE = {"load(optimizer=False*": "load_state loads everything"}

#: Under FSDP.
_VALUE = {"step(clip='value'*": "accelerate raises: use clip_grad_norm_ instead"}

#: Code that makes the trainer in the script of a walk; ``PLUGIN`` stands for a strategy's own part.
#: The script shows a failing walk without this plugin. ``script.py.tmpl`` in ``ext/walk`` is the
#: rest of it, with the model, ``optimizer_of``, ``trainer_of``, ``batch``, ``RANKS`` (their
#: number), ``EPOCH`` (the batches of a rank in an epoch) and ``MAX_NORM``. The operator
#: ``deepspeed_shm_comm`` is switched off because DeepSpeed would compile it for 40 s. The scheduler
#: counts ``RANKS`` calls as a step, since accelerate's calls it once for each rank.
_SCRIPT = """
    import deepspeed
    from accelerate import Accelerator, DeepSpeedPlugin, DistributedType
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from torch.utils.data import DataLoader
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    PLUGIN
    optimizer, scheduler = optimizer_of(model, every=RANKS)
    data = []
    for number in range(EPOCH):
        for rank in range(RANKS):
            data += zip(*batch(number, rank))
    parts = accelerator.prepare(DataLoader(data, batch_size=4), model, optimizer, scheduler)
    trainer = trainer_of(*parts[1:], accelerator=accelerator, stream=None)

    def loss(model, rows):
        return functional.cross_entropy(model(rows[0]), rows[1])

    trainer.tiny = SimpleNamespace(loss=loss)

    def batches(done):
        yield from accelerator.skip_first_batches(parts[0], done) if done else ()
        while True:
            yield from parts[0]

    def next_batch(done):
        trainer.stream = trainer.stream or batches(done % EPOCH)
        return next(trainer.stream)

    def forget_stream():
        trainer.stream = None

    trainer.next_batch, trainer.forget_stream = next_batch, forget_stream
    return trainer
"""

#: On CPU ranks accelerate runs DDP instead of FSDP without this: see ``on_cpu``.
_FSDP_PLUGIN = """
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=VERSION,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,
        **MORE,
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
"""

#: The part of a ZeRO stage.
_ZERO_PLUGIN = """
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
    from accelerate import InitProcessGroupKwargs
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    handlers = [InitProcessGroupKwargs(backend="gloo")]
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=handlers)
"""

#: Strategy -> its own part of the script.
_PLUGINS = {
    "ddp": "\n    accelerator = Accelerator(cpu=True)",
    "fsdp1": _FSDP_PLUGIN.replace("VERSION", "1").replace(
        "MORE", "{'use_orig_params': True, 'sync_module_states': False}"
    ),
    "fsdp2": _FSDP_PLUGIN.replace("VERSION", "2").replace("MORE", "{}"),
    "zero0": _ZERO_PLUGIN.replace("STAGE", "0"),
    "zero1": _ZERO_PLUGIN.replace("STAGE", "1"),
    "zero2": _ZERO_PLUGIN.replace("STAGE", "2"),
    "zero3": _ZERO_PLUGIN.replace("STAGE", "3"),
}

#: The class whose methods get the further arguments of calls.
_ACCELERATOR = "accelerate.accelerator:Accelerator"


class AccelerateCalls(Calls):
    """Calls of an ``Accelerator``."""

    script: ClassVar[Mapping[str, str]] = {
        name: _SCRIPT.replace("\n    PLUGIN", text) for name, text in _PLUGINS.items()
    }
    refused: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "*": dict.fromkeys(
            ("load_weights*", "load(*scheduler=False*"),
            "load_state loads a torch scheduler in any case",
        ),
        "ddp": _WRAPPED | _WHOLE_STATE,
        "fsdp1": _WRAPPED | _VALUE | _FSDP1 | _WHOLE_STATE,
        "fsdp2": _VALUE | _WHOLE_STATE,
        **dict.fromkeys(("zero0", "zero1", "zero2"), _ENGINE),
        "zero3": _ENGINE | NO_SECOND_LOAD,
    }
    passes_on: ClassVar[Mapping[str, str]] = {
        "export": f"{_ACCELERATOR}.save_model",
        "gather_for_metrics": f"{_ACCELERATOR}.gather_for_metrics",
        "get_state_dict": f"{_ACCELERATOR}.get_state_dict",
        "save": f"{_ACCELERATOR}.save_state",
        "unwrap_model": f"{_ACCELERATOR}.unwrap_model",
    }

    @property
    def accelerator(self) -> Any:
        """Return the ``Accelerator``."""
        return self.trainer.accelerator

    def backward(self, last: bool) -> float:
        """Run forward and backward of the next batch of the prepared loader; return the loss.

        Args:
            last: Whether it is the last micro-batch of a step. Only then are gradients reduced.
        """
        context = contextlib.nullcontext() if last else self.accelerator.no_sync(self.model)
        with context:
            batch = self.trainer.next_batch(self.position)
            loss = self.trainer.tiny.loss(self.model, batch)
            self.accelerator.backward(loss)
        self.position += 1
        return float(loss.detach())

    def clip_norm(self) -> Any:
        """Clip by the Accelerator, and return the norm.

        Under DeepSpeed that is the engine's; accelerate before 1.8 returns None.
        """
        return self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)

    def clip_value(self) -> None:
        """Clip by the Accelerator."""
        self.accelerator.clip_grad_value_(self.model.parameters(), CLIP_VALUE)

    def skip(self) -> None:
        """Skip a batch by ``skip_first_batches``, as a resumed run does."""
        super().skip()
        # The next call of ``next_batch`` skips what was had of the epoch.
        self.trainer.forget_stream()

    def new_epoch(self) -> None:
        """Begin the loader again."""
        super().new_epoch()
        self.trainer.forget_stream()

    @observer
    def save(self, **more: Any) -> None:
        """Save by ``save_state``."""
        self.accelerator.save_state(str(self.directory), **more)

    def load(self, optimizer: bool = True, scheduler: bool = True) -> None:  # noqa: ARG002 - see ``refused``
        """Load by ``load_state``, which passes arguments on to DeepSpeed's ``load_checkpoint``."""
        settings: dict[str, Any] = {}
        if not optimizer:
            settings["load_optimizer_states"] = False
        self.accelerator.load_state(str(self.directory), **settings)

    @observer
    def gather_for_metrics(self, **more: Any) -> Any:
        """Evaluate and gather what all ranks found."""
        outputs = self.outputs()
        gathered = self.accelerator.gather_for_metrics(outputs, **more)
        if isinstance(gathered, list):
            # With ``use_gather_object`` it takes a tensor for a collection of objects, its rows.
            import torch

            gathered = torch.stack(gathered)
        # All ranks evaluate the same rows, so that those of the first rank stand for all.
        return gathered[: len(outputs)]

    @observer
    def unwrap_model(
        self, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, **more: Any
    ) -> Any:
        """Take all wrappers off."""
        return self.accelerator.unwrap_model(
            self.model, keep_fp32_wrapper, keep_torch_compile, **more
        )

    @observer
    def get_state_dict(self, unwrap: bool = True, **more: Any) -> Any:
        """Take the model's whole state dict, which FSDP gives to rank 0 alone."""
        return self.accelerator.get_state_dict(self.model, unwrap=unwrap, **more)

    @observer
    def export(self, safe_serialization: bool = True, **more: Any) -> Any:
        """Write the weights by ``save_model``."""
        self.accelerator.save_model(
            self.model, str(self.exports), safe_serialization=safe_serialization, **more
        )
        return self.written("model.safetensors" if safe_serialization else "pytorch_model.bin")

"""A Llama-shaped model behind each of accelerate's back ends, for ``throughput.py`` and ``convergence.py``.

As in case E of ``docs/cases``: the model is loaded in bfloat16 and trained by AdamW at one learning rate. With ``upcast`` the
optimizer updates float32 copies, without it the bfloat16 weights themselves:

| back end | upcast | no upcast |
| --- | --- | --- |
| ddp | cast to float32 before, for accelerate upcasts nothing under DDP | mixed precision on bfloat16 weights |
| fsdp2 | by accelerate, because mixed precision is on | no mixed precision |
| zero2, zero3 | by DeepSpeed, always | DeepSpeed's bf16_master_weights_and_grads |
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

BACK_ENDS = ("ddp", "fsdp2", "zero2", "zero3")
MAX_NORM = 1.0


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        """The number of elements that are trained."""
        embeddings = 2 * self.vocabulary * self.hidden
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return embeddings + self.layers * layer + self.hidden


#: ``7b`` is the shape of Llama-2-7B; ``tiny`` is for a machine without a GPU; ``bytes`` reads text byte by byte.
SHAPES = {
    "7b": Shape(4096, 11008, 32, 32, 32000),
    "3b": Shape(3072, 8192, 26, 24, 32000),
    "1b": Shape(2048, 5632, 22, 32, 32000),
    "tiny": Shape(64, 128, 2, 4, 512),
    "bytes": Shape(512, 1408, 8, 8, 256),
    "bytes_tiny": Shape(64, 128, 2, 4, 256),
}
#: The models of case E, the largest first.
LLAMAS = ("7b", "3b", "1b")


@dataclass(frozen=True)
class Memory:
    """What one rank needs to train: bytes for each parameter, and for all else at 8 x 4096 tokens."""

    per_parameter: float
    rest: float

    def needed(self, shape: Shape) -> float:
        """Return the bytes for a model of that shape."""
        return self.per_parameter * shape.parameters + self.rest


#: By back end and upcast, from peaks on an H200 (docs/cases.md): ZeRO-3 120.0e9 bytes at 7b and 60.6e9 at 3b with 8 x 2048
#: tokens, FSDP2 115.5e9 at 7b with 8 x 4096, DDP without upcast 57.4e9 at 7b with 8 x 2048. Longer rows took 4e9 more.
MEMORY = {
    **dict.fromkeys((("ddp", True), ("zero2", True), ("zero3", True)), Memory(16.5, 13e9)),
    ("fsdp2", True): Memory(16.5, 5e9),
    **{(back_end, False): Memory(8.0, 8e9) for back_end in BACK_ENDS},
}


def largest_model(back_end: str, free: int, *, upcast: bool) -> str:
    """Return the largest of ``LLAMAS`` that one rank can train in so many bytes of free memory.

    Raises:
        SystemExit: Not even the smallest fits.
    """
    for name in LLAMAS:
        needed = MEMORY[back_end, upcast].needed(SHAPES[name])
        if needed <= free:
            return name
    raise SystemExit(
        f"{back_end}: {LLAMAS[-1]} needs {needed / 2**30:.0f} GiB; {free / 2**30:.0f} GiB are free"
    )


@dataclass
class Prepared:
    """What accelerate has made ready for training."""

    accelerator: Any
    model: Any
    optimizer: Any
    parameters: int


def one_rank() -> None:
    """Make this process the only rank, unless torchrun has made it one of several."""
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"


def prepare(
    back_end: str,
    shape: Shape,
    device: str,
    batch: int,
    rate: float,
    *,
    upcast: bool,
    recompute: bool,
) -> Prepared:
    """Make the model, with random weights, and its optimizer, and prepare both.

    Args:
        back_end: One of ``BACK_ENDS``.
        shape: The model.
        device: ``cuda`` or ``cpu``.
        batch: Sequences a step and rank.
        rate: The learning rate.
        upcast: Whether the optimizer updates float32 copies.
        recompute: Whether blocks are computed again in the backward pass.
    """
    one_rank()
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import torch
    from accelerate import Accelerator
    from transformers import LlamaConfig, LlamaForCausalLM

    from pytest_distcompat.drivers.accelerate import on_cpu

    settings = _settings(back_end, batch, upcast=upcast)
    if device == "cpu":
        settings |= on_cpu(settings)
    accelerator = Accelerator(**settings)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=8192,
        use_cache=False,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        # At once on the device: 7 billion random numbers take a CPU minutes.
        with accelerator.device:
            model: Any = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    if back_end == "ddp" and upcast:
        # Not made in float32: the same seed draws other numbers there.
        model.float()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # Fused: the other forms make temporary copies as large as the model.
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    return Prepared(accelerator, model, optimizer, parameters)


def _settings(back_end: str, batch: int, *, upcast: bool) -> dict[str, Any]:
    """Return the arguments of Accelerator."""
    if back_end == "ddp":
        return {"mixed_precision": "bf16"}
    if back_end == "fsdp2":
        from accelerate import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,
        )
        return {"mixed_precision": "bf16" if upcast else "no", "fsdp_plugin": plugin}
    import deepspeed  # noqa: F401 - without_shared_memory patches it
    from accelerate import DeepSpeedPlugin

    from pytest_distcompat.launch.deepspeed_cpu import without_shared_memory

    without_shared_memory()
    low = {} if upcast else {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    ours = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": MAX_NORM,
        "zero_optimization": {"stage": int(back_end.removeprefix("zero"))},
        "bf16": {"enabled": True, **low},
        # torch's AdamW, as under the other back ends; DeepSpeed's own would be compiled first.
        "zero_allow_untested_optimizer": True,
    }
    return {"mixed_precision": "bf16", "deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=ours)}


def step(prepared: Prepared, tokens: Any) -> Any:
    """Take one step on these tokens, and return the loss without waiting for it."""
    loss = prepared.model(input_ids=tokens, labels=tokens).loss
    prepared.accelerator.backward(loss)
    prepared.accelerator.clip_grad_norm_(prepared.model.parameters(), MAX_NORM)
    prepared.optimizer.step()
    prepared.optimizer.zero_grad()
    return loss.detach()


def dtypes(prepared: Prepared) -> dict[str, str]:
    """Return the dtypes of the stored parameters, of what the optimizer updates, and of its moments, after a step."""
    optimizer = prepared.optimizer.optimizer
    # DeepSpeed's optimizer has torch's inside, whose state is of flat partitions.
    states = getattr(optimizer, "optimizer", optimizer).state
    found = {
        "stored": {parameter.dtype for parameter in prepared.model.parameters()},
        "masters": {updated.dtype for updated in states},
        "moments": {state["exp_avg"].dtype for state in states.values() if "exp_avg" in state},
    }
    return {
        name: ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        for name, kinds in found.items()
    }

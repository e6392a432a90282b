"""Tiny models that are transformers' LlamaForCausalLM, of about 25 thousand parameters.

They are the values ``llama``, ``llama_tied`` (input and output embeddings are one parameter),
``llama_dropout`` and ``llama_calibrated`` (with extra state, ``_calibrated.py``) of option
``model`` of a cell, one configuration under test, as ``fsdp2-fp32-w2-model_llama_tied``; where
transformers is installed ``llama`` is the default. An entry point names this module; the registry
``models.MODELS`` collects its four ``TinyModel`` objects. A ``TinyModel`` is a set of functions
that a driver calls on each rank: to make the model, its batches, its loss. The same step and rank
give the same batch in every process.

A Llama can also be split: ``_TP_PLAN`` says how tensor parallelism splits its layers, ``_STAGES``
how pipeline parallelism does.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pytest_distcompat.models import Stages, TinyModel, prompt_length

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.models import Batch

#: How many tokens there are, and the size of hidden states.
VOCABULARY, HIDDEN = 128, 32
#: Rows of a batch, and tokens of a row.
ROWS, TOKENS = 2, 16


def _config(*, tied: bool = False) -> Any:
    """Return the config of a tiny Llama; see ``_llama`` for the argument."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        use_cache=False,
    )


def _make(*, tied: bool, dropout: float) -> Module:
    """Return the model in float32; see ``_llama`` for the arguments."""
    import torch
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM(_config(tied=tied)).float()
    if dropout:
        for layer in model.model.layers:
            layer.mlp.dropout = torch.nn.Dropout(dropout)
            layer.mlp.register_forward_hook(_drop)
    return cast("Module", model)


def _make_calibrated() -> Module:
    """Return a model with extra state, in float32."""
    from pytest_distcompat.ext.upstream.models._calibrated import (
        CalibratedLlamaForCausalLM,
        calibrate,
    )

    model: Any = CalibratedLlamaForCausalLM(_config()).float()
    calibrate(model)
    return cast("Module", model)


def _drop(module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Drop some of what an MLP adds to the residual stream.

    It is a forward hook: a Llama has dropout in its attention alone.
    """
    dropped: torch.Tensor = module.dropout(output)
    return dropped


def _batch(step: int, rank: int) -> Batch:
    """Return two rows of 16 tokens.

    How many of them are trained on differs between ranks and between batches.
    """
    import torch

    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator)
    labels = tokens.clone()
    # -100 marks tokens that are not trained on: the first 0 to 13 of each row, as many as
    # ``prompt_length`` returns for the step and rank.
    labels[:, : prompt_length(step, rank)] = -100
    return {"input_ids": tokens, "labels": labels}


def _count(batch: Batch) -> int:
    """Return how many tokens are trained on.

    A causal model predicts the next token, so the first label is not used.
    """
    predicted = batch["labels"][:, 1:]
    return int((predicted != -100).sum())


def _outputs(model: Module, batch: Batch) -> torch.Tensor:
    """Return the logits: (rows, tokens, vocabulary)."""
    logits: torch.Tensor = model(input_ids=batch["input_ids"]).logits
    return logits


def _reload(directory: Path) -> Module:
    """Load an exported model as users do."""
    from transformers import AutoModelForCausalLM

    model: Module = AutoModelForCausalLM.from_pretrained(directory)
    return model


def _reload_calibrated(directory: Path) -> Module:
    """Load an exported model with extra state."""
    from pytest_distcompat.ext.upstream.models._calibrated import CalibratedLlamaForCausalLM

    model: Module = CalibratedLlamaForCausalLM.from_pretrained(directory)
    return model


def _loss(model: Module, batch: Batch) -> torch.Tensor:
    """Return the model's own loss: the mean over tokens."""
    loss: torch.Tensor = model(**batch).loss
    return loss


#: Modules that the fork server imports, from which ranks are forked. The last one compiles
#: transformers' patterns of parameter names, so that ranks need not.
_PRELOAD = (
    "transformers",
    "transformers.models.llama.modeling_llama",
    "pytest_distcompat.ext.upstream.models._checkpoint_names",
)


#: Name of a module -> how tensor parallelism splits it. ``colwise`` and ``rowwise`` split a weight
#: by output and by input, as transformers has it (``LlamaConfig.base_model_tp_plan``). The others
#: are for sequence parallelism: at ``sequence`` the hidden states are split, a ``norm`` works on a
#: part, and ``gather`` makes them whole again (``gather:KEYWORD``: that argument).
_TP_PLAN = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "model.layers.0": "sequence",
    "model.layers.*.input_layernorm": "norm",
    "model.layers.*.post_attention_layernorm": "norm",
    "model.norm": "norm",
    "model.layers.*.self_attn": "gather:hidden_states",
    "model.layers.*.mlp": "gather",
}
#: The embeddings, a part of the plan where they are not tied: torch would make two parameters of
#: one that is. ``_split`` splits the input first, and ``_gather`` makes the output whole.
_EMBEDDINGS = {"model.embed_tokens": "rowwise_split", "lm_head": "colwise_gather"}


def _forward(model: Any, received: torch.Tensor, *, first: bool, last: bool) -> torch.Tensor:
    """Return what a stage of the pipeline sends on; the last one returns logits.

    Args:
        model: The model with the modules of the stage.
        received: Tokens (rows, tokens), or hidden states (rows, tokens, hidden size).
        first: Whether it is the first stage, which gets tokens.
        last: Whether it is the last one. The others return hidden states.
    """
    argument = "input_ids" if first else "inputs_embeds"
    inputs = {argument: received}
    if last:
        # Not ``model(...)``: the stage's own ``forward`` is this function.
        logits: torch.Tensor = type(model).forward(model, **inputs).logits
        return logits
    hidden: torch.Tensor = model.model(**inputs).last_hidden_state
    return hidden


def _loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of the last stage's logits: the mean over tokens."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    loss: torch.Tensor = ForCausalLMLoss(logits, labels, VOCABULARY)
    return loss


def _shapes(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tensors like the tokens, the hidden states and the logits of a batch.

    torch allocates the messages between stages after their shape and dtype.
    """
    tokens = batch["input_ids"]
    dtype = next(model.parameters()).dtype
    hidden = tokens.new_empty(*tokens.shape, HIDDEN, dtype=dtype)
    logits = tokens.new_empty(*tokens.shape, VOCABULARY, dtype=dtype)
    return tokens, hidden.requires_grad_(), logits.requires_grad_()


#: As torchtitan cuts it: embeddings go with the first layers, norm and head with the last.
_STAGES = Stages(
    parts=(
        ("model.embed_tokens",),
        ("model.layers.0",),
        ("model.layers.1",),
        ("model.norm", "lm_head"),
    ),
    forward=_forward,
    loss=_loss_of,
    shapes=_shapes,
)


def _llama(name: str, order: int, *, tied: bool = False, dropout: float = 0.0) -> TinyModel:
    """Return a tiny Llama.

    Args:
        name: The value of option ``model``.
        order: Where the model stands in lists.
        tied: Whether input and output embeddings are one parameter.
        dropout: Probability with which elements of each MLP's output are dropped.
    """
    tp_plan: dict[str, str] = {**_TP_PLAN, **_EMBEDDINGS}
    stages: Stages | None = _STAGES
    if tied:
        tp_plan = _TP_PLAN
        # The first stage of a pipeline needs the embeddings, and so does the last.
        stages = None
    return TinyModel(
        name=name,
        # The class of the modules that FSDP wraps one by one.
        blocks=("LlamaDecoderLayer",),
        make=functools.partial(_make, tied=tied, dropout=dropout),
        batch=_batch,
        loss=_loss,
        count=_count,
        outputs=_outputs,
        reload=_reload,
        # What option ``frozen`` freezes, and what option ``lora`` adapts.
        frozen_modules=("model.embed_tokens", "model.layers.0"),
        lora_targets=("q_proj", "v_proj"),
        # How many parameters make an FSDP unit where the wrap policy goes by size.
        unit_size=5000,
        tp_plan=tp_plan,
        stages=stages,
        # Whether the forward pass draws random numbers.
        random=dropout > 0,
        preload=_PRELOAD,
        order=order,
    )


LLAMA = _llama("llama", 0)
LLAMA_TIED = _llama("llama_tied", 1, tied=True)
LLAMA_DROPOUT = _llama("llama_dropout", 8, dropout=0.25)
LLAMA_CALIBRATED = dataclasses.replace(
    LLAMA,
    name="llama_calibrated",
    make=_make_calibrated,
    reload=_reload_calibrated,
    # Neither tensor nor pipeline parallelism is tried with it.
    tp_plan={},
    stages=None,
    extra_state=True,
    order=8,
)

"""LlamaForCausalLM of about 25 thousand parameters, with untied and with tied output embeddings, and with dropout."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_distcompat.models._base import Stages, TinyModel

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.models._base import Batch

VOCABULARY, HIDDEN = 128, 32
#: Names of the models below.
LLAMAS = ("llama", "llama_tied", "llama_dropout")


def _make(*, tied: bool, dropout: float) -> Module:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
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
    model: Any = LlamaForCausalLM(config).float()
    if dropout:
        for layer in model.model.layers:
            layer.mlp.dropout = torch.nn.Dropout(dropout)
            layer.mlp.register_forward_hook(_drop)
    found: Module = model
    return found


def _drop(module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Drop some of what a layer adds to the residual stream: a Llama has dropout in its attention alone."""
    dropped: torch.Tensor = module.dropout(output)
    return dropped


def _batch(step: int, rank: int) -> Batch:
    """Return two rows of 16 tokens; how many of them are trained on differs between ranks and between batches."""
    # Equal numbers would hide a trainer that averages averages (https://github.com/huggingface/transformers/pull/34191).
    import torch

    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, VOCABULARY, (2, 16), generator=generator)
    labels = tokens.clone()
    labels[:, : (0, 13, 6, 10, 3)[(step + 2 * rank) % 5]] = -100
    return {"input_ids": tokens, "labels": labels}


def _count(batch: Batch) -> int:
    """Return how many tokens are trained on; a causal model predicts the next token, so the first label is not used."""
    return int((batch["labels"][:, 1:] != -100).sum())


def _outputs(model: Module, batch: Batch) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=batch["input_ids"]).logits
    return logits


def _reload(directory: Path) -> Module:
    from transformers import AutoModelForCausalLM

    model: Module = AutoModelForCausalLM.from_pretrained(directory)
    return model


def _loss(model: Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


_PRELOAD = (
    "transformers",
    "transformers.models.llama.modeling_llama",
    "pytest_distcompat.models._checkpoint_names",
)


#: As transformers has it (``LlamaConfig.base_model_tp_plan``), with the embeddings, and what sequence parallelism needs.
_TP_PLAN = {
    **dict.fromkeys((f"model.layers.*.self_attn.{name}_proj" for name in "qkv"), "colwise"),
    **dict.fromkeys(("model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"), "colwise"),
    **dict.fromkeys(("model.layers.*.self_attn.o_proj", "model.layers.*.mlp.down_proj"), "rowwise"),
    "model.layers.0": "sequence",
    **dict.fromkeys(
        ("model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm", "model.norm"), "norm"
    ),
    "model.layers.*.self_attn": "gather:hidden_states",
    "model.layers.*.mlp": "gather",
}
#: Without those that are tied: torch would make two parameters of one.
_EMBEDDINGS = {"model.embed_tokens": "rowwise_split", "lm_head": "colwise_gather"}


def _forward(model: Any, received: torch.Tensor, *, first: bool, last: bool) -> torch.Tensor:
    inputs = {"input_ids" if first else "inputs_embeds": received}
    found: torch.Tensor = (
        type(model).forward(model, **inputs).logits if last else model.model(**inputs).last_hidden_state
    )
    return found


def _loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    from transformers.loss.loss_utils import ForCausalLMLoss

    loss: torch.Tensor = ForCausalLMLoss(logits, labels, VOCABULARY)
    return loss


def _shapes(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, dtype = batch["input_ids"], next(model.parameters()).dtype
    hidden, logits = (tokens.new_empty(*tokens.shape, size, dtype=dtype) for size in (HIDDEN, VOCABULARY))
    return tokens, hidden.requires_grad_(), logits.requires_grad_()


#: As torchtitan cuts it: embeddings go with the first layers, norm and head with the last.
_STAGES = Stages(
    (("model.embed_tokens",), ("model.layers.0",), ("model.layers.1",), ("model.norm", "lm_head")),
    _forward,
    _loss_of,
    _shapes,
)


def _llama(name: str, order: int, *, tied: bool = False, dropout: float = 0.0) -> TinyModel:
    return TinyModel(
        name,
        ("LlamaDecoderLayer",),
        functools.partial(_make, tied=tied, dropout=dropout),
        _batch,
        _loss,
        _count,
        _outputs,
        _reload,
        frozen_modules=("model.embed_tokens", "model.layers.0"),
        lora_targets=("q_proj", "v_proj"),
        unit_size=5000,
        tp_plan=_TP_PLAN if tied else {**_TP_PLAN, **_EMBEDDINGS},
        # Tied ones are in the first stage and in the last.
        stages=None if tied else _STAGES,
        random=dropout > 0,
        preload=_PRELOAD,
        order=order,
    )


LLAMA = _llama("llama", 0)
LLAMA_TIED = _llama("llama_tied", 1, tied=True)
LLAMA_DROPOUT = _llama("llama_dropout", 8, dropout=0.25)

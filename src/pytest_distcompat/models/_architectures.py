"""Any architecture of transformers as a tiny model: ``hf:MODEL_TYPE``, made from its own config class without a download."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_distcompat.models._base import TinyModel
from pytest_distcompat.models._blank import BLANK, FIXED

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.models._base import Batch

PREFIX = "hf:"
VOCABULARY = 128
#: Pattern of a field's whole name -> its value. The first that matches decides.
RULES: tuple[tuple[str, int], ...] = (
    (r".*vocab_size.*", VOCABULARY),
    (r"(.*_)?(num|n)_(hidden_|decoder_|encoder_)?layers?|(encoder|decoder)_layers|n_layer|depth|num_blocks", 2),
    (r"(num|n)_(experts|routed_experts|local_experts)|moe_num_experts", 4),
    (r"num_experts_per_tok|moe_k|moe_top_?k|num_selected_experts|top_k_experts", 2),
    (r"n_group|topk_group|n_groups|mamba_n_groups", 1),
    (r"(.*_)?(num_key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num)", 2),
    (r"(.*_)?(num_attention_heads|attention_heads|n_heads?|num_heads)", 4),
    (r"(qk_nope_|qk_rope_|v_|global_|swa_|attention_)?head_dim|d_kv", 8),
    (r"(kv|q)_lora_rank", 16),
    (
        r"dim|(.*_)?(hidden_size|d_model|n_embd|emb_dim|embedding_size|hidden_dim|embed_dim|word_embed_proj_dim|model_dim)",
        32,
    ),
    (r"(.*_)?(intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden_size|intermediate_dim|dim_ff)", 64),
    (r"(.*_)?(max_position_embeddings|n_positions|max_target_positions|max_source_positions|seq_length|n_ctx)", 64),
    (r"rotary_dim", 4),
    (r"(sliding_window|attention_window|window_size|local_window)", 8),
    (r"first_k_dense_replace|num_dense_layers|num_nextn_predict_layers", 1),
)
#: Task -> (transformers' table of the task's model types, its auto class, config values). The first that has a type decides.
TASKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "causal_lm": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "AutoModelForCausalLM", {}),
    "seq2seq": (
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        "AutoModelForSeq2SeqLM",
        {"decoder_start_token_id": 0, "pad_token_id": 0},
    ),
    "masked_lm": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "AutoModelForMaskedLM", {}),
    "vision": (
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
        "AutoModelForImageClassification",
        {"image_size": 32, "patch_size": 8, "num_labels": 5},
    ),
    "speech": (
        "MODEL_FOR_CTC_MAPPING_NAMES",
        "AutoModelForCTC",
        {
            "conv_dim": (32,) * 7,
            "ctc_loss_reduction": "mean",
            "num_conv_pos_embeddings": 16,
            "apply_spec_augment": False,
        },
    ),
}
#: One model type of each task but causal language models, which the profile ``zoo`` takes all of.
OF_OTHER_TASKS = ("t5", "distilbert", "vit", "wav2vec2")
UNKNOWN = f"the installed transformers has no such model type for any of the tasks {', '.join(TASKS)}"


def _source(*parts: str) -> Path | None:
    """Return the path of a file below transformers' ``models``; None where transformers is not installed."""
    spec = importlib.util.find_spec("transformers")
    return Path(spec.origin).parent.joinpath("models", *parts) if spec and spec.origin else None


@functools.cache
def _tables() -> dict[str, tuple[str, ...]]:
    """Return the model types of each task, read from transformers' source: importing it would import torch."""
    source = _source("auto", "modeling_auto.py")
    if source is None:
        return {}
    wanted = {table: task for task, (table, _, _) in TASKS.items()}
    found = {}
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        name = getattr(target, "id", "")
        if name in wanted and isinstance(call := getattr(node, "value", None), ast.Call):
            found[wanted[name]] = tuple(sorted(dict(ast.literal_eval(call.args[0]))))
    return found


@functools.cache
def _found(model_type: str) -> tuple[str, str]:
    """Return transformers' spelling of a model type, in which an id cannot have hyphens, and its task; empty if unknown."""
    for task in TASKS:
        for name in _tables().get(task, ()):
            if name.replace("-", "_") == model_type:
                return name, task
    return "", ""


def architectures() -> tuple[str, ...]:
    """Return the names of the models of the profile ``zoo``: all causal language models, and one of each other task."""
    return tuple(f"{PREFIX}{name.replace('-', '_')}" for name in (*_tables().get("causal_lm", ()), *OF_OTHER_TASKS))


def small_config(model_type: str) -> Any:
    """Return the small config of an architecture."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    name, task = _found(model_type)
    kind = CONFIG_MAPPING[name]
    return kind(**{**_small(kind().to_dict()), **TASKS[task][2], **FIXED.get(model_type, {})})


def _small(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config that change, with their small values."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        rule = next((small for pattern, small in RULES if re.fullmatch(pattern, name)), None)
        if isinstance(value, Mapping) and "model_type" in value:
            found[name] = {"model_type": value["model_type"], **_small(value)}
        elif name == "use_cache":
            found[name] = False
        elif isinstance(value, float) and re.search("dropout|drop_|pdrop|layerdrop|jitter|mask_.*prob", name):
            found[name] = 0.0
        elif (
            isinstance(value, int)
            and not isinstance(value, bool)
            and name.endswith("_token_id")
            and value >= VOCABULARY
        ):
            found[name] = 1
        elif value is None and name in {"head_dim", "num_key_value_heads"}:
            found[name] = 8 if name == "head_dim" else 4
        elif isinstance(value, int) and not isinstance(value, bool) and rule is not None and rule < value:
            found[name] = rule
    if "kv_lora_rank" in fields:
        # Latent attention has keys for every head.
        found["num_key_value_heads"] = 4
    return found


def _auto_class(model_type: str) -> Any:
    import transformers

    return getattr(transformers, TASKS[_found(model_type)[1]][1])


def _make(model_type: str) -> Module:
    model: Module = _auto_class(model_type).from_config(small_config(model_type)).float()
    return model


def _without_values(model_type: str) -> Any:
    import torch

    with torch.device("meta"):
        return _auto_class(model_type).from_config(small_config(model_type))


def _blocks(model_type: str) -> tuple[str, ...]:
    """Return the class names that the model declares as blocks and has."""
    model = _without_values(model_type)
    present = {type(module).__name__ for module in model.modules()}
    return tuple(sorted(present & set(model._no_split_modules or ())))  # noqa: SLF001 - accelerate and Trainer read it too


def _batch(model_type: str, step: int, rank: int) -> Batch:
    """Return two rows; how many tokens are trained on differs between ranks and between batches."""
    import torch

    task = _found(model_type)[1]
    generator = torch.Generator().manual_seed(1000 * step + rank)
    if task == "vision":
        labels = torch.randint(0, 5, (2,), generator=generator)
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator), "labels": labels}
    if task == "speech":
        labels = torch.randint(1, 30, (2, 3), generator=generator)
        return {"input_values": torch.randn(2, 4000, generator=generator), "labels": labels}
    tokens = torch.randint(4, VOCABULARY, (2, 16), generator=generator)
    labels = tokens.clone()
    labels[:, : (0, 13, 6, 10, 3)[(step + 2 * rank) % 5]] = -100
    return {"input_ids": tokens, "labels": labels}


def _loss(model: Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def _count(model_type: str, batch: Batch) -> int:
    labels = batch["labels"]
    task = _found(model_type)[1]
    if task in {"vision", "speech"}:
        return len(labels)
    return int(((labels[:, 1:] if task == "causal_lm" else labels) != -100).sum())


def _outputs(model: Module, batch: Batch) -> torch.Tensor:
    logits: torch.Tensor = model(**batch).logits
    return logits


def _reload(model_type: str, directory: Path) -> Module:
    # Not by the auto class, which does not know the config of some text models that it has made itself.
    model: Module = type(_without_values(model_type)).from_pretrained(directory)
    return model


def _module(model_type: str) -> tuple[str, ...]:
    """Return the name of the architecture's module, if it is where most are."""
    source = _source(model_type, f"modeling_{model_type}.py")
    return (f"transformers.models.{model_type}.modeling_{model_type}",) if source and source.exists() else ()


@functools.cache
def architecture(name: str) -> TinyModel:
    """Return the tiny model of ``hf:MODEL_TYPE``. Nothing is imported before one of its functions is called."""
    model_type = name.removeprefix(PREFIX)

    def bound(function: Any) -> Any:
        return functools.partial(function, model_type)

    return TinyModel(
        name,
        (),
        bound(_make),
        bound(_batch),
        _loss,
        bound(_count),
        _outputs,
        bound(_reload),
        find_blocks=bound(_blocks),
        in_8_bits=False,
        # 1.3e-3 measured in fp32 after four steps, of Gemma 4, whose gradients agree in the first three.
        norm_spread=10.0,
        unsupported_reason=BLANK.get(model_type, "") or ("" if _found(model_type)[0] else UNKNOWN),
        preload=("transformers", *_module(model_type)),
    )

"""Any architecture of transformers as a tiny model: ``hf:MODEL_TYPE`` or ``hf:CLASS``, from its config without a download."""

from __future__ import annotations

import ast
import copy
import functools
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_distcompat.models._base import TinyModel
from pytest_distcompat.models._blank import BLANK, BLANK_TASKS, FIXED
from pytest_distcompat.models._inputs import (
    CLASSES,
    LABELS_OF_ROWS,
    LABELS_OF_TOKENS,
    OTHER_LABELS,
    ROWS,
    VOCABULARY,
    batch_of,
    loss_to_targets,
    tensors,
)

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.models._base import Batch

PREFIX = "hf:"
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
#: Further rules for other tasks than causal language models, whose fields may hold a list, a size for each stage.
RULES_OF_TASKS: tuple[tuple[str, int], ...] = (
    (r".*image_size|.*input_size", 32),
    (r".*patch_size", 8),
    (r".*(mel_bins|n_mels?)|feature_size|num_conv_pos_embeddings|num_pos_feats", 16),
    (r".*(depths|num_blocks|num_layers)", 1),
    (r".*num_frames", 4),
    (r".*num_queries|max_text_length", 8),
    (r"max_2d_position_embeddings|num_hash_buckets", 64),
    (
        r"(.*_)?(hidden_size|dim|units|channels|feature_size)s?|encoder_ffn_dim|embed_dims|out_features",
        32,
    ),
)
#: Field -> its value for every task but causal language models.
VALUES: dict[str, Any] = {"ctc_loss_reduction": "mean", "apply_spec_augment": False}
CAUSAL = "causal_lm"
#: The tasks that ``hf:MODEL_TYPE`` is looked for in first, then transformers' others in its order.
FIRST = (CAUSAL, "seq_to_seq_causal_lm", "masked_lm", "image_classification", "ctc")
UNKNOWN = "the installed transformers has no such model type for any task, and no such class"


def _source(*parts: str) -> Path | None:
    """Return the path of a file below transformers' ``models``; None where transformers is not installed."""
    spec = importlib.util.find_spec("transformers")
    return Path(spec.origin).parent.joinpath("models", *parts) if spec and spec.origin else None


@functools.cache
def _tables() -> dict[str, dict[str, str]]:
    """Return the class of each model type, by task, read from transformers' source: importing it would import torch."""
    source = _source("auto", "modeling_auto.py")
    if source is None:
        return {}
    found = {}
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        task = re.fullmatch(r"MODEL_FOR_(\w+?)(_MAPPING)?_NAMES", getattr(target, "id", ""))
        if task and isinstance(call := getattr(node, "value", None), ast.Call) and isinstance(call.args[0], ast.List):
            # What a table takes from another one is in that one.
            pairs = (ast.literal_eval(one) for one in call.args[0].elts if not isinstance(one, ast.Starred))
            found[task[1].lower()] = {name: kind if isinstance(kind, str) else kind[0] for name, kind in pairs}
    return {**{task: found[task] for task in FIRST if task in found}, **found}


@functools.cache
def _found(model: str) -> tuple[str, str, str]:
    """Return the model type, as transformers spells it (an id has no hyphens), task and class of a model; empty if unknown."""
    for task, types in _tables().items():
        for name, kind in types.items():
            if model in {name.replace("-", "_"), kind}:
                return name, task, kind
    return "", "", ""


def of_tasks() -> dict[str, str]:
    """Return the class that the profile ``zoo`` trains for each task but causal language models; empty if it can train none.

    It is the first one of transformers' table that has no reason in BLANK, if possible of a model type that no other task has.
    """
    found, taken = {}, set(_tables().get(CAUSAL, ()))
    for task, types in _tables().items():
        able = {
            name: kind
            for name, kind in types.items()
            if not {name.replace("-", "_"), kind} & BLANK.keys() and task not in BLANK_TASKS
        }
        if task != CAUSAL:
            name = next((name for name in able if name not in taken), next(iter(able), ""))
            found[task] = able.get(name, "")
            taken.add(name)
    return found


def architectures() -> tuple[str, ...]:
    """Return the names of the models of the profile ``zoo``: all causal language models, and one of each other task."""
    causal = (name.replace("-", "_") for name in sorted(_tables().get(CAUSAL, ())))
    return tuple(f"{PREFIX}{name}" for name in dict.fromkeys((*causal, *filter(None, of_tasks().values()))))


def small_config(model: str) -> Any:
    """Return the small config of an architecture."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    name, task, _ = _found(model)
    kind = CONFIG_MAPPING[name]
    labels = {"num_labels": CLASSES} if re.search("classification|segmentation", task) else {}
    fields = kind().to_dict()
    small = _small(fields, RULES if task == CAUSAL else (*RULES, *RULES_OF_TASKS))
    # T5 has no such field.
    labels |= {"decoder_start_token_id": 0} if task != CAUSAL and fields.get("is_encoder_decoder") else {}
    return kind(**{**small, **labels, **FIXED.get(name.replace("-", "_"), {})})


def _small(fields: Mapping[str, Any], rules: tuple[tuple[str, int], ...]) -> dict[str, Any]:
    """Return the fields of a config that change, with their small values."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        rule = next((small for pattern, small in rules if re.fullmatch(pattern, name)), None)
        if isinstance(value, Mapping) and "model_type" in value:
            found[name] = {"model_type": value["model_type"], **_small(value, rules)}
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
        elif (
            rules is not RULES and rule and isinstance(value, (list, tuple)) and all(type(one) is int for one in value)
        ):
            # As many heads as divide a size that is a power of 2.
            found[name] = [min(one, rule) if "heads" not in name else 2 if one > 1 else 1 for one in value]
    if "kv_lora_rank" in fields:
        # Latent attention has keys for every head.
        found["num_key_value_heads"] = 4
    if rules is not RULES:
        found |= {name: value for name, value in VALUES.items() if name in fields}
        found |= _stages(fields)
    return found


def _stages(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the last stages of a small backbone, as many as its outputs are taken of, and no more layers than these need."""
    named = fields.get("out_features") or ()
    if "num_hidden_layers" not in fields or not named:
        return {"out_features": named} if named else {}
    layers = max(2, len(named))
    stages = [f"stage{number}" for number in range(layers - len(named) + 1, layers + 1)]
    return {"num_hidden_layers": layers, "out_features": stages}


@functools.cache
def _kind(model: str) -> Any:
    import transformers

    return getattr(transformers, _found(model)[2])


@functools.cache
def _config(model: str) -> Any:
    """Return the small config that the model's class takes, which may be that of a part of its model type's."""
    config, wanted = small_config(model), _kind(model).config_class
    if wanted is None or isinstance(config, wanted):
        return config
    return next((part for part in vars(config).values() if isinstance(part, wanted)), config)


def _make(model: str) -> Module:
    made: Module = _kind(model)(copy.deepcopy(_config(model))).float()
    return made


def _without_values(model: str) -> Any:
    import torch

    with torch.device("meta"):
        return _make(model)


def _blocks(model: str) -> tuple[str, ...]:
    """Return the class names that the model declares as blocks and has."""
    made = _without_values(model)
    present = {type(module).__name__ for module in made.modules()}
    return tuple(sorted(present & set(made._no_split_modules or ())))  # noqa: SLF001 - accelerate and Trainer read it too


def _batch(model: str, step: int, rank: int) -> Batch:
    return batch_of(_kind(model), _config(model), _found(model)[1], step, rank)


def _loss(model: Module, batch: Batch) -> torch.Tensor:
    """Return the model's own loss; of one that has none for these inputs, that of its outputs to fixed targets."""
    outputs = model(**batch)
    loss: torch.Tensor | None = outputs.get("loss")
    return loss_to_targets(outputs) if loss is None else loss


def _count(model: str, batch: Batch) -> int:
    task, labels = _found(model)[1], batch.get("labels")
    if labels is None or not re.fullmatch(LABELS_OF_TOKENS, task):
        return ROWS
    return int(((labels[:, 1:] if task == CAUSAL else labels) != -100).sum())


def _outputs(model: Module, batch: Batch) -> torch.Tensor:
    outputs = model(**batch)
    logits: torch.Tensor | None = outputs.get("logits")
    return next(tensors(outputs)) if logits is None else logits


def _reload(model: str, directory: Path) -> Module:
    # Not by the auto class, which does not know the config of some text models that it has made itself.
    made: Module = _kind(model).from_pretrained(directory)
    return made


@functools.cache
def _written_names(model: str) -> tuple[str, ...]:
    """Return the names in the files of ``save_pretrained``, as on the Hub; nothing if they are the model's own."""
    import tempfile

    import torch
    from safetensors import safe_open

    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as directory:
        made: Any = _make(model)
        made.save_pretrained(directory)
        with safe_open(Path(directory, "model.safetensors"), "pt") as file:
            names = tuple(file.keys())
    return () if {*names} <= {*made.state_dict()} else names


def _module(model: str) -> tuple[str, ...]:
    """Return the name of the architecture's module, if it is where most are."""
    model_type = _found(model)[0].replace("-", "_")
    source = _source(model_type, f"modeling_{model_type}.py")
    return (f"transformers.models.{model_type}.modeling_{model_type}",) if source and source.exists() else ()


def _reason(model: str) -> str:
    """Return why there is no tiny model of that model type or class; empty if there is."""
    name, task, kind = _found(model)
    own = (BLANK.get(one, "") for one in (model, name.replace("-", "_"), kind))
    return next(filter(None, own), BLANK_TASKS.get(task, "")) if name else UNKNOWN


@functools.cache
def architecture(name: str) -> TinyModel:
    """Return the tiny model of ``hf:MODEL_TYPE`` or ``hf:CLASS``. Nothing is imported before one of its functions is called."""
    model = name.removeprefix(PREFIX)

    def bound(function: Any) -> Any:
        return functools.partial(function, model)

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
        # Some have parameters that no output of their task needs.
        unused=True,
        written_names=bound(_written_names),
        without_loss=not re.fullmatch(f"{LABELS_OF_TOKENS}|{LABELS_OF_ROWS}|{OTHER_LABELS}", _found(model)[1]),
        unsupported_reason=_reason(model),
        preload=("transformers", *_module(model)),
    )

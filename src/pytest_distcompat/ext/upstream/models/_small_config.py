"""Small configs of transformers' architectures, by rules about the names of their fields.

``_architectures.py`` calls ``small_config("gpt2")`` on a rank, to make a tiny model of an
architecture without a download. The defaults of its config are those of a large model. Each field
is looked up in rules (pattern of the name, largest value); the first rule that matches limits the
field: ``n_layer`` becomes 2, ``n_embd`` 32. Fields without a rule keep their value, dropout becomes
0, and a config within the config, as of the text model of an image-text model, is made small in the
same way. What no rule can say is in ``_unsupported.FIXED``.

Tasks other than causal language models (image, sound) need more rules, and have fields with a list:
a size for each stage of a backbone, such as ``depths=[3, 4, 6, 3]``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_distcompat.ext.upstream.models._inputs import CLASSES, VOCABULARY
from pytest_distcompat.ext.upstream.models._tables import CAUSAL, entry_of
from pytest_distcompat.ext.upstream.models._unsupported import FIXED

#: Rules: (pattern of a config field's whole name, its largest value in a tiny model).
Rules = tuple[tuple[str, int], ...]
#: Rules for causal language models. The first that matches decides.
RULES: Rules = (
    (r".*vocab_size.*", VOCABULARY),
    (
        (
            r"(.*_)?(num|n)_(hidden_|decoder_|encoder_)?layers?|(encoder|decoder)_layers"
            r"|n_layer|depth|num_blocks"
        ),
        2,
    ),
    (r"(num|n)_(experts|routed_experts|local_experts)|moe_num_experts", 4),
    (r"num_experts_per_tok|moe_k|moe_top_?k|num_selected_experts|top_k_experts", 2),
    (r"n_group|topk_group|n_groups|mamba_n_groups", 1),
    (r"(.*_)?(num_key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num)", 2),
    (r"(.*_)?(num_attention_heads|attention_heads|n_heads?|num_heads)", 4),
    (r"(qk_nope_|qk_rope_|v_|global_|swa_|attention_)?head_dim|d_kv", 8),
    (r"(kv|q)_lora_rank", 16),
    (
        (
            r"dim|(.*_)?(hidden_size|d_model|n_embd|emb_dim|embedding_size|hidden_dim|embed_dim"
            r"|word_embed_proj_dim|model_dim)"
        ),
        32,
    ),
    (r"(.*_)?(intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden_size|intermediate_dim|dim_ff)", 64),
    (
        (
            r"(.*_)?(max_position_embeddings|n_positions|max_target_positions|max_source_positions"
            r"|seq_length|n_ctx)"
        ),
        64,
    ),
    (r"rotary_dim", 4),
    (r"(sliding_window|attention_window|window_size|local_window)", 8),
    (r"first_k_dense_replace|num_dense_layers|num_nextn_predict_layers", 1),
)
#: Further rules for other tasks than causal language models, whose fields may hold a list, a size
#: for each stage.
RULES_OF_TASKS: Rules = (
    (r".*image_size|.*input_size", 32),
    (r".*patch_size", 8),
    (r".*(mel_bins|n_mels?)|feature_size|num_conv_pos_embeddings|num_pos_feats", 16),
    (r".*(depths|num_blocks|num_layers)", 1),
    (r".*num_frames", 4),
    (r".*num_queries|max_text_length", 8),
    (r"max_2d_position_embeddings|num_hash_buckets", 64),
    (
        (
            r"(.*_)?(hidden_size|dim|units|channels|feature_size)s?"
            r"|encoder_ffn_dim|embed_dims|out_features"
        ),
        32,
    ),
)
#: Field -> its value for every task but causal language models.
VALUES: dict[str, Any] = {"ctc_loss_reduction": "mean", "apply_spec_augment": False}
#: Tasks for which causal models share the code of their head in transformers
#: (``GenericForSequenceClassification``, ``GenericForTokenClassification``).
TASKS_OF_HEADS = frozenset({"sequence_classification", "token_classification"})
#: Field -> its value where the default is None.
VALUES_OF_NONE = {"head_dim": 8, "num_key_value_heads": 4}
#: Pattern of fields with the probability of a random choice in the forward pass; it becomes 0.
RANDOM_CHOICES = "dropout|drop_|pdrop|layerdrop|jitter|mask_.*prob"


def small_config(model: str) -> Any:
    """Return the small config of an architecture.

    Args:
        model: Model type or class name: ``gpt2``, ``BertForMaskedLM``.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    entry = entry_of(model)
    config_class = CONFIG_MAPPING[entry.model_type]
    fields = config_class().to_dict()
    rules = RULES if entry.task == CAUSAL else RULES + RULES_OF_TASKS
    changes = _small(fields, rules)
    if re.search("classification|segmentation", entry.task):
        changes["num_labels"] = CLASSES
    if entry.task in TASKS_OF_HEADS:
        changes |= _head_of_causal_model(fields)
    if entry.task != CAUSAL and fields.get("is_encoder_decoder"):
        # T5 has no such field.
        changes["decoder_start_token_id"] = 0
    changes |= FIXED.get(entry.id, {})
    return config_class(**changes)


def _head_of_causal_model(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a causal model needs to classify, and that its config lacks.

    Its head drops activations by default: it would not train as one process does. And it takes the
    last token that is no padding, so that it refuses two rows without a padding token.
    """
    missing: dict[str, Any] = {}
    if fields.get("classifier_dropout") is None:
        missing["classifier_dropout"] = 0.0
    if "pad_token_id" in fields and fields["pad_token_id"] is None:
        missing["pad_token_id"] = 0
    return missing


def _small(fields: Mapping[str, Any], rules: Rules) -> dict[str, Any]:
    """Return the fields of a config that change, with their small values: ``{"n_layer": 2}``.

    Args:
        fields: The config as a dictionary.
        rules: The rules of the task.
    """
    changes: dict[str, Any] = {}
    for name, value in fields.items():
        # A config within the config.
        if isinstance(value, Mapping) and "model_type" in value:
            changes[name] = {"model_type": value["model_type"], **_small(value, rules)}
            continue
        small = _small_value(name, value, rules)
        if small is not None:
            changes[name] = small
    if "kv_lora_rank" in fields:
        # Latent attention has a key head for each attention head, and the rules leave 4 of these.
        changes["num_key_value_heads"] = 4
    # Other tasks than causal language models.
    if rules is not RULES:
        changes |= {name: value for name, value in VALUES.items() if name in fields}
        changes |= _stages(fields)
    return changes


def _small_value(name: str, value: Any, rules: Rules) -> Any:
    """Return the small value of a field; None if the field keeps its value."""
    if name == "use_cache":
        return False
    if value is None:
        return VALUES_OF_NONE.get(name)
    if isinstance(value, float) and re.search(RANDOM_CHOICES, name):
        return 0.0
    # A bool is an int too, but no size.
    if isinstance(value, int) and not isinstance(value, bool):
        return _small_int(name, value, rules)
    if rules is not RULES and isinstance(value, (list, tuple)):
        return _small_list(name, value, rules)
    return None


def _small_int(name: str, value: int, rules: Rules) -> int | None:
    """Return the small value of a field with a number; None if it keeps its value."""
    # A special token beyond the small vocabulary becomes token 1.
    if name.endswith("_token_id") and value >= VOCABULARY:
        return 1
    limit = _limit(name, rules)
    if limit is None or limit >= value:
        return None
    return limit


def _small_list(name: str, values: Sequence[Any], rules: Rules) -> list[int] | None:
    """Return the small sizes of the stages of a backbone; None for a list of anything else."""
    limit = _limit(name, rules)
    if limit is None:
        return None
    for value in values:
        # A bool is an int too.
        if type(value) is not int:
            return None
    if "heads" in name:
        # One or two heads, because they must divide the size of their stage, a power of 2.
        return [2 if value > 1 else 1 for value in values]
    return [min(value, limit) for value in values]


def _limit(name: str, rules: Rules) -> int | None:
    """Return the largest value of a field by the first rule that matches; None if none does."""
    for pattern, limit in rules:
        if re.fullmatch(pattern, name):
            return limit
    return None


def _stages(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that say of which stages of a backbone the outputs are taken.

    They are the last stages of a small backbone, as many as before: of three outputs of twelve
    layers it becomes ``{"num_hidden_layers": 3, "out_features": ["stage1", "stage2", "stage3"]}``.
    Empty for an architecture without such outputs.
    """
    output_stages = fields.get("out_features") or ()
    if not output_stages:
        return {}
    if "num_hidden_layers" not in fields:
        # A config within a config is made anew, of the returned fields alone: without this one it
        # would have the default of its own class.
        return {"out_features": output_stages}
    layers = max(2, len(output_stages))
    first = layers - len(output_stages) + 1
    stages = [f"stage{number}" for number in range(first, layers + 1)]
    return {"num_hidden_layers": layers, "out_features": stages}

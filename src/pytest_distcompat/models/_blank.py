"""Architectures of transformers that the rules of ``_architectures`` do not make small, and what they need instead."""

from __future__ import annotations

from typing import Any

#: Model type -> config values that no rule gives.
FIXED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 16},
    "minicpm3": {"dim_model_base": 32},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
}

_DEFAULTS = "no model can be made of its config's defaults, and these rules do not know which values it needs"
_LAYERS = "its config lists values for each of its many layers, so that two layers cannot be asked for by number"

#: Model type -> why there is no tiny model of it.
BLANK: dict[str, str] = {
    "bailing_hybrid": "its heads are cut from other sizes than those that the rules shrink",
    "blt": "its patcher is a second model, whose sizes depend on hash tables of the first",
    "cohere_compass_text": _LAYERS,
    "dbrx": _DEFAULTS,
    "dots1": _DEFAULTS,
    "dots3_note": _LAYERS,
    "gemma3n": "it needs timm and PIL for its vision tower",
    "gemma3n_text": _LAYERS,
    "gemma4_assistant": "it needs a second model, whose drafts it continues",
    "gemma4_unified_assistant": "it needs a second model, whose drafts it continues",
    "git": "it learns from images beside the text",
    "kimi_linear": "its experts are chosen from groups, of other sizes than those that the rules shrink",
    "musicgen": "the config of its decoder alone is no model type",
    "musicgen_melody": "the config of its decoder alone is no model type",
    "zamba": _LAYERS,
    "zamba2": _LAYERS,
}

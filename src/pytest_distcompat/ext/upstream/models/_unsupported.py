"""Architectures of transformers of which the rules make no tiny model, each with the reason.

Any architecture may be named in a cell, one configuration under test, as
``fsdp2-fp32-w2-model_hf:gpt2``. The rules of ``_small_config.py`` and ``_inputs.py`` make a tiny
model and its inputs. They fail for some architectures:

- ``FIXED`` has config values that a few need instead; ``small_config`` sets them.
- ``UNSUPPORTED`` and ``UNSUPPORTED_TASKS`` say why others are not trained. ``_tables.reason_of``
  reads them; the cell is skipped with this reason, and the documentation lists it.
"""

from __future__ import annotations

from typing import Any

#: Model type -> config values in place of those that rules or defaults give.
FIXED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    # Its files have query, key and value in one tensor, which it splits into thirds.
    "gradium_phonon_tts": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 16},
    "minicpm3": {"dim_model_base": 32},
    # With the weights that its default draws, a gradient nearly cancels in Trainer's second step.
    # Adam divides that gradient by its own size, so that rounding decides the update.
    "qwen3": {"initializer_range": 0.04},
    # Embeddings of pairs and triples of tokens, which its files have in parts. Their numbers have
    # one and two digits, by which files with more of them are sorted.
    "qwen4_exp_text": {"eos_token_id": 1, "ple_layer_ids": [1], "split_ngram_parts": 16},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "superpoint": {"keypoint_decoder_dim": 65},
    "xmod": {"default_language": "en_XX"},
}

# Reasons that several architectures share.
_DEFAULTS = (
    "no model can be made of its config's defaults, and these rules do not know which values it "
    "needs"
)
_LAYERS = (
    "its config lists values for each of its many layers, so that two layers cannot be asked for "
    "by number"
)

_ROUNDED = (
    "rounding decides: one bit of its gradients moves loss or norms by more than the tolerance"
)
_NOTHING_LEARNED = (
    "its gradients are zero from the second step on: neither rounding nor anything else shows"
)
_TIMM_OR_ROUNDING = f"in what is found {_ROUNDED}; or it needs timm"
_SCIPY_OR_ROUNDING = f"{_ROUNDED}; or it needs scipy"
_SIZES_OR_ROUNDING = f"{_ROUNDED}; or sizes follow from others"
_NO_SIZES = "its config has no default for sizes of its head"
_TIMM = "it needs timm"
_SIZES = "sizes of its parts follow from each other in ways that these rules do not know"
_CODES = (
    "its text needs a token for each feature of image or audio, and each counts them in its own way"
)

#: Model type or class -> why there is no tiny model of it, or none of that class.
UNSUPPORTED: dict[str, str] = {
    "Apertus1p5ForConditionalGeneration": _CODES,
    "AlignModel": _SIZES,
    "AriaForConditionalGeneration": _CODES,
    "AudioFlamingo3ForConditionalGeneration": _CODES,
    "AyaVisionForConditionalGeneration": _CODES,
    "BarkModel": "it has no forward",
    "BeitForSemanticSegmentation": _SIZES,
    "BitBackbone": _SIZES,
    "Blip2ForConditionalGeneration": _CODES,
    "BlipForQuestionAnswering": "without an answer to learn no output depends on its question",
    "BrosForTokenClassification": _SIZES,
    "CHMv2ForDepthEstimation": _DEFAULTS,
    "ColModernVBertForRetrieval": _CODES,
    "ColPaliForRetrieval": _CODES,
    "ColQwen2ForRetrieval": _CODES,
    "ConditionalDetrForObjectDetection": _TIMM,
    "CsmForConditionalGeneration": _SIZES,
    "Data2VecVisionForSemanticSegmentation": _SIZES,
    "DFineForObjectDetection": _ROUNDED,
    "DabDetrForObjectDetection": _TIMM,
    "DeformableDetrForObjectDetection": _TIMM,
    "Deimv2ForObjectDetection": _ROUNDED,
    "DetrForObjectDetection": _TIMM,
    "LwDetrForObjectDetection": _SIZES,
    "MobileNetV2ForSemanticSegmentation": _ROUNDED,
    "PPDocLayoutV2ForObjectDetection": _DEFAULTS,
    "SLANetForTableRecognition": _ROUNDED,
    "DepthAnythingForDepthEstimation": _SIZES,
    "DepthProForDepthEstimation": _SIZES,
    "DPTForDepthEstimation": _NOTHING_LEARNED,
    "DPTForSemanticSegmentation": _ROUNDED,
    "SuperPointForKeypointDetection": _ROUNDED,
    "EncoderDecoderModel": _DEFAULTS,
    "FastSpeech2ConformerWithHifiGan": "it learns from durations, pitch and energy together only",
    "MaskFormerForInstanceSegmentation": "it needs scipy",
    "Sapiens2ForPoseEstimation": _NO_SIZES,
    "bailing_hybrid": "its heads are cut from other sizes than those that the rules shrink",
    "blt": "its patcher is a second model, whose sizes depend on hash tables of the first",
    "cohere_compass_text": _LAYERS,
    "cpmant": _ROUNDED,
    "dbrx": _DEFAULTS,
    "dots1": _DEFAULTS,
    "dots3_note": _LAYERS,
    "gemma3n": "it needs timm and PIL for its vision tower",
    "gemma3n_text": _LAYERS,
    "gemma4_assistant": "it needs a second model, whose drafts it continues",
    "gemma4_unified_assistant": "it needs a second model, whose drafts it continues",
    "gemma4": _ROUNDED,
    "gemma4_text": _ROUNDED,
    "gemma4_unified": _ROUNDED,
    "gemma4_unified_text": _ROUNDED,
    "git": "it learns from images beside the text",
    "kimi_linear": (
        "its experts are chosen from groups, of other sizes than those that the rules shrink"
    ),
    "musicgen": "the config of its decoder alone is no model type",
    "musicgen_melody": "the config of its decoder alone is no model type",
    "reformer": _ROUNDED,
    "zamba": _LAYERS,
    "zamba2": _LAYERS,
}

#: Task -> why no class of it can be trained.
UNSUPPORTED_TASKS: dict[str, str] = {
    "audio_tokenization": _SIZES,
    "causal_image_modeling": _ROUNDED,
    "decision": "it decides between options that are marked in its text",
    "image_matting": _SIZES,
    "image_segmentation": _TIMM,
    "image_to_image": _ROUNDED,
    "instance_segmentation": _SCIPY_OR_ROUNDING,
    "keypoint_detection": _ROUNDED,
    "keypoint_matching": _SIZES,
    "mask_generation": _SIZES,
    "multimodal_lm": f"{_CODES}; `hf:phi4_multimodal` is among the causal language models",
    "normal_estimation": _SIZES,
    "pointmap_estimation": _NO_SIZES,
    "retrieval": _CODES,
    "table_question_answering": "it learns from cells that are chosen in its table",
    "semantic_segmentation": _SIZES_OR_ROUNDING,
    "text_recognition": _SIZES,
    "text_to_spectrogram": (
        "it learns from durations, pitch and energy, or a spectrogram to go on with, together only"
    ),
    "universal_segmentation": "their losses need scipy, one needs timm",
    "zero_shot_object_detection": _TIMM_OR_ROUNDING,
}

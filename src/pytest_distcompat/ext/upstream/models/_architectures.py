"""Any architecture of transformers as a tiny model: ``hf:MODEL_TYPE`` or ``hf:CLASS``.

It is made from its config, without a download.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_distcompat.ext.upstream.models._blank import BLANK, BLANK_TASKS, FIXED
from pytest_distcompat.ext.upstream.models._inputs import (
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
from pytest_distcompat.models import TinyModel

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.models import Batch

PREFIX = "hf:"
#: Rules: a pattern of a config field's whole name and its largest value in a tiny model.
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
#: Field -> its value where the default is None.
VALUES_OF_NONE = {"head_dim": 8, "num_key_value_heads": 4}
#: Pattern of fields with the probability of a random choice in the forward pass; it becomes 0.
RANDOM_CHOICES = "dropout|drop_|pdrop|layerdrop|jitter|mask_.*prob"
CAUSAL = "causal_lm"
#: The tasks that ``hf:MODEL_TYPE`` is looked for in first, then transformers' others in its order.
FIRST = (CAUSAL, "seq_to_seq_causal_lm", "masked_lm", "image_classification", "ctc")
UNKNOWN = "the installed transformers has no such model type for any task, and no such class"


@dataclass(frozen=True)
class _Entry:
    """An entry of transformers' auto classes.

    All fields are empty for a model that transformers does not know.

    Attributes:
        model_type: Spelled as transformers spells it, perhaps with hyphens.
        task: Lower-case name of the auto class's table, such as ``causal_lm``.
        class_name: Name of the model class for this task.
    """

    model_type: str = ""
    task: str = ""
    class_name: str = ""

    @property
    def id(self) -> str:
        """The model type as it stands in a cell's id."""
        return _id(self.model_type)


def _id(model_type: str) -> str:
    """Return a model type without hyphens, as it stands in a cell's id."""
    return model_type.replace("-", "_")


def _source(*parts: str) -> Path | None:
    """Return the path of a file below transformers' ``models``; None without transformers."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.origin:
        return None
    return Path(spec.origin).parent.joinpath("models", *parts)


@functools.cache
def _tables() -> dict[str, dict[str, str]]:
    """Return task -> model type -> class name.

    They are read from transformers' source: importing it would import torch.
    """
    source = _source("auto", "modeling_auto.py")
    if source is None:
        return {}
    tables = {}
    for statement in ast.parse(source.read_text(encoding="utf-8")).body:
        task = _task_of_table(statement)
        if task is None:
            continue
        call = getattr(statement, "value", None)
        if not isinstance(call, ast.Call):
            continue
        pairs = call.args[0]
        if isinstance(pairs, ast.List):
            tables[task] = _read_table(pairs)
    first_tables = {task: tables[task] for task in FIRST if task in tables}
    return {**first_tables, **tables}


def _task_of_table(statement: ast.stmt) -> str | None:
    """Return the task whose table the statement assigns; None for another statement."""
    if isinstance(statement, ast.Assign):
        target: Any = statement.targets[0]
    else:
        target = getattr(statement, "target", None)
    match = re.fullmatch(r"MODEL_FOR_(\w+?)(_MAPPING)?_NAMES", getattr(target, "id", ""))
    return match[1].lower() if match else None


def _read_table(pairs: ast.List) -> dict[str, str]:
    """Return model type -> class name; of several classes for one model type, the first."""
    table = {}
    for pair in pairs.elts:
        # What a table takes from another one is in that one.
        if isinstance(pair, ast.Starred):
            continue
        model_type, classes = ast.literal_eval(pair)
        table[model_type] = classes if isinstance(classes, str) else classes[0]
    return table


def _entries() -> Iterator[_Entry]:
    """Yield all entries of transformers' tables, by task."""
    for task, table in _tables().items():
        for model_type, class_name in table.items():
            yield _Entry(model_type, task, class_name)


@functools.cache
def _entry(model: str) -> _Entry:
    """Return the first entry with this model type (as in an id) or class name.

    It is an empty entry if there is none.
    """
    for entry in _entries():
        if model in {entry.id, entry.class_name}:
            return entry
    return _Entry()


def of_tasks() -> dict[str, str]:
    """Return the class that the profile ``zoo`` trains for each task but causal language models.

    It is the first one of transformers' table that has no reason in BLANK, if possible of a model
    type that no other task has. It is empty for a task of which no class can be trained.
    """
    class_by_task = {}
    used_types = set(_tables().get(CAUSAL, ()))
    for task in _tables():
        if task == CAUSAL:
            continue
        entry = _entry_to_train(task, used_types)
        class_by_task[task] = entry.class_name
        used_types.add(entry.model_type)
    return class_by_task


def _entry_to_train(task: str, used_types: set[str]) -> _Entry:
    """Return the first entry of a task that can be trained; an empty one if none can.

    If possible it is one of an unused model type.
    """
    candidates = []
    for entry in _entries():
        if entry.task == task and not _reason_of(entry):
            candidates.append(entry)
    for entry in candidates:
        if entry.model_type not in used_types:
            return entry
    return candidates[0] if candidates else _Entry()


def architectures() -> tuple[str, ...]:
    """Return the names of the models of the profile ``zoo``.

    They are all causal language models, and one model of each other task.
    """
    model_types = sorted(_tables().get(CAUSAL, ()))
    models = [_id(model_type) for model_type in model_types]
    models += [class_name for class_name in of_tasks().values() if class_name]
    return tuple(f"{PREFIX}{model}" for model in dict.fromkeys(models))


def small_config(model: str) -> Any:
    """Return the small config of an architecture."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    entry = _entry(model)
    config_class = CONFIG_MAPPING[entry.model_type]
    fields = config_class().to_dict()
    rules = RULES if entry.task == CAUSAL else RULES + RULES_OF_TASKS
    changes = _small(fields, rules)
    if re.search("classification|segmentation", entry.task):
        changes["num_labels"] = CLASSES
    if entry.task != CAUSAL and fields.get("is_encoder_decoder"):
        # T5 has no such field.
        changes["decoder_start_token_id"] = 0
    changes |= FIXED.get(entry.id, {})
    return config_class(**changes)


def _small(fields: Mapping[str, Any], rules: Rules) -> dict[str, Any]:
    """Return the fields of a config that change, with their small values."""
    changes: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping) and "model_type" in value:
            changes[name] = {"model_type": value["model_type"], **_small(value, rules)}
            continue
        small = _small_value(name, value, rules)
        if small is not None:
            changes[name] = small
    if "kv_lora_rank" in fields:
        # Latent attention has keys for every head.
        changes["num_key_value_heads"] = 4
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
    # A bool is an int too.
    if isinstance(value, int) and not isinstance(value, bool):
        return _small_int(name, value, rules)
    if rules is not RULES and isinstance(value, (list, tuple)):
        return _small_list(name, value, rules)
    return None


def _small_int(name: str, value: int, rules: Rules) -> int | None:
    """Return the small value of a field with a number; None if it keeps its value."""
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
        # As many heads as divide a size that is a power of 2.
        return [2 if value > 1 else 1 for value in values]
    return [min(value, limit) for value in values]


def _limit(name: str, rules: Rules) -> int | None:
    """Return the largest value of a field by the first rule that matches; None if none does."""
    for pattern, limit in rules:
        if re.fullmatch(pattern, name):
            return limit
    return None


def _stages(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the last stages of a small backbone, as many as its outputs are taken of.

    It has no more layers than these need.
    """
    output_stages = fields.get("out_features") or ()
    if not output_stages:
        return {}
    if "num_hidden_layers" not in fields:
        return {"out_features": output_stages}
    layers = max(2, len(output_stages))
    first = layers - len(output_stages) + 1
    stages = [f"stage{number}" for number in range(first, layers + 1)]
    return {"num_hidden_layers": layers, "out_features": stages}


@functools.cache
def _model_class(model: str) -> Any:
    """Return the class of transformers for the model."""
    import transformers

    return getattr(transformers, _entry(model).class_name)


@functools.cache
def _config(model: str) -> Any:
    """Return the small config that the model's class takes.

    It may be a part of the config of its model type.
    """
    config = small_config(model)
    config_class = _model_class(model).config_class
    if config_class is None or isinstance(config, config_class):
        return config
    for part in vars(config).values():
        if isinstance(part, config_class):
            return part
    return config


def _make(model: str) -> Module:
    """Return a new tiny model, in float32."""
    config = copy.deepcopy(_config(model))
    module: Module = _model_class(model)(config).float()
    return module


def _make_on_meta(model: str) -> Any:
    """Return the model on the meta device: names, shapes and dtypes without values."""
    import torch

    with torch.device("meta"):
        return _make(model)


def _blocks(model: str) -> tuple[str, ...]:
    """Return the class names that the model declares as blocks and has."""
    meta_model = _make_on_meta(model)
    declared = set(meta_model._no_split_modules or ())  # noqa: SLF001 - accelerate and Trainer read it too
    present = {type(module).__name__ for module in meta_model.modules()}
    return tuple(sorted(present & declared))


def _batch(model: str, step: int, rank: int) -> Batch:
    """Return two rows, the same for the same numbers in every process."""
    task = _entry(model).task
    return batch_of(_model_class(model), _config(model), task, step, rank)


def _loss(model: Module, batch: Batch) -> torch.Tensor:
    """Return the model's own loss.

    If it has none for these inputs, it is that of its outputs to fixed targets.
    """
    outputs = model(**batch)
    loss: torch.Tensor | None = outputs.get("loss")
    if loss is None:
        return loss_to_targets(outputs)
    return loss


def _count(model: str, batch: Batch) -> int:
    """Return how many tokens are trained on, or rows where labels are not of tokens."""
    task = _entry(model).task
    labels = batch.get("labels")
    if labels is None or not re.fullmatch(LABELS_OF_TOKENS, task):
        return ROWS
    if task == CAUSAL:
        # A causal model predicts the next token, so the first label is not used.
        labels = labels[:, 1:]
    return int((labels != -100).sum())


def _outputs(model: Module, batch: Batch) -> torch.Tensor:
    """Return the logits; of a model without any, its first output of numbers."""
    outputs = model(**batch)
    logits: torch.Tensor | None = outputs.get("logits")
    if logits is None:
        return next(tensors(outputs))
    return logits


def _reload(model: str, directory: Path) -> Module:
    """Load an exported model by ``from_pretrained`` of its class."""
    # Not by the auto class, which does not know the config of some text models that it has made
    # itself.
    loaded: Module = _model_class(model).from_pretrained(directory)
    return loaded


@functools.cache
def _written_names(model: str) -> tuple[str, ...]:
    """Return the names in the files of ``save_pretrained``, as on the Hub.

    None are returned if they are the model's own.
    """
    import tempfile

    import torch
    from safetensors import safe_open

    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as directory:
        module: Any = _make(model)
        module.save_pretrained(directory)
        with safe_open(Path(directory, "model.safetensors"), "pt") as file:
            names = tuple(file.keys())
    if set(names) <= set(module.state_dict()):
        return ()
    return names


def _preload(model: str) -> tuple[str, ...]:
    """Return the modules to import in the fork server: transformers, and the architecture's.

    The latter only if its file is where most are.
    """
    model_type = _entry(model).id
    source = _source(model_type, f"modeling_{model_type}.py")
    if source is None or not source.exists():
        return ("transformers",)
    return ("transformers", f"transformers.models.{model_type}.modeling_{model_type}")


def _reason(model: str) -> str:
    """Return why there is no tiny model of that model type or class; empty if there is."""
    entry = _entry(model)
    if not entry.model_type:
        return UNKNOWN
    if model in BLANK:
        return BLANK[model]
    return _reason_of(entry)


def _reason_of(entry: _Entry) -> str:
    """Return why the tables have no tiny model of an entry; empty if they give no reason."""
    for name in (entry.id, entry.class_name):
        if name in BLANK:
            return BLANK[name]
    return BLANK_TASKS.get(entry.task, "")


@functools.cache
def architecture(name: str) -> TinyModel:
    """Return the tiny model of ``hf:MODEL_TYPE`` or ``hf:CLASS``.

    Nothing is imported before one of its functions is called.
    """
    model = name.removeprefix(PREFIX)

    def bound(function: Any) -> Any:
        return functools.partial(function, model)

    tasks_with_loss = f"{LABELS_OF_TOKENS}|{LABELS_OF_ROWS}|{OTHER_LABELS}"
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
        # 1.3e-3 measured in fp32 after four steps, of Gemma 4, whose gradients agree in the first
        # three.
        norm_spread=10.0,
        # Some have parameters that no output of their task needs.
        unused=True,
        written_names=bound(_written_names),
        without_loss=not re.fullmatch(tasks_with_loss, _entry(model).task),
        unsupported_reason=_reason(model),
        preload=_preload(model),
    )

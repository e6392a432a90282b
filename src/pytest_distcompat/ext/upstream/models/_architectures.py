"""Any architecture of transformers as a tiny model: ``hf:MODEL_TYPE`` or ``hf:CLASS``.

A cell, one configuration under test, names it: ``fsdp2-fp32-w2-model_hf:gpt2``. ``models.model_of``
then calls ``architecture("hf:gpt2")``, by way of the entry ``ARCHITECTURES`` of this package. The
result is a ``TinyModel``: functions by which a driver makes the model, draws its batches and
computes its loss. pytest's process reads ``unsupported_reason`` of it at collection. Each function
imports transformers only when a rank calls it.

The model is made from a small config (``_small_config.py``), without a download. Its inputs are
drawn by rules (``_inputs.py``). ``_tables.py`` knows which classes transformers has, and
``_unsupported.py`` which of them cannot be trained.

The functions with an argument ``model`` get the name without prefix: ``gpt2`` or a class name.
"""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_distcompat.ext.upstream.models._inputs import (
    LABELS_OF_ROWS,
    LABELS_OF_TOKENS,
    OTHER_LABELS,
    ROWS,
    batch_of,
    loss_to_targets,
    tensors,
)
from pytest_distcompat.ext.upstream.models._small_config import small_config
from pytest_distcompat.ext.upstream.models._tables import (
    CAUSAL,
    PREFIX,
    entry_of,
    reason_of,
    source_of,
)
from pytest_distcompat.ext.upstream.models._unsupported import UNSUPPORTED
from pytest_distcompat.models import TinyModel

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.models import Batch

#: Why a name that transformers does not know has no model.
UNKNOWN = "the installed transformers has no such model type for any task, and no such class"


@functools.cache
def _model_class(model: str) -> Any:
    """Return the class of transformers for the model."""
    import transformers

    return getattr(transformers, entry_of(model).class_name)


@functools.cache
def _config(model: str) -> Any:
    """Return the small config that the model's class takes.

    It may be a part of the config of its model type: the text model of an image-text model takes
    the part about text.
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
    # A copy: a class may change the config that it gets, and ``_config`` keeps its result.
    config = copy.deepcopy(_config(model))
    module: Module = _model_class(model)(config).float()
    return module


def _make_on_meta(model: str) -> Any:
    """Return the model on the meta device: names, shapes and dtypes without values."""
    import torch

    with torch.device("meta"):
        return _make(model)


def _blocks(model: str) -> tuple[str, ...]:
    """Return the class names of the model's blocks, such as ``("GPT2Block",)``.

    FSDP wraps blocks one by one. The class declares them; some declared ones are not in the model.
    """
    meta_model = _make_on_meta(model)
    declared = set(meta_model._no_split_modules or ())  # noqa: SLF001 - accelerate and Trainer read it too
    present = {type(module).__name__ for module in meta_model.modules()}
    return tuple(sorted(present & declared))


def _batch(model: str, step: int, rank: int) -> Batch:
    """Return two rows, the same for the same step and rank in every process."""
    task = entry_of(model).task
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
    task = entry_of(model).task
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

    Empty if they are the model's own. transformers renames, splits or joins some tensors when it
    writes them.
    """
    import tempfile

    import torch
    from safetensors import safe_open

    # The model that is made here must not change what the rank draws next.
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as directory:
        module: Any = _make(model)
        module.save_pretrained(directory)
        with safe_open(Path(directory, "model.safetensors"), "pt") as file:
            names = tuple(file.keys())
    if set(names) <= set(module.state_dict()):
        return ()
    return names


def _preload(model: str) -> tuple[str, ...]:
    """Return the modules to import in the fork server, from which ranks are forked.

    They are transformers, and the architecture's module ``modeling_TYPE`` if transformers has a
    file of that name.
    """
    model_type = entry_of(model).id
    source = source_of(model_type, f"modeling_{model_type}.py")
    if source is None or not source.exists():
        return ("transformers",)
    return ("transformers", f"transformers.models.{model_type}.modeling_{model_type}")


def _reason(model: str) -> str:
    """Return why there is no tiny model of that model type or class; empty if there is."""
    # The class for the name, its model type and its task; empty for an unknown name.
    entry = entry_of(model)
    if not entry.model_type:
        return UNKNOWN
    # The reason for what the cell names comes first: for a class, if it names a class.
    if model in UNSUPPORTED:
        return UNSUPPORTED[model]
    # Else the reason for its model type, its class, or its task.
    return reason_of(entry)


@functools.cache
def architecture(name: str) -> TinyModel:
    """Return the tiny model of ``hf:MODEL_TYPE`` or ``hf:CLASS``.

    Nothing is imported before one of its functions is called.
    """
    model = name.removeprefix(PREFIX)

    def bound(function: Any) -> Any:
        """Return the function of this module with ``model`` as its first argument."""
        return functools.partial(function, model)

    # A regular expression for tasks that have labels. Classes for other tasks compute no loss.
    tasks_with_loss = f"{LABELS_OF_TOKENS}|{LABELS_OF_ROWS}|{OTHER_LABELS}"
    return TinyModel(
        name,
        # Known only once the class is imported: ``find_blocks`` returns them.
        blocks=(),
        find_blocks=bound(_blocks),
        make=bound(_make),
        batch=bound(_batch),
        loss=_loss,
        count=bound(_count),
        outputs=_outputs,
        reload=bound(_reload),
        lora_targets=("all-linear",),
        # Products in 8 bits need layers with sizes divisible by 16; small configs need not have
        # them.
        in_8_bits=False,
        # 1.3e-3 measured in fp32 after four steps, of Gemma 4, whose gradients agree in the first
        # three.
        norm_spread=10.0,
        # Some have parameters that no output of their task needs.
        unused=True,
        written_names=bound(_written_names),
        without_loss=not re.fullmatch(tasks_with_loss, entry_of(model).task),
        unsupported_reason=_reason(model),
        preload=_preload(model),
    )

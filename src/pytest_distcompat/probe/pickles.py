"""Reader of files that ``torch.save`` wrote: state dicts, dictionaries of them, DeepSpeed's files.

``files`` calls ``load_pickle``, then ``read_pickle`` for the keys of model and optimizer, or
``pickled_values`` for values. Such a file may be

- a state dict, whose keys are names of parameters;
- a dictionary of parts such as ``model`` and ``optimizer``;
- DeepSpeed's file of model states: ``module`` has the model, or empty tensors in place of the
  parameters that ZeRO-3 partitioned; ``param_shapes`` describes what the other files have.

A record is a ``FileInfo``: what a file, or a part of it, has of a model or an optimizer. ``Part``
and ``Shapes`` are ``("model", {"lm_head.weight": tensor})`` and ``{"lm_head.weight": (64, 16)}``.
"""

from __future__ import annotations

import contextlib
import pickle
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from pytest_distcompat.probe.checkpoint_parts import (
    MODEL,
    OPTIMIZER,
    PARTS,
    Part,
    Shapes,
    is_state_dict,
)
from pytest_distcompat.trace import FileInfo


def pickled_values(data: Mapping[str, Any]) -> Iterator[Part]:
    """Yield the parts of a file of ``torch.save``: one state dict, or several by name.

    A part is ``("model", {"lm_head.weight": tensor, ...})``, and so for ``optimizer`` and
    ``scheduler``, by whichever of its usual names (``PARTS``) the file has it.
    """
    # State dicts of torch's optimizers and schedulers have these keys.
    if "param_groups" in data and "state" in data:
        yield "optimizer", data
    elif "last_epoch" in data:
        yield "scheduler", data
    elif is_state_dict(data):
        yield "model", data
    else:
        for part, names in PARTS.items():
            for name in names:
                if isinstance(data.get(name), Mapping):
                    yield part, data[name]


def read_pickle(data: Any, name: str, networks: Collection[str] = ()) -> Iterator[FileInfo]:
    """Yield the records of the models and optimizers in a file of ``torch.save``.

    Args:
        data: What the file has, as ``load_pickle`` returned it.
        name: Its path as records have it. Of a file with parts the name of the part follows it:
            ``mp_rank_00_model_states.pt:module``.
        networks: Names of the model's networks, each of which may be a part.
    """
    if not isinstance(data, Mapping):
        # A list, a tensor, or a file that torch cannot load.
        return
    is_deepspeed = isinstance(data.get("param_shapes"), list)
    if is_deepspeed:
        yield from _deepspeed_shapes(data, name)
    yield from _models_in_parts(data, name, is_deepspeed=is_deepspeed)
    if data.keys().isdisjoint(MODEL):
        yield from _networks_in_parts(data, name, networks)
    state = _optimizer_state(data)
    # torch numbers an optimizer's parameters; FSDP's functions write their names. Numbers say
    # nothing, so that there is no record of them.
    parameters = [key for key in state.get("state", {}) if isinstance(key, str)]
    if parameters:
        yield FileInfo(name, format="torch", holds="optimizer", keys=tuple(parameters))
    if is_state_dict(data):
        shapes = _shapes(_of_average(data))
        yield FileInfo(name, format="torch", holds="model", keys=tuple(shapes), shapes=shapes)


def _models_in_parts(
    data: Mapping[str, Any], name: str, *, is_deepspeed: bool
) -> Iterator[FileInfo]:
    """Yield the records of the parts of a file that are models, as ``model`` or ``module``.

    Args:
        data: The dictionary in the file.
        name: Its path as records have it.
        is_deepspeed: Whether it is DeepSpeed's file of model states, in which a part may have empty
            tensors for what other files have.
    """
    for part in MODEL:
        if not isinstance(data.get(part), Mapping):
            continue
        shapes = _full_shapes(data, _shapes(data[part]))
        if is_deepspeed:
            shapes = _without_partitioned(shapes)
        if shapes:
            # Of the libraries, DeepSpeed alone names the model so.
            form = "deepspeed" if part == "module" else "torch"
            keys = tuple(shapes)
            yield FileInfo(f"{name}:{part}", format=form, holds="model", keys=keys, shapes=shapes)


def _networks_in_parts(
    data: Mapping[str, Any], name: str, networks: Collection[str]
) -> Iterator[FileInfo]:
    """Yield the records of the parts of a file that are networks of the model, as of a GAN.

    Their keys become those of the whole model: ``critic.weight`` for ``weight`` in ``critic``.
    """
    for network in networks:
        state = data.get(network)
        if not isinstance(state, Mapping) or not is_state_dict(state):
            continue
        shapes = {f"{network}.{key}": shape for key, shape in _shapes(state).items()}
        yield FileInfo(
            f"{name}:{network}", format="torch", holds="model", keys=tuple(shapes), shapes=shapes
        )


def _deepspeed_shapes(data: Mapping[str, Any], name: str) -> Iterator[FileInfo]:
    """Yield a record of the trained and of the frozen parameters that DeepSpeed's file describes.

    Their values may be in other files: those of ZeRO-3's shards.
    """
    trained: Shapes = {}
    # One dictionary for each param group of the optimizer.
    for group in data["param_shapes"]:
        for key, shape in group.items():
            trained[str(key)] = tuple(shape)
    frozen: Shapes = {}
    for key, shape in (data.get("frozen_param_shapes") or {}).items():
        frozen[str(key)] = tuple(shape)
    shapes_by_part = {"param_shapes": trained, "frozen_param_shapes": frozen}
    for part, shapes in shapes_by_part.items():
        if shapes:
            keys = tuple(shapes)
            full_shapes = _full_shapes(data, shapes)
            yield FileInfo(
                f"{name}:{part}",
                format="deepspeed",
                holds="model",
                keys=keys,
                shapes=full_shapes,
            )


def _without_partitioned(shapes: Shapes) -> Shapes:
    """Return the shapes without those of empty tensors.

    ZeRO-3 writes them in place of the parameters that it partitioned, whose values are in other
    files.
    """
    return {key: shape for key, shape in shapes.items() if shape != (0,)}


def _optimizer_state(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the optimizer's state dict: the file itself, or its part under a usual name.

    The names are those of ``OPTIMIZER``, such as ``optim``. The result is empty if the file has
    none.
    """
    if isinstance(data.get("state"), Mapping):
        return data
    for part in OPTIMIZER:
        if part in data:
            state = data[part]
            if isinstance(state, Mapping):
                return state
            return {}
    return {}


def _of_average(state: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the state dict of the model inside a ``torch.optim.swa_utils.AveragedModel``.

    Any other state dict is returned as it is.
    """
    # An averaged model has the model as ``module`` and counts in ``n_averaged``, a buffer:
    # https://docs.pytorch.org/docs/stable/generated/torch.optim.swa_utils.AveragedModel.html
    inner: dict[Any, Any] = {}
    for key, value in state.items():
        if str(key).startswith("module."):
            inner[key.removeprefix("module.")] = value
    if "n_averaged" in state and len(inner) == len(state) - 1:
        return inner
    return state


def _shapes(state: Mapping[Any, Any]) -> Shapes:
    """Return the shapes of the tensors in a state dict; of sharded tensors the global shape."""
    shapes: Shapes = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            shapes[str(key)] = tuple(value.size())
    return shapes


def _full_shapes(data: Mapping[str, Any], shapes: Shapes) -> Shapes:
    """Return the shapes of the full tensors, where each rank of DeepSpeed's AutoTP saves a shard.

    Args:
        data: The file. It describes the sharding, for its conversion
            (https://github.com/deepspeedai/DeepSpeed/pull/7908): a pattern of names, the shapes of
            the ranks' shards, and the full shape.
        shapes: The shapes of the tensors in the file.
    """
    full_shapes = dict(shapes)
    info = data.get("universal_checkpoint_info") or {}
    sharded = info.get("affine_map", {}).get("params", {})
    for pattern, entry in sharded.items():
        shard_shapes = [tuple(shard["shard_shape"]) for shard in entry["ranks"].values()]
        logical_shape = tuple(entry["logical_shape"])
        for key, shape in shapes.items():
            if shape in shard_shapes and re.fullmatch(pattern, key):
                full_shapes[key] = logical_shape
    return full_shapes


def load_pickle(path: Path) -> Any:
    """Return the file's content with its tensors memory-mapped; None if torch cannot load it."""
    # The trainer under test has just written the file, so unpickling it adds no danger. Files of
    # older formats cannot be memory-mapped: then it is loaded in another way.
    for mmap in (True, False):
        with contextlib.suppress(RuntimeError, pickle.UnpicklingError, EOFError):
            return torch.load(path, map_location="cpu", mmap=mmap, weights_only=False)
    return None

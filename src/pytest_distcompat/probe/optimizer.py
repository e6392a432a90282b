"""Reads an optimizer and a scheduler."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from pytest_distcompat.probe.tensors import digest, dtype_name, local_of, zero3_shard
from pytest_distcompat.trace import OptimizerInfo, StateInfo

if TYPE_CHECKING:
    from torch.nn import Module


def several(optimizer: Any) -> list[Any]:
    """The trainer's optimizers, each as it is wrapped: one, or those of a list or whatever else is iterated over.

    One for matrices and one for the rest, as ``torch.optim.Muon`` wants it
    (https://docs.pytorch.org/docs/stable/generated/torch.optim.Muon.html); ``get_state_dict`` takes several in the same way.
    None for None.
    """
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, Iterable) and not isinstance(optimizer, str) else [optimizer]


def entries(optimizer: Any) -> list[torch.Tensor]:
    """What all of them optimize, in the order of their groups."""
    groups = (group for one in several(optimizer) for group in torch_optimizer(one).param_groups)
    return [parameter for group in groups for parameter in group["params"]]


def chain(optimizer: Any) -> list[Any]:
    """From the outermost wrapper of one optimizer to the torch optimizer that steps.

    AcceleratedOptimizer, DeepSpeedOptimizerWrapper and DeepSpeed's ZeRO optimizers all keep the inner one as
    ``.optimizer``.
    """
    links = [optimizer]
    while (inner := getattr(links[-1], "optimizer", None)) is not None and inner not in links:
        links.append(inner)
    return links


def _delegate(optimizer: Any) -> Any:
    """The one that a torch optimizer has step for it; itself, if it does so itself.

    ``torch.distributed.optim.ZeroRedundancyOptimizer`` (https://docs.pytorch.org/docs/stable/distributed.optim.html) knows all
    parameters and keeps the state of this rank's in ``optim``. In its own state is what was loaded, and None for the others.
    """
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def links(optimizer: Any) -> Iterator[Any]:
    """Of all of the trainer's optimizers, the wrappers and what they wrap."""
    return (link for one in several(optimizer) for link in chain(one))


def torch_optimizer(optimizer: Any) -> Any:
    """The torch optimizer at the end of the chain; None for None."""
    return None if optimizer is None else chain(optimizer)[-1]


def copied(optimizer: Any) -> dict[int, torch.Tensor]:
    """The id of a float32 copy that is optimized -> the parameter in low precision that it is a copy of.

    DeepSpeed keeps such where it runs without ZeRO (``FP16_UnfusedOptimizer``), in two lists that are not documented;
    ``tests/spawn/test_private_names.py`` says when they go away.
    """
    for link in links(optimizer):
        low, high = getattr(link, "fp16_groups", None), getattr(link, "fp32_groups", None)
        if low and high:
            groups = zip(low, high, strict=True)
            return {id(copy): one for ones, copies in groups for one, copy in zip(ones, copies, strict=True)}
    return {}


def read_optimizer(model: Module, optimizer: Any, *, whole: bool = True) -> OptimizerInfo:
    """Whose tensors the optimizer holds, and every tensor of its state; if not ``whole``, the numbers of its groups only.

    Of several: what they are together. Never through ``get_optimizer_state_dict``: on a fresh optimizer that takes a step
    (https://github.com/pytorch/pytorch/pull/125708).
    """
    chains = [chain(one) for one in several(optimizer)]
    inner = [one[-1] for one in chains]
    for one in inner:
        if not hasattr(one, "param_groups"):
            told = (
                "self.optimizer of the driver is to be the optimizer that steps, or what wraps it; of several, a list"
            )
            raise TypeError(f"{type(one).__name__} has no param_groups: {told}")
    stepping = [_delegate(one) for one in inner]
    types = [
        tuple(type(link).__name__ for link in dict.fromkeys((*one, last)))
        for one, last in zip(chains, stepping, strict=True)
    ]
    shown = types[0] if len(types) == 1 else (" + ".join(map(" > ".join, types)),)
    groups = tuple(_numbers(group) for one in inner for group in one.param_groups)
    if not whole:
        return OptimizerInfo(shown, 0, param_groups=groups)
    live = {id(parameter): name for name, parameter in model.named_parameters()}
    owners = live | {copy: live[id(low)] for copy, low in copied(optimizer).items() if id(low) in live}
    held = entries(optimizer)
    partitioned = _partitioned(model)
    states: list[StateInfo] = []
    for number, (parameter, state) in enumerate(pair for one in stepping for pair in one.state.items()):
        owner = owners.get(id(parameter), f"partition {number}")
        if id(parameter) not in live:
            states.append(_state(owner, "master", parameter))
        states.extend(_state(owner, key, value) for key, value in state.items() if _is_number(value))
    return OptimizerInfo(
        chain=shown,
        entries=len(held),
        foreign=0 if partitioned else sum(id(parameter) not in owners for parameter in held),
        states=tuple(states),
        partitioned=partitioned,
        # DeepSpeed's, whose engines have one optimizer.
        masters=tuple(info for one in stepping[:1] for info in _masters(model, one)),
        accumulates=_accumulates(optimizer),
        param_groups=groups,
    )


def _numbers(group: dict[str, Any]) -> dict[str, float]:
    """The numbers that steer the steps of a group, a tuple of them (betas) one by one."""
    found: dict[str, float] = {}
    for key, value in group.items():
        many = isinstance(value, (tuple, list))
        parts = {f"{key}.{n}": part for n, part in enumerate(value)} if many else {key: value}
        found |= {name: float(part) for name, part in parts.items() if key != "params" and _is_number(part)}
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, int, float)) and not isinstance(value, bool)


def _state(owner: str, key: str, value: Any) -> StateInfo:
    if not isinstance(value, torch.Tensor):
        return StateInfo(owner, key, type(value).__name__, 1, digest(value))
    return StateInfo(owner, key, dtype_name(value.dtype), local_of(value).numel(), digest(value))


def _partitioned(model: Module) -> dict[str, int]:
    """How many elements of each live parameter this rank's flat masters hold, where DeepSpeed keeps such.

    ZeRO-3 tells it by ``safe_get_local_fp32_param`` and the public ``ds_tensor`` and ``ds_numel``. ZeRO-1 and 2 keep it
    in ``_hp_mapping``, private: the public accessors (``deepspeed.utils.safe_get_full_fp32_param``) take part in an
    all_reduce, which a probe must not, and always answer in float32. ``tests/spawn/test_private_names.py`` says when it
    goes away.
    """
    found: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if hasattr(parameter, "ds_tensor"):
            found[name] = zero3_shard(parameter).numel() if _has_master(parameter) else 0
        elif hasattr(parameter, "_hp_mapping"):
            mapping = parameter._hp_mapping  # noqa: SLF001 - see the docstring
            found[name] = 0 if mapping is None else int(mapping.lp_fragment_address.numel)
    return found


def _accumulates(optimizer: Any) -> str:
    """What DeepSpeed adds gradients up in: private, ``tests/spawn/test_private_names.py`` says when it goes away."""
    for link in links(optimizer):
        for attribute in ("gradient_accumulation_dtype", "grad_acc_dtype"):
            if isinstance(dtype := getattr(link, attribute, None), torch.dtype):
                return dtype_name(dtype)
    return ""


def _masters(model: Module, inner: Any) -> Iterator[StateInfo]:
    """This rank's part of each parameter's flat master and of its moments, where DeepSpeed keeps such; see ``_partitioned``.

    The parts of all ranks, in their order, are the parameter.
    """
    keys = sorted({key for state in inner.state.values() for key, value in state.items() if _is_flat(value)})
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_tensor") and _has_master(parameter):
            from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

            numel = zero3_shard(parameter).numel()
            yield _state(name, "master", safe_get_local_fp32_param(parameter).reshape(-1)[:numel])
            for key in keys:
                # A partition of its own may have no state yet.
                with contextlib.suppress(KeyError):
                    yield _state(name, key, safe_get_local_optimizer_state(parameter, key).reshape(-1)[:numel])
        elif (mapping := getattr(parameter, "_hp_mapping", None)) is not None:
            yield _state(name, "master", mapping.hp_fragment)
            place = mapping.hp_fragment_address
            # Not ``mapping.optim_fragment``: until the first step after a load that is of the state before it.
            for flat in inner.param_groups[mapping.param_group_index]["params"]:
                for key, value in inner.state.get(flat, {}).items():
                    if _is_flat(value):
                        yield _state(name, key, value.narrow(0, place.start, place.numel))


def _is_flat(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1


def _has_master(parameter: torch.Tensor) -> bool:
    """Whether the ZeRO-3 optimizer knows the parameter: every one is partitioned, also one that nobody optimizes."""
    from deepspeed.utils import safe_get_local_fp32_param

    try:
        return safe_get_local_fp32_param(parameter) is not None
    except (KeyError, AttributeError):
        return False


def read_scheduler(scheduler: Any) -> str:
    """A digest of the scheduler's state and of the learning rates it set; empty for None. Of several: each one's."""
    return "; ".join(map(_read_scheduler, several(scheduler)))


def _read_scheduler(scheduler: Any) -> str:
    if not hasattr(scheduler, "state_dict") and not hasattr(scheduler, "__dict__"):
        told = f"self.scheduler of the driver is a {type(scheduler).__name__}: {scheduler!r:.100}"
        raise TypeError(f"{told}; expected the scheduler, None, or of several a list")
    kept = scheduler.state_dict() if hasattr(scheduler, "state_dict") else vars(scheduler)
    state = {key: value for key, value in kept.items() if isinstance(value, (int, float, list, str))}
    # One shared scheduler counts its calls inside a run; that count is no state of training.
    state.pop("_step_count", None)
    text = json.dumps(state, sort_keys=True, default=repr)
    rates: Any = None
    # One that somebody wrote himself may not tell, DeepSpeed's OneCycle not before its first step.
    with contextlib.suppress(AttributeError, AssertionError):
        rates = scheduler.get_last_lr()
    return f"last_epoch={state.get('last_epoch')} lr={rates} {hashlib.sha256(text.encode()).hexdigest()[:12]}"

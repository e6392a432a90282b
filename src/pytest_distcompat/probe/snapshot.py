"""Reader of a live trainer after an action, for the fields of a ``Snapshot``.

An action is one unit of a rank's work, such as ``build``, ``step`` or ``load``. After each one
``worker`` (for a driver, the class by which a suite tests a trainer) or ``ext.scripts`` (for a
user's script) calls ``read_snapshot_fields`` on each rank with what the trainer has: model,
optimizer, scheduler, scaler. The result is a dictionary of fields of ``trace.Snapshot``, which the
caller writes to the rank's log. Nothing here takes part in a collective or changes the trainer, but
for ``fit_first_scale``, which ``worker`` calls once before the first step.
"""

from __future__ import annotations

import hashlib
import math
import resource
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from pytest_distcompat.probe.flat_masters import flat_masters
from pytest_distcompat.probe.live import read_model, require_module
from pytest_distcompat.probe.optimizer import read_optimizer, read_scheduler
from pytest_distcompat.probe.tensors import digest, local_of, zero3_shard
from pytest_distcompat.probe.wrapped_optimizers import links
from pytest_distcompat.trace import TF32, CallInfo, Sums

if TYPE_CHECKING:
    from torch.nn import Module

#: How many numbers of an output go into the trace: enough to tell two models apart, few enough to
#: read.
SAMPLED = 32
#: The largest loss scale that a compared training begins at; the built-in drivers of torch and
#: DeepSpeed begin at it too.
FIRST_SCALE = 2.0**10


def read_snapshot_fields(
    model: Module,
    optimizer: Any,
    *,
    device: str,
    scheduler: Any = None,
    scaler: Any = None,
    trainer_world_size: int | None = None,
    whole: bool,
    without_gradient: frozenset[int] = frozenset(),
    pp_group: Any = None,
) -> dict[str, Any]:
    """Return those fields of a ``Snapshot`` that are read from a live trainer.

    Args:
        model: The trainer's model, as it is wrapped.
        optimizer: Its optimizer, or a list of several; None if it has none.
        device: This rank's own device: ``cuda:1``.
        scheduler: Its scheduler, or a list of several.
        scaler: Its gradient scaler.
        trainer_world_size: The number of ranks that the trainer assumes; None if unknown.
        whole: Whether to read the tensors too; without it only numbers such as the learning rate.
            Steps in the middle of a training are read in this way, to save time.
        without_gradient: The ``id`` of each tensor that had no gradient in the optimizer's steps.
        pp_group: The ranks of the pipeline, if the model is one stage of it.

    Raises:
        TypeError: If ``model`` is no module.
    """
    require_module(
        model, "the driver's self.model", "build() is to set it to the model as the trainer has it"
    )
    fields: dict[str, Any] = {
        "scheduler": read_scheduler(scheduler),
        "memory": peak_memory(device),
        "products": read_products(device),
    }
    if optimizer is not None:
        fields["optimizer"] = read_optimizer(
            model, optimizer, whole=whole, without_gradient=without_gradient
        )
    if whole:
        fields["model"] = read_model(model, optimizer, trainer_world_size, pp_group)
        fields["rng"] = read_rng(device)
        fields["scaler"] = read_scaler(scaler, optimizer)
    return fields


def read_products(device: str) -> dict[str, str]:
    """Return how torch multiplies on the GPU now: ``{"matmul": "ieee", "conv": "tf32"}``.

    It is the precision of float32 products, and the dtype of autocast if that is on. Empty on the
    CPU.
    """
    if not device.startswith("cuda"):
        return {}
    cudnn = torch.backends.cudnn
    products = {
        "matmul": _float32_precision(torch.backends.cuda.matmul),
        "conv": _float32_precision(getattr(cudnn, "conv", cudnn)),
    }
    if torch.is_autocast_enabled("cuda"):
        products["autocast"] = str(torch.get_autocast_dtype("cuda")).removeprefix("torch.")
    return products


def read_settings() -> dict[str, str]:
    """Return the settings of torch for the whole process (see ``Snapshot.settings``)."""
    return {
        "threads": str(torch.get_num_threads()),
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "gradients": str(torch.is_grad_enabled()),
        "autocast": str(torch.is_autocast_enabled("cpu")),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "products of float32": torch.get_float32_matmul_precision(),
    }


def _float32_precision(backend: Any) -> str:
    """Return the precision of a backend's products of float32: ``ieee`` or ``tf32``."""
    # From torch 2.9 on the precision has a name, "none" where nothing was set; before there is only
    # ``allow_tf32``, which raises in later releases once the name was set.
    named = getattr(backend, "fp32_precision", None)
    if named == "none":
        return "ieee"
    if isinstance(named, str):
        return named
    if backend.allow_tf32:
        return TF32
    return "ieee"


def read_rng(device: str) -> str:
    """Return a digest of torch's RNG states: of the CPU and, if ``device`` is a GPU, of the GPU."""
    states = [torch.get_rng_state()]
    if device.startswith("cuda"):
        states.append(torch.cuda.get_rng_state(device))
    hasher = hashlib.sha256()
    for state in states:
        hasher.update(bytes(state.tolist()))
    return hasher.hexdigest()[:16]


def read_scaler(scaler: Any, optimizer: Any) -> dict[str, float]:
    """Return the numbers of a ``torch.amp.GradScaler``, or of DeepSpeed's loss scaler.

    DeepSpeed has no scaler of its own beside the optimizer: the optimizer scales the loss. The
    result, such as ``{"scale": 1024.0}``, is empty without a scaler.
    """
    if scaler is not None:
        numbers: dict[str, float] = {}
        for key, value in scaler.state_dict().items():
            if isinstance(value, (int, float)):
                numbers[key] = float(value)
        return numbers
    # ``links`` yields the optimizer, then the one that it wraps, and so on to torch's own.
    for link in links(optimizer):
        if hasattr(link, "loss_scale"):
            return {"scale": float(link.loss_scale), **_hysteresis(link)}
    return {}


def _hysteresis(optimizer: Any) -> dict[str, float]:
    """Return ``{"hysteresis": N}``, the overflows left until the scale shrinks; empty without."""
    # DeepSpeed's ZeRO optimizers keep it in ``loss_scaler``, which is not documented;
    # ``tests/launch/test_private_names.py`` fails when it changes.
    loss_scaler = getattr(optimizer, "loss_scaler", None)
    hysteresis = getattr(loss_scaler, "cur_hysteresis", None)
    if hysteresis is None:
        return {}
    return {"hysteresis": float(hysteresis)}


def fit_first_scale(scaler: Any, optimizer: Any) -> None:
    """Lower a dynamic loss scale to ``FIRST_SCALE`` before the first step.

    ``torch.amp.GradScaler`` begins at 65,536 and skips steps until the scale fits; the reference,
    the same training in one process, skips none. From a scale that fits, every skipped step is a
    difference: checks need no rule for steps that may be skipped.

    Args:
        scaler: The trainer's GradScaler; None without one.
        optimizer: The trainer's optimizer, which may be DeepSpeed's with a loss scale of its own.
    """
    if scaler is not None:
        state = scaler.state_dict()
        # A scaler that is not enabled has an empty state.
        if state.get("scale", 0.0) > FIRST_SCALE:
            scaler.load_state_dict({**state, "scale": FIRST_SCALE})
        return
    for link in links(optimizer):
        # A static scale was chosen, and stays.
        if _scales_dynamically(link) and link.loss_scale > FIRST_SCALE:
            link.loss_scale = FIRST_SCALE


def _scales_dynamically(optimizer: Any) -> bool:
    """Tell whether it is an optimizer of DeepSpeed with a dynamic loss scale."""
    # ZeRO's optimizers have the first attribute, those without ZeRO the second.
    zero_scaler = getattr(optimizer, "loss_scaler", None)
    if getattr(zero_scaler, "dynamic", False):
        return True
    config = getattr(optimizer, "loss_scale_config", None)
    return bool(getattr(config, "dynamic_loss_scale", False))


def peak_memory(device: str) -> int:
    """Return the peak memory in bytes: torch's on the GPU, or the process's RSS on the CPU."""
    if device.startswith("cuda"):
        return int(torch.cuda.max_memory_allocated(device))
    # Linux counts it in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def sample(output: torch.Tensor) -> tuple[float, ...]:
    """Return at most ``SAMPLED`` evenly spaced numbers of the output, rounded to 6 decimals.

    They are of many columns: every 128th of 128 logits a token would be those of one class alone.

    Raises:
        TypeError: If the output is no tensor.
    """
    if not hasattr(output, "detach"):
        expected = "expected a tensor: what the model computes, not a loss"
        raise TypeError(f"evaluate() returned {output!r:.100}; {expected}")
    flat = output.detach().float().cpu().reshape(-1)
    step = max(1, flat.numel() // SAMPLED)
    columns = output.shape[-1] if output.dim() else 1
    while math.gcd(step, columns) > 1:
        step -= 1
    sampled = flat[::step][:SAMPLED].tolist()
    return tuple(round(value, 6) for value in sampled)


def read_call(model: Module, returned: Any, *, observes: bool) -> CallInfo:
    """Return what a call of the live trainer left behind, to compare it with other processes.

    Users call a trainer in any order: ``step(clip='no')``, ``state_dict()``. A run that does so is
    compared after each call.

    Args:
        model: The trainer's model.
        returned: What the call returned: a module, whose parameters are compared, or a mapping of
            names to tensors. Anything else, such as a loss, is not compared.
        observes: Whether the call must change nothing.
    """
    if isinstance(returned, torch.nn.Module):
        returned = _optimized(returned)
    gradients: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        gradients[name] = ""
        if parameter.grad is not None:
            gradients[name] = digest(parameter.grad)
    evaluating: list[str] = []
    for name, module in model.named_modules():
        if not module.training:
            evaluating.append(name)
    sums = read_sums(model)
    sums_of_returned: dict[str, Sums] | None = None
    if isinstance(returned, Mapping):
        sums_of_returned = _sums_by_name(returned)
    return CallInfo(
        observes=observes,
        gradients=gradients,
        evaluating=tuple(evaluating),
        sums=sums,
        returned=sums_of_returned,
    )


def read_sums(model: Module) -> dict[str, Sums]:
    """Return the sums of this rank's parts of what is optimized and of buffers, by live name."""
    return _sums_by_name(_optimized(model))


def _sums_by_name(tensors: Mapping[str, Any]) -> dict[str, Sums]:
    """Return the sums of each tensor: ``{"lm_head.weight": (1024, 3.1, 9.4)}``.

    What is no tensor is left out.
    """
    sums: dict[str, Sums] = {}
    for name, tensor in tensors.items():
        if hasattr(tensor, "numel"):
            sums[name] = _sums(tensor)
    return sums


def _optimized(model: Module) -> dict[str, torch.Tensor]:
    """Return this rank's parts of what is optimized, and the buffers, by live name.

    What is optimized is the parameter's float32 master if it has one in a flat partition of ZeRO,
    else the parameter itself.
    """
    masters = {name: master for name, _, master in flat_masters(model)}
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if name in masters:
            tensors[name] = masters[name]
        elif hasattr(parameter, "ds_tensor"):
            tensors[name] = zero3_shard(parameter)
        else:
            tensors[name] = local_of(parameter)
    return tensors | dict(model.named_buffers())


def _sums(tensor: torch.Tensor) -> Sums:
    """Return of this rank's part of a tensor the number of elements, their sum, that of squares.

    The sums are computed in float64.
    """
    with torch.no_grad():
        values = local_of(tensor).double()
        total = float(values.sum())
        total_of_squares = float(values.square().sum())
        return values.numel(), total, total_of_squares

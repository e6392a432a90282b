"""Functions of the libraries by which ranks exchange values: ``gather``, ``reduce``, ``broadcast``.

The built-in drivers return them from ``exchanges()``; the check ``exchanges`` compares what they
give with what their laws expect. Each public function of this module starts the process group, as
users of its library do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from pytest_distcompat.exchanges import (
    AnyRank,
    Broadcasts,
    BroadcastsLists,
    Exchange,
    Gathers,
    GathersLists,
    OnRank,
    Pads,
    Reduces,
    Splits,
)

#: Of functions that hand their tensor to torch's collectives as it is.
_ONE_PIECE = {"transposed": "torch's collectives refuse tensors that are not contiguous"}


def of_accelerate(device: str) -> Mapping[str, Exchange]:
    """Return those of accelerate, which all have a process group of an ``Accelerator``.

    https://huggingface.co/docs/accelerate/package_reference/utilities

    Args:
        device: ``cpu`` or that of this rank.
    """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device == "cpu")
    return {
        **_collectives_of_accelerate(accelerator),
        **_padding_of_accelerate(accelerator),
        **_splitting_of_accelerate(accelerator),
        **_decorators_of_accelerate(accelerator),
    }


def _collectives_of_accelerate(accelerator: Any) -> dict[str, Exchange]:
    """Return accelerate's functions that gather, reduce and broadcast."""
    from accelerate.utils import broadcast, broadcast_object_list, gather_object

    def trigger(value: bool) -> bool:
        if value:
            accelerator.set_trigger()
        is_set: bool = accelerator.check_trigger()
        return is_set

    from_last = functools.partial(broadcast, from_process=accelerator.num_processes - 1)
    exchanges = {
        "gather": Exchange(accelerator.gather, Gathers()),
        "gather_for_metrics": Exchange(accelerator.gather_for_metrics, Gathers()),
        "gather_object": Exchange(gather_object, GathersLists()),
        "broadcast": Exchange(broadcast, Broadcasts(), _ONE_PIECE, in_place=True),
        "broadcast from the last rank": Exchange(
            from_last, Broadcasts(-1), _ONE_PIECE, in_place=True
        ),
        "broadcast_object_list": Exchange(broadcast_object_list, BroadcastsLists(), in_place=True),
        "set_trigger": Exchange(trigger, AnyRank()),
    }
    for operation in ("sum", "mean", "max"):
        reduce = functools.partial(accelerator.reduce, reduction=operation)
        exchanges[f"reduce(reduction={operation!r})"] = Exchange(reduce, Reduces(operation))
    return exchanges


def _padding_of_accelerate(accelerator: Any) -> dict[str, Exchange]:
    """Return ``pad_across_processes`` with several arguments."""
    pad = accelerator.pad_across_processes
    return {
        "pad_across_processes": Exchange(pad, Pads()),
        "pad_across_processes(dim=1)": Exchange(functools.partial(pad, dim=1), Pads(dim=1)),
        "pad_across_processes(dim=-1, pad_index=-100)": Exchange(
            functools.partial(pad, dim=-1, pad_index=-100), Pads(dim=-1, padding=-100)
        ),
        "pad_across_processes(pad_first=True)": Exchange(
            functools.partial(pad, pad_first=True), Pads(first=True)
        ),
    }


def _splitting_of_accelerate(accelerator: Any) -> dict[str, Exchange]:
    """Return ``split_between_processes`` with and without padding."""

    def split(value: Any, **arguments: Any) -> Any:
        with accelerator.split_between_processes(value, **arguments) as part:
            return part

    return {
        "split_between_processes": Exchange(split, Splits()),
        "split_between_processes(apply_padding=True)": Exchange(
            functools.partial(split, apply_padding=True), Splits(padded=True)
        ),
    }


def _decorators_of_accelerate(accelerator: Any) -> dict[str, Exchange]:
    """Return decorators of functions that run on one rank alone."""

    def on_rank_1(decorate: Callable[..., Any], argument: str) -> Callable[..., Any]:
        return functools.partial(decorate, **{argument: 1})

    def call(decorate: Callable[..., Any], value: Any) -> Any:
        function = decorate(lambda: value)
        return function()

    on_process = on_rank_1(accelerator.on_process, "process_index")
    on_local_process = on_rank_1(accelerator.on_local_process, "local_process_index")
    decorators = {
        "on_main_process": (accelerator.on_main_process, OnRank(0)),
        "on_local_main_process": (accelerator.on_local_main_process, OnRank(0)),
        "on_last_process": (accelerator.on_last_process, OnRank(-1)),
        "on_process(process_index=1)": (on_process, OnRank(1)),
        "on_local_process(local_process_index=1)": (on_local_process, OnRank(1)),
    }
    exchanges: dict[str, Exchange] = {}
    for name, (decorate, law) in decorators.items():
        exchanges[name] = Exchange(functools.partial(call, decorate), law)
    return exchanges


def of_trainer(device: str) -> Mapping[str, Exchange]:
    """Return those of transformers that users of ``Trainer`` call in its callbacks and metrics.

    Args:
        device: ``cpu`` or that of this rank.
    """
    import tempfile

    from transformers import TrainingArguments
    from transformers.trainer_pt_utils import nested_gather

    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(directory, use_cpu=device == "cpu", report_to=[])
        mode = arguments.parallel_mode
    gather = functools.partial(nested_gather, parallel_mode=mode)
    return {"nested_gather": Exchange(gather, Gathers())}


def of_deepspeed(backend: str) -> Mapping[str, Exchange]:
    """Return those of ``deepspeed.comm``, which has torch's collectives under names of its own.

    https://www.deepspeed.ai/docs/config-json/#communication-logging

    Args:
        backend: Of the process group: ``gloo`` or ``nccl``.
    """
    from deepspeed import comm

    from pytest_distcompat.launch.deepspeed_cpu import init_distributed

    init_distributed(backend)
    ranks = comm.get_world_size()

    def all_gather(tensor: Any) -> Any:
        import torch

        tensor = tensor.detach().contiguous()
        if not tensor.ndim:
            tensor = tensor.unsqueeze(0)
        gathered = [torch.empty_like(tensor) for _ in range(ranks)]
        comm.all_gather(gathered, tensor)
        return torch.cat(gathered)

    def all_gather_object(value: list[Any]) -> list[Any]:
        gathered: list[Any] = [None] * ranks
        comm.all_gather_object(gathered, value)
        joined: list[Any] = []
        for part in gathered:
            joined += part
        return joined

    def all_reduce(tensor: Any, operation: Any) -> Any:
        reduced = tensor.detach().contiguous()
        comm.all_reduce(reduced, operation)
        return reduced

    def inference_all_reduce(tensor: Any) -> Any:
        reduced = tensor.detach().contiguous()
        comm.inference_all_reduce(reduced)
        return reduced

    def broadcast(tensor: Any) -> Any:
        comm.broadcast(tensor.detach(), src=ranks - 1)
        return tensor

    def broadcast_object_list(value: list[Any]) -> list[Any]:
        comm.broadcast_object_list(value, src=0)
        return value

    total = functools.partial(all_reduce, operation=comm.ReduceOp.SUM)
    largest = functools.partial(all_reduce, operation=comm.ReduceOp.MAX)
    summed = Reduces("sum", containers=False)
    from_last = Broadcasts(-1, containers=False)
    return {
        "all_gather": Exchange(all_gather, Gathers(containers=False)),
        "all_gather_object": Exchange(all_gather_object, GathersLists()),
        "all_reduce": Exchange(total, summed, in_place=True),
        "all_reduce(op=MAX)": Exchange(largest, Reduces("max", containers=False), in_place=True),
        "inference_all_reduce": Exchange(inference_all_reduce, summed, in_place=True),
        "broadcast": Exchange(broadcast, from_last, _ONE_PIECE, in_place=True),
        "broadcast_object_list": Exchange(broadcast_object_list, BroadcastsLists(), in_place=True),
    }

"""Functions of the libraries by which ranks exchange values: ``gather``, ``reduce``, ``broadcast``.

The built-in drivers return them from ``exchanges()``, and the check ``exchanges`` compares what
they give with their contracts. Each public function of this module starts the process group, as
users of its library do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pytest_distcompat.exchanges import (
    AnyRank,
    Broadcasts,
    BroadcastsLists,
    Exchange,
    Fills,
    Gathers,
    GathersLists,
    OnRank,
    Pads,
    Reduces,
    Splits,
)

if TYPE_CHECKING:
    import torch

#: The dtypes that ZeRO shards.
_ZERO_DTYPES = ("float32", "bfloat16", "float16")
#: Why ZeRO shards no scalar, and no tensor that is not contiguous.
_VIEWED_AS_BYTES = "DeepSpeed views it as bytes: docs/upstream/deepspeed_scalar_parameter.py"
#: Of functions that hand their tensor to torch's collectives as it is.
_CONTIGUOUS_ONLY = {"not contiguous": "torch's collectives refuse tensors that are not contiguous"}


def of_accelerate(device: str) -> Mapping[str, Exchange]:
    """Return accelerate's functions, which use the process group of an ``Accelerator``.

    https://huggingface.co/docs/accelerate/package_reference/utilities

    Args:
        device: ``cpu`` or that of this rank.
    """
    from accelerate import Accelerator

    tracker = _tracker()
    accelerator = Accelerator(cpu=device == "cpu", log_with=tracker)
    accelerator.init_trackers("exchanges")

    def log(value: int) -> Any:
        accelerator.log({"value": value})
        return tracker.value

    return {
        "log": Exchange(log, OnRank(0)),
        **_collectives_of_accelerate(accelerator),
        **_padding_of_accelerate(accelerator),
        **_splitting_of_accelerate(accelerator),
        **_decorators_of_accelerate(accelerator),
        "LocalSGD": Exchange(
            functools.partial(_averaged_by_local_sgd, accelerator),
            Reduces("mean", containers=False),
        ),
    }


def _tracker() -> Any:
    """Return a tracker that keeps the last value that it is given, on the main process alone.

    https://huggingface.co/docs/accelerate/usage_guides/tracking#implementing-custom-trackers
    """
    from accelerate.tracking import GeneralTracker

    class KeepsValue(GeneralTracker):  # type: ignore[misc] # of a library without types
        name = "keeps_value"
        requires_logging_directory = False
        main_process_only = True
        value: Any = None

        @property
        def tracker(self) -> Any:
            """Return what accelerate's ``get_tracker`` hands out."""
            return self

        def store_init_configuration(self, values: Mapping[str, Any]) -> None:
            """Keep nothing of the configuration."""

        def log(self, values: Mapping[str, Any], step: int | None = None, **more: Any) -> None:
            """Keep the value."""
            del step, more
            self.value = values["value"]

    return KeepsValue()


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
        "broadcast": Exchange(broadcast, Broadcasts(), _CONTIGUOUS_ONLY, in_place=True),
        "broadcast from the last rank": Exchange(
            from_last, Broadcasts(-1), _CONTIGUOUS_ONLY, in_place=True
        ),
        "broadcast_object_list": Exchange(broadcast_object_list, BroadcastsLists(), in_place=True),
        "set_trigger": Exchange(trigger, AnyRank()),
    }
    for operation in ("sum", "mean", "max"):
        reduce = functools.partial(accelerator.reduce, reduction=operation)
        exchanges[f"reduce(reduction={operation!r})"] = Exchange(reduce, Reduces(operation))
    return exchanges


def _padding_of_accelerate(accelerator: Any) -> dict[str, Exchange]:
    """Return ``pad_across_processes`` and ``pad_input_tensors`` with several arguments."""
    from accelerate.utils import find_batch_size, pad_input_tensors

    pad = accelerator.pad_across_processes

    def fill(value: Any) -> Any:
        return pad_input_tensors(value, find_batch_size(value), accelerator.num_processes)

    def fill_columns(value: Any) -> Any:
        first = value["x"] if isinstance(value, dict) else value
        return pad_input_tensors(value, first.shape[1], accelerator.num_processes, dim=1)

    return {
        "pad_across_processes": Exchange(pad, Pads()),
        "pad_across_processes(dim=1)": Exchange(functools.partial(pad, dim=1), Pads(dim=1)),
        "pad_across_processes(dim=-1, pad_index=-100)": Exchange(
            functools.partial(pad, dim=-1, pad_index=-100), Pads(dim=-1, padding=-100)
        ),
        "pad_across_processes(pad_first=True)": Exchange(
            functools.partial(pad, pad_first=True), Pads(first=True)
        ),
        "pad_input_tensors": Exchange(fill, Fills()),
        "pad_input_tensors(dim=1)": Exchange(fill_columns, Fills(dim=1)),
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

    def call(decorate: Callable[..., Any], value: Any) -> Any:
        function = decorate(lambda: value)
        return function()

    on_rank_1 = functools.partial(accelerator.on_process, process_index=1)
    # Those of local ranks are left out: on several machines, or on a shared GPU, several ranks have
    # the same local rank.
    decorators = {
        "on_main_process": (accelerator.on_main_process, OnRank(0)),
        "on_last_process": (accelerator.on_last_process, OnRank(-1)),
    }
    # A process alone runs every function, whatever its index is.
    if accelerator.num_processes > 1:
        decorators["on_process(process_index=1)"] = (on_rank_1, OnRank(1))
    exchanges: dict[str, Exchange] = {}
    for name, (decorate, contract) in decorators.items():
        exchanges[name] = Exchange(functools.partial(call, decorate), contract)
    return exchanges


def _averaged_by_local_sgd(accelerator: Any, tensor: torch.Tensor) -> Any:
    """Return the parameter of a model that is this tensor on this rank, after a step of LocalSGD.

    LocalSGD averages the models of all ranks.
    https://huggingface.co/docs/accelerate/usage_guides/local_sgd
    """
    import torch
    from accelerate.local_sgd import LocalSGD

    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(tensor.detach().clone())
    prepared = accelerator.prepare(model)
    with torch.no_grad():
        # DDP has given all ranks the values of rank 0.
        model.weight.copy_(tensor)
    with LocalSGD(accelerator=accelerator, model=prepared, local_sgd_steps=1) as local_sgd:
        local_sgd.step()
    return model.weight.detach()


def of_trainer(device: str) -> Mapping[str, Exchange]:
    """Return what users of ``Trainer`` call in its callbacks and metrics.

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
    """Return functions of ``deepspeed.comm``, which wrap torch's collectives, and of ``zero``.

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

    modified = functools.partial(_modified_by_last, ranks - 1)
    all_reduce_max = functools.partial(comm.all_reduce, op=comm.ReduceOp.MAX)
    broadcast = functools.partial(comm.broadcast, src=ranks - 1)
    broadcast_object_list = functools.partial(comm.broadcast_object_list, src=0)
    summed = Reduces("sum", containers=False)
    largest = Reduces("max", containers=False)
    from_last = Broadcasts(-1, containers=False)
    return {
        "all_gather": Exchange(all_gather, Gathers(containers=False)),
        "all_gather_object": Exchange(all_gather_object, GathersLists()),
        "all_reduce": Exchange(comm.all_reduce, summed, in_place=True),
        "all_reduce(op=MAX)": Exchange(all_reduce_max, largest, in_place=True),
        "inference_all_reduce": Exchange(comm.inference_all_reduce, summed, in_place=True),
        "broadcast": Exchange(broadcast, from_last, _CONTIGUOUS_ONLY, in_place=True),
        "broadcast_object_list": Exchange(broadcast_object_list, BroadcastsLists(), in_place=True),
        "GatheredParameters(modifier_rank=-1)": Exchange(
            modified,
            Broadcasts(-1, containers=False, dtypes=_ZERO_DTYPES),
            dict.fromkeys(("scalar", "not contiguous"), _VIEWED_AS_BYTES),
        ),
    }


def _modified_by_last(last: int, tensor: torch.Tensor) -> Any:
    """Return a sharded parameter into which the last rank alone has written its tensor.

    https://deepspeed.readthedocs.io/en/latest/zero3.html#gathering-parameters

    Args:
        last: That rank.
        tensor: This rank's tensor.
    """
    import torch
    from deepspeed import comm, zero

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    with zero.Init(config_dict_or_path=config, dtype=tensor.dtype):
        model = torch.nn.ParameterList([torch.zeros_like(tensor.detach())])
    (parameter,) = model.parameters()
    with zero.GatheredParameters([parameter], modifier_rank=last):
        if comm.get_rank() == last:
            parameter.data.copy_(tensor)
    with zero.GatheredParameters([parameter]):
        return parameter.detach().clone()

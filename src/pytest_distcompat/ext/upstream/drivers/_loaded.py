"""Option ``loaded``: models that a trainer makes or reads itself.

Most tests give the trainer a model that exists. Users often have the trainer's library make it, for
example by ``from_pretrained``. A cell, one configuration under test, does so with option
``loaded``: ``zero3-fp32-w2-loaded_from_pretrained``. Its values: ``given`` (the default),
``from_pretrained`` (from files), ``from_backbone`` (from files without the head, which is drawn
anew), ``from_config``, ``zero_init`` (under ``deepspeed.zero.Init``). A cell's option ``set`` may
have further arguments of these calls, ``cell.settings("from_pretrained")``, and have a model resize
its embeddings, ``cell.settings("resize_token_embeddings")``. ``cell.with_settings`` adds such
arguments to others.

The drivers, classes by which trainers are tested, call it: ``unsupported_reason`` at collection,
``make`` in ``build`` on each rank. The new model gets the values of the given one, so that the
reference, which trains in one process, has the same. Where the reading itself changes values
(``changes_values``), ``build_model`` already calls ``read``, in the reference too.

ZeRO-3 partitions the parameters of such a model one by one, while it is made or read:
https://huggingface.co/docs/transformers/deepspeed,
https://deepspeed.readthedocs.io/en/latest/zero3.html
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_distcompat.ext.upstream.sweep.fields import Source
from pytest_distcompat.parallel.reasons import first_reason
from pytest_distcompat.strategies import STRATEGIES

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.cell import Cell
    from pytest_distcompat.models import TinyModel
    from pytest_distcompat.precisions import Precision

#: The seed of weights that are not in the files. All ranks have the same, as users seed it.
SEED = 1


def sources(*strategies: str) -> tuple[Source, ...]:
    """Return the calls of transformers on a model whose arguments a cell can set.

    They make, change and write it. A driver adds them to its ``sources``; the cell's setting
    ``from_pretrained.low_cpu_mem_usage=true``, for example, is an argument of the first.

    Args:
        strategies: The strategies under which they are set.
    """
    model = "transformers.PreTrainedModel"
    return (
        Source("from_pretrained", f"{model}.from_pretrained", strategies),
        Source("resize_token_embeddings", f"{model}.resize_token_embeddings", strategies),
        Source("save_pretrained", f"{model}.save_pretrained", strategies),
    )


def unsupported_reason(cell: Cell, tiny: TinyModel) -> str | None:
    """Return why the trainer cannot make the cell's model itself; None if it can or need not."""
    loaded = cell.option("loaded")
    if loaded == "given":
        return None
    # ``preload`` has the modules that the model needs.
    of_transformers = "transformers" in tiny.preload
    partitions = STRATEGIES.get(cell.strategy).zero_stage == 3
    return first_reason(
        (
            loaded == "zero_init" and not partitions,
            "zero.Init partitions parameters, which ZeRO-3 alone does",
        ),
        (
            loaded == "zero_init" and of_transformers,
            "a model of transformers enters zero.Init by itself: from_pretrained and from_config",
        ),
        (
            loaded != "zero_init" and not of_transformers,
            f"transformers makes models of its own, and {tiny.name} is not one",
        ),
        (
            loaded == "from_config" and tiny.extra_state,
            "a config has no extra state",
        ),
        (
            tiny.random,
            f"no file has the hooks by which {tiny.name} drops activations",
        ),
        (
            bool(cell.option("float32_norms")),
            "a model that transformers makes has one dtype",
        ),
        (
            cell.own_disks,
            "all ranks read the same files",
        ),
        (
            bool(cell.option("meta_init")),
            "both say how the model is made",
        ),
        (
            cell.option("lora") == "int8",
            "it is tried with models that are not quantized",
        ),
        (
            cell.tp * cell.ep * cell.pp * cell.cp > 1,
            "it is tried with data parallel ranks alone",
        ),
    )


def changes_values(cell: Cell) -> bool:
    """Tell whether the model that is read has other values than its files.

    So have layers that are not in the files, or have another size there.
    """
    if cell.option("loaded") == "from_backbone":
        return True
    return bool(cell.settings("resize_token_embeddings")) or _has_other_sizes(cell)


def make(
    cell: Cell,
    precision: Precision,
    base: Any,
    make_anew: Callable[[], Module],
    *,
    zero_config: Mapping[str, Any] | None,
    run_directory: Path | None,
) -> Module:
    """Return a new model with the values of another one, made as option ``loaded`` says.

    Args:
        cell: The cell.
        precision: Its precision, whose load dtype the model gets.
        base: The other model, without an adapter.
        make_anew: Returns a model of this kind.
        zero_config: DeepSpeed's JSON, for ``zero_init``.
        run_directory: The directory of the run, in which ranks share files. One process needs none.
    """
    import torch

    loaded = cell.option("loaded")
    if loaded == "zero_init":
        import deepspeed

        settings = cell.with_settings("zero_init", {"config_dict_or_path": zero_config})
        with deepspeed.zero.Init(**settings):
            made = make_anew()
    elif loaded == "from_config":
        from transformers import AutoModelForCausalLM

        settings = {"dtype": getattr(torch, precision.load)}
        made = AutoModelForCausalLM.from_config(
            copy.deepcopy(base.config), **cell.with_settings("from_config", settings)
        )
    else:
        return read(cell, precision, base, run_directory)
    fill(made, base)
    return made


def read(cell: Cell, precision: Precision, base: Any, run_directory: Path | None) -> Module:
    """Write a model's files and read them, as option ``loaded`` and the cell's settings say.

    Args:
        cell: The cell.
        precision: Its precision, whose load dtype the model gets.
        base: The model, without an adapter.
        run_directory: The directory of the run, in which ranks share files. One process needs none.
    """
    import torch

    with _shared_directory(run_directory, "loaded") as directory:
        written = base
        if cell.option("loaded") == "from_backbone":
            written = base.base_model
        if _has_other_sizes(cell):
            # The files get one row more than the model has, which must then draw embeddings anew.
            written = copy.deepcopy(written)
            written.resize_token_embeddings(written.config.vocab_size + 1)
        written.save_pretrained(directory, **cell.settings("save_pretrained"))
        # transformers may have written on rank 0 alone.
        _wait_for_all_ranks()
        torch.manual_seed(SEED)
        settings = {"dtype": getattr(torch, precision.load)}
        if written is not base:
            # The files have the config of what was written.
            settings["config"] = copy.deepcopy(base.config)
        model: Any = type(base).from_pretrained(
            directory, **cell.with_settings("from_pretrained", settings)
        )
    resizing = cell.settings("resize_token_embeddings")
    if resizing:
        model.resize_token_embeddings(**resizing)
    # It comes in evaluation mode.
    made: Module = model.train()
    return made


@contextlib.contextmanager
def _shared_directory(run_directory: Path | None, name: str) -> Iterator[Path]:
    """Give a directory that all ranks of the process group share, until all are done with it.

    Without a group, or with one rank, it is a temporary one.

    Args:
        run_directory: The directory of the run, which pytest removes with it. One process needs
            none.
        name: The name of the directory there.
    """
    from torch import distributed

    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        with tempfile.TemporaryDirectory() as directory:
            yield Path(directory)
        return
    assert run_directory is not None
    yield run_directory / name
    distributed.barrier()


def _wait_for_all_ranks() -> None:
    """Wait until all ranks of the process group are here; return at once without a group."""
    from torch import distributed

    if distributed.is_initialized():
        distributed.barrier()


def _has_other_sizes(cell: Cell) -> bool:
    """Tell whether the files are to have embeddings of another size than the model that is read.

    It is so in cells with the setting ``from_pretrained.ignore_mismatched_sizes=true``, by which
    transformers draws such embeddings anew.
    """
    return bool(cell.settings("from_pretrained").get("ignore_mismatched_sizes"))


def fill(made: Module, base: Module) -> None:
    """Copy what random numbers made of ``base`` into ``made``, which has parts of it under ZeRO-3.

    A parameter that has one value everywhere is no such: ``made`` is to have that value itself.
    """
    values = dict(base.named_parameters())
    for name, parameter in made.named_parameters():
        if _has_one_value(values[name]):
            continue
        whole: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        # ZeRO-3 has marked and partitioned the parameter. While it is gathered it is whole, and
        # what rank 0 writes is partitioned again.
        if hasattr(parameter, "ds_id"):
            import deepspeed

            whole = deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)
        with whole:
            parameter.data.copy_(values[name].data)


def _has_one_value(parameter: torch.Tensor) -> bool:
    """Tell whether the elements of a parameter, two at least, are equal: those of a norm are 1."""
    if parameter.numel() < 2:
        return False
    return bool(parameter.min() == parameter.max())


def with_adapter(model: Module, given: Any, run_directory: Path | None) -> Module:
    """Return the model with the adapter of ``given``, a model of PEFT: it is written and read."""
    from peft import PeftModel

    with _shared_directory(run_directory, "adapter") as directory:
        given.save_pretrained(directory)
        _wait_for_all_ranks()
        adapted: Module = PeftModel.from_pretrained(
            model, directory, is_trainable=True, autocast_adapter_dtype=False
        )
    return adapted

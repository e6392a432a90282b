"""Why a cell cannot be run with a tiny model: rules about models, options, precisions, 8 bits.

A cell is one configuration under test, such as ``fsdp2-bf16_upcast-w2-lora``: strategy, precision,
number of ranks, options. ``TinyDriver._reasons`` (``tiny.py``), the base of the built-in drivers
(classes by which trainers are tested), asks these functions before any rank is started. Each
returns one sentence, which reports show for the skipped cell, or None if its rules have nothing
against the cell. They are tables of (condition, reason); the first condition that holds decides.

A ``TinyModel`` describes the model of the cell, and what libraries can do with it (``models``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_distcompat.cost import QUANTIZED_FROM
from pytest_distcompat.installed import has_compiler
from pytest_distcompat.models import TinyModel
from pytest_distcompat.parallel.reasons import first_reason
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.strategies import STRATEGIES

if TYPE_CHECKING:
    from pytest_distcompat.cell import Cell


def model_reason(cell: Cell, tiny: TinyModel, device: str) -> str | None:
    """Return why the model cannot be trained in the cell on that kind of device; None if it can."""
    replicated = cell.option("dp_replicate") != 1
    other_parallelism = cell.dp_size < cell.world_size or cell.ep > 1 or replicated
    return first_reason(
        (
            # A model for one driver alone has experts of that driver's library.
            cell.own_disks and (other_parallelism or bool(tiny.driver)),
            (
                "checkpoints on each node are tried with plain data parallel ranks alone, "
                "without experts"
            ),
        ),
        (bool(tiny.unsupported_reason), tiny.unsupported_reason),
        (device == "cpu" and bool(tiny.not_on_cpu), tiny.not_on_cpu),
        (
            tiny.only_zero and STRATEGIES.get(cell.strategy).zero_stage is None,
            f"a DeepSpeed engine alone knows when the gradients of {tiny.name} are whole",
        ),
    )


def options_reason(cell: Cell, tiny: TinyModel, driver: str) -> str | None:
    """Return why the cell's options do not go with its model or the driver; None if they do.

    Re-entrant recomputation runs a backward pass of its own for each block, which excludes several
    other options.

    Args:
        cell: The cell.
        tiny: Its model.
        driver: The driver's name: ``torch``, ``accelerate``, ``trainer`` or ``deepspeed``.
    """
    compiled = bool(cell.option("compile"))
    by_accelerate = driver in {"accelerate", "trainer"}
    plain_torch = driver == "torch" and cell.pp == 1 and not compiled
    # DeepSpeed's own function is re-entrant too, and is given the blocks as they are.
    by_deepspeed = cell.option("activation_checkpointing") == "deepspeed"
    reentrant = cell.option("activation_checkpointing") == "reentrant" or by_deepspeed
    # LoRA freezes the model too. PEFT then has its inputs require gradients
    # (``_prepare_model_for_gradient_checkpointing``), which suffices but with DeepSpeed's function.
    partly_frozen = bool(cell.option("frozen")) or (by_deepspeed and bool(cell.option("lora")))
    # Models of transformers have the inputs of recomputed blocks require gradients themselves
    # (``enable_input_require_grads``), unless the driver recomputes the blocks.
    by_driver = by_deepspeed or driver == "torch" or "transformers" not in tiny.preload
    return first_reason(
        (
            cell.option("compile") is True and not has_compiler(),
            "inductor needs a C++ compiler, and there is none",
        ),
        (
            # accelerate.utils.compile_regions compiles the whole of any other model.
            cell.option("compile") == "regional" and tiny.one_block and by_accelerate,
            f"accelerate compiles by region blocks that repeat, and {tiny.name} has one block",
        ),
        (
            cell.option("compile") == "regional" and tiny.layers is not None and by_accelerate,
            f"accelerate compiles by region the blocks of a ModuleList, and {tiny.name} has none",
        ),
        (
            bool(cell.option("ignored_modules")) and not tiny.ignored_module,
            f"the model {tiny.name} has no frozen module to leave out of the sharding",
        ),
        (
            bool(cell.option("lora")) and not tiny.lora_targets,
            f"PEFT is for transformers' models, and {tiny.name} is not one",
        ),
        (
            cell.option("activation_checkpointing") == "selective" and not plain_torch,
            (
                "selective activation checkpointing is driven by the torch driver alone, "
                "uncompiled and without stages"
            ),
        ),
        (
            by_deepspeed and driver != "deepspeed",
            "deepspeed.checkpointing is driven by the deepspeed driver alone",
        ),
        (
            reentrant and cell.pp > 1,
            (
                "a stage asks for gradients by autograd.grad, which torch refuses for re-entrant "
                "recomputation"
            ),
        ),
        (
            reentrant and compiled,
            "torch.compile makes no graph of what is recomputed re-entrantly",
        ),
        (
            reentrant and tiny.name == "twice",
            (
                "each use of a block has a backward pass of its own, which DDP's documentation "
                "excludes, and FSDP and ZeRO-3 fail"
            ),
        ),
        (
            reentrant and partly_frozen and by_driver,
            (
                "behind a frozen part no input has a gradient, and re-entrant recomputation then "
                "has none, says its documentation"
            ),
        ),
    )


def dtypes_reason(cell: Cell, tiny: TinyModel) -> str | None:
    """Return why the cell's precision does not go with its model or options; None if it does."""
    precision = PRECISIONS.get(cell.precision)
    # A mixed precision computes in another dtype than the optimizer works in (``master``); ``load``
    # is the dtype in which the model is made.
    bf16_gradients = precision.mixed and precision.compute == "bfloat16"
    low_products = precision.mixed and precision.compute != "float32"
    loads_low = precision.mixed and precision.load != "float32"
    return first_reason(
        (
            cell.precision == "fp8" and not tiny.in_8_bits,
            (
                f"the model {tiny.name} has no layer whose sizes 16 divides: "
                "nothing would be in 8 bits"
            ),
        ),
        (
            tiny.only_float32 and precision.compute != "float32",
            f"the statistics of the few rows of model {tiny.name} turn on rounding",
        ),
        (
            bool(cell.option("ignored_modules")) and precision.compute != precision.load,
            (
                f"a module that is left out computes in {precision.load}, as it was loaded, "
                f"the others in {precision.compute}"
            ),
        ),
        (
            bool(cell.option("float32_norms")) and not loads_low,
            f"{cell.precision} has one dtype for all parameters",
        ),
        (
            cell.option("grad_accum_dtype") == "fp32" and not bf16_gradients,
            (
                f"{cell.precision} has no bfloat16 gradients with float32 masters, "
                "so there is no other dtype to sum them in"
            ),
        ),
        (
            cell.option("reduce_dtype") == "fp32" and not low_products,
            (
                f"{cell.precision} has one dtype for products and optimizer, "
                "in which gradients travel"
            ),
        ),
        (
            bool(cell.option("param_groups")) and not cell.option("use_orig_params"),
            "a flat parameter cannot be split into param groups",
        ),
    )


def quantized_state_reason(
    cell: Cell, tiny: TinyModel, masters: str, device: str, *, flat: bool
) -> str | None:
    """Return why an 8-bit optimizer cannot step in the cell, or would keep no state in 8 bits.

    Args:
        cell: The cell, with ``optimizer`` at ``adam8bit``.
        tiny: Its model.
        masters: Dtype of the parameters that the optimizer updates: ``float32``.
        device: Kind of the ranks' devices: ``cpu`` or ``cuda``.
        flat: Whether these parameters are flat partitions of several, as under FSDP1 and ZeRO.
    """
    # Over how many ranks each tensor is split.
    shards = 1
    if STRATEGIES.get(cell.strategy).shards:
        shards = cell.dp_size * cell.tp // int(cell.option("dp_replicate"))
    return first_reason(
        (
            flat,
            (
                f"torchao silently keeps state in float32 where {cell.strategy}'s flat shards are "
                "no multiple of its blocks"
            ),
        ),
        (
            cell.strategy == "zero0",
            (
                "DeepSpeed loads with a function for map_location, which torch refuses for "
                "torchao's tensors"
            ),
        ),
        (
            cell.strategy == "fsdp2" and masters != "float32",
            (
                "AdamW8bit cannot step on DTensors of bfloat16: "
                "lerp says 'expected dtype torch.bfloat16 for `end`'"
            ),
        ),
        (
            # State would be in float32, and the cell would test nothing.
            tiny.largest // shards < QUANTIZED_FROM,
            (
                f"torchao quantizes state from {QUANTIZED_FROM} elements on a rank on: "
                f"no part of model {tiny.name} has so many"
            ),
        ),
        (
            bool(cell.option("compile")) and device == "cpu",
            (
                "AdamW8bit compiles its step, on the CPU for minutes, so that nothing is compiled "
                "there beside it"
            ),
        ),
    )


def quantized_base_reason(cell: Cell, driver: str) -> str | None:
    """Return why the cell cannot train an adapter on a quantized model; None if it can.

    That is option ``lora`` at ``int8``. The reasons were seen with torchao 0.18.

    Args:
        cell: The cell.
        driver: The driver's name, ``torch``.
    """
    broadcasts_parameters = cell.strategy == "fsdp1" or (
        cell.strategy == "ddp" and driver != "torch"
    )
    return first_reason(
        (
            cell.strategy == "fsdp2",
            (
                "fully_shard cuts parameters by aten.split, which is 'unimplemented' for torchao's "
                "Int8Tensor"
            ),
        ),
        (
            broadcasts_parameters,
            (
                "FSDP1, and DDP unless its init_sync is False, for which accelerate has no "
                "argument, broadcast parameters by aten.view, which is 'unimplemented' for "
                "torchao's Int8Tensor"
            ),
        ),
        (
            cell.strategy != "ddp",
            (
                "DeepSpeed casts the model, and torchao's Int8Tensor does not allow it: "
                "'Couldn't swap Linear.weight'"
            ),
        ),
        (
            cell.precision not in {"fp32", "bf16_upcast"} or bool(cell.option("compile")),
            "an adapter on a quantized model is tried in fp32 and bf16_upcast alone, uncompiled",
        ),
        (
            bool(cell.option("save_only_model")),
            "torchao's Int8Tensor takes no copy of a plain tensor, which DCP reads it as",
        ),
    )

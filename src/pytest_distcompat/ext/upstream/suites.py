"""The built-in suites: which cells of four common libraries are tested, with tiny models.

``pytest --pyargs pytest_distcompat.suite`` collects them: the module ``suite`` imports them from
here. Each class names its driver, by which a library's trainer is tested, and a matrix of cells.
A cell is one configuration, with an id: ``Matrix(("fsdp2",), ("fp32",), options=({"tp": 2},))``
has the one cell ``fsdp2-fp32-w2-tp_2`` on two ranks (``w2``, the session's default). Of each cell
pytest gets an item for each check: ``TestTorch::test[fsdp2-fp32-w2-tp_2:names]``.

The base class ``CompatSuite`` makes the items. A matrix has all combinations of its strategies,
precisions and sets of options; ``extra`` adds single cells or further matrices. It is kept to what
may fail in a way of its own, as each cell takes seconds; the profiles ``pairwise`` and ``full``
test more. A matrix with ``world_sizes`` keeps its number of ranks whatever the session's default
is: with ``tp=2`` there is one data-parallel rank among 2 ranks, and there are two among 4.

Option ``model`` names a tiny model: ``mlp`` is the quickest; ``twice`` runs one block two times;
``odd`` has an empty parameter, one of a single number and buffers of many dtypes;
``llama_calibrated`` has extra state; half of the ranks leave out a layer of ``branch`` in each
step; ``tiled`` has a backward pass in the backward pass; under tensor parallelism what lies between
the layers of ``heads`` are DTensors.
Without the option it is a Llama. Under ``conflict`` DeepSpeed's JSON asks for another precision
than the trainer, which must win or be refused.

``SLICE`` has the cells with single settings of the libraries (``sweep/slice.py``) that every
session tests, as ``zero2-fp32-w2-model_mlp-set_ds_config...``.
"""

from __future__ import annotations

from pytest_distcompat.cell import Cell, Matrix
from pytest_distcompat.compat_suite import CompatSuite
from pytest_distcompat.ext.upstream.sweep.slice import SLICE


class TestTorch(CompatSuite):
    """Suite of plain torch, by its documented API."""

    driver = "torch"
    matrix = Matrix(
        ("ddp", "fsdp1", "fsdp2"),
        ("fp32", "bf16_upcast"),
        extra=(
            *map(Cell.parse, SLICE["torch"]),
            Matrix(("fsdp2",), ("bf16_pure", "fp16_mixed", "fp8")),
            # Over all suites each model is once under each strategy, and once with each driver.
            Matrix(("fsdp1",), ("bf16_upcast",), options=({"model": "mlp"},)),
            Matrix(("fsdp2",), ("bf16_upcast",), options=({"model": "llama_tied"},)),
            Matrix(
                ("fsdp2",),
                ("fp32",),
                options=(
                    # By inductor; accelerate's suite compiles blocks. To compile a Llama takes
                    # every rank many seconds.
                    {"compile": True, "model": "mlp"},
                    {"activation_checkpointing": True},
                    {"cpu_offload": True},
                    {"meta_init": True},
                    {"save_only_model": True},
                    {"async_save": True, "model": "dropout"},
                    {"ema": True, "model": "mlp"},
                    {"model": "moe"},
                ),
            ),
            Matrix(
                ("fsdp1",),
                ("fp32",),
                options=(
                    {"state_dict": "full"},
                    {"use_orig_params": False},
                    {"ema": True, "model": "mlp"},
                ),
            ),
            Matrix(
                ("fsdp1",),
                ("fp32",),
                world_sizes=(4,),
                options=({"dp_replicate": 2, "model": "mlp"},),
            ),
            Matrix(("fsdp2",), ("fp32",), world_sizes=(4,), options=({"tp": 2},)),
            Matrix(
                ("fsdp2",),
                ("fp32",),
                world_sizes=(2,),
                options=(
                    {"pp": 2},
                    {"model": "dropout", "tp": 2},
                    # Its operators between split layers see DTensors.
                    {"model": "heads", "frozen": True, "tp": 2},
                ),
            ),
            Matrix(
                ("fsdp2",),
                ("fp32",),
                world_sizes=(2,),
                options=({"cp": 2}, {"model": "moe_fused", "ep": 2}),
            ),
        ),
    )


class TestAccelerate(CompatSuite):
    """Suite of accelerate, with every strategy."""

    driver = "accelerate"
    matrix = Matrix(
        precisions=("fp32", "bf16_upcast"),
        extra=(
            *map(Cell.parse, SLICE["accelerate"]),
            Matrix(("fsdp2", "zero2"), ("bf16_pure", "fp16_mixed", "fp8")),
            Matrix(
                ("fsdp2",),
                ("bf16_upcast",),
                options=(
                    {"model": "mlp"},
                    {"float32_norms": True},
                    {"reduce_dtype": "fp32", "model": "mlp"},
                    # Rank 0 alone has the weights, in bfloat16; all get their shards in float32.
                    {"cpu_ram_efficient_loading": True},
                ),
            ),
            Matrix(("fsdp1",), ("bf16_upcast",), options=({"model": "llama_tied"},)),
            Matrix(
                ("fsdp2",),
                ("fp32",),
                options=(
                    {"compile": "aot_eager", "model": "mlp"},
                    {"compile": "regional", "model": "mlp"},
                    {"activation_checkpointing": True},
                    {"grad_accum": 2},
                    {"reshard_after_forward": False},
                    {"cpu_ram_efficient_loading": True},
                    {"wrap_policy": "size"},
                    {"frozen": True},
                    {"lora": True, "model": "convolutions"},
                    {"param_groups": True},
                    {"ignored_modules": True, "model": "mlp"},
                    {"ema": True, "model": "mlp"},
                ),
            ),
            Matrix(
                ("fsdp1",),
                ("fp32",),
                options=({"activation_checkpointing": True}, {"use_orig_params": False}),
            ),
            Matrix(
                ("fsdp2",),
                ("bf16_upcast",),
                world_sizes=(4,),
                options=({"dp_replicate": 2, "model": "mlp"},),
            ),
            Matrix(
                ("ddp",),
                ("fp32",),
                options=(
                    {"grad_accum": 2},
                    {"compile": "aot_eager", "model": "mlp"},
                    {"model": "dropout"},
                    {"model": "branch"},
                ),
            ),
            Matrix(
                ("zero2",),
                ("fp32",),
                options=({"grad_accum": 2}, {"activation_checkpointing": True}),
            ),
            Matrix(("zero2",), ("fp32",), world_sizes=(2,), options=({"cp": 2},)),
            Matrix(
                ("zero3",),
                ("bf16_upcast",),
                options=({"cpu_offload": True}, {"conflict": True}, {"grad_accum": 2}),
            ),
            # The average is of the whole weights, which each rank gathers.
            Matrix(("zero3",), ("fp32",), options=({"ema": True, "model": "mlp"},)),
            # transformers makes it anew under ``zero.Init``; a layer initializes one in it.
            Matrix(
                ("zero3",), ("fp32",), options=({"loaded": "from_config", "model": "hf:afmoe"},)
            ),
        ),
    )


class TestTrainer(CompatSuite):
    """Suite of transformers.Trainer."""

    driver = "trainer"
    matrix = Matrix(
        ("ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"),
        ("fp32", "bf16_upcast"),
        extra=(
            *map(Cell.parse, SLICE["trainer"]),
            Matrix(
                ("ddp",),
                ("fp32",),
                options=(
                    {"grad_accum": 2},
                    {"model": "dropout"},
                    {"packed": True},
                    # An encoder and a decoder, whose labels are of all tokens of the decoder.
                    {"model": "hf:CanaryForConditionalGeneration"},
                ),
            ),
            Matrix(
                ("fsdp2",),
                ("fp32",),
                options=(
                    {"state_dict": "full"},
                    {"compile": "aot_eager", "model": "mlp"},
                    {"lora": True},
                    {"save_only_model": True},
                    # Extra state is in a state dict beside parameters and buffers.
                    {"model": "llama_calibrated", "save_only_model": True, "state_dict": "full"},
                ),
            ),
            # Most adapters are trained in bfloat16.
            Matrix(("fsdp2",), ("bf16_upcast",), options=({"lora": True},)),
            Matrix(
                ("fsdp2",),
                ("fp32",),
                world_sizes=(2,),
                options=(
                    {"save_only_model": True, "tp": 2},
                    {"save_only_model": True, "ep": 2, "model": "hf:gpt_oss"},
                ),
            ),
            # Two groups of two ranks. The ranks of a group hold the parts of each layer (``tp``),
            # and FSDP2 shards these parts over the groups.
            Matrix(
                ("fsdp2",),
                ("fp32",),
                world_sizes=(4,),
                options=({"save_only_model": True, "tp": 2},),
            ),
            Matrix(("fsdp2",), ("fp16_mixed",)),
            Matrix(("zero2",), ("bf16_upcast",), options=({"grad_accum": 2}, {"conflict": True})),
            Matrix(("zero2",), ("fp32",), world_sizes=(2,), options=({"cp": 2},)),
        ),
    )


class TestDeepSpeed(CompatSuite):
    """Suite of DeepSpeed, by its own engine."""

    driver = "deepspeed"
    matrix = Matrix(
        ("zero0", "zero1", "zero2", "zero3"),
        ("fp32", "bf16_upcast"),
        extra=(
            *map(Cell.parse, SLICE["deepspeed"]),
            Matrix(("zero2",), ("bf16_pure", "fp16_mixed", "fp8")),
            # An overflow stays on one rank where the optimizer is partitioned and the gradients are
            # not. Without ZeRO another optimizer scales gradients.
            Matrix(("zero0", "zero1"), ("fp16_mixed",)),
            # Pipelines: two layers with one weight, so that two stages add up its gradients.
            Matrix(
                ("zero0",), ("fp32",), world_sizes=(4,), options=({"pp": 2, "model": "layers"},)
            ),
            Matrix(
                ("zero1",),
                ("fp32", "bf16_upcast"),
                world_sizes=(2,),
                options=({"pp": 2, "model": "layers_tied"},),
            ),
            Matrix(
                ("zero1",), ("fp32",), world_sizes=(4,), options=({"pp": 2, "model": "layers"},)
            ),
            Matrix(
                ("zero3",),
                ("bf16_upcast",),
                options=({"model": "mlp"}, {"model": "llama_tied"}),
            ),
            Matrix(
                ("zero2",),
                ("fp32",),
                options=(
                    {"compile": "aot_eager", "model": "mlp"},
                    {"lora": True},
                    {"model": "odd"},
                    {"model": "tiled"},
                ),
            ),
            Matrix(
                ("zero3",),
                ("fp32",),
                options=(
                    {"activation_checkpointing": "deepspeed", "model": "mlp"},
                    {"model": "twice"},
                ),
            ),
            Matrix(
                ("zero1",),
                ("bf16_upcast",),
                options=({"grad_accum_dtype": "fp32"}, {"reduce_dtype": "fp32"}),
            ),
            Matrix(
                ("zero0",),
                ("bf16_upcast",),
                options=(
                    {"frozen": True},
                    {"grad_accum": 2},
                    # DeepSpeed refuses it, and must say so: a known issue declares the refusal.
                    {"grad_accum_dtype": "fp32"},
                ),
            ),
            Matrix(("zero1",), ("fp32",), world_sizes=(4,), options=({"tp": 2},)),
            Matrix(("zero2",), ("fp32",), world_sizes=(4,), options=({"cp": 2},)),
            Matrix(
                ("zero2",),
                ("fp32",),
                world_sizes=(2,),
                options=({"model": "moe_deepspeed", "ep": 2},),
            ),
        ),
    )

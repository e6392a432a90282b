"""Why a cell cannot be run by Trainer: rules of Trainer, and of models that are loaded in parts.

A cell is one configuration under test, such as ``fsdp2-fp32-w2-tp_2``: strategy, precision, number
of ranks, options. ``TrainerDriver._reasons`` (``trainer.py``) asks this module before any rank is
started. ``trainer_reason`` and ``in_parts_reason`` return one sentence, which reports show for the
skipped cell, or None if Trainer can run it.

*In parts* is a model of which each rank reads its part of the weights from files: transformers
shards it so for tensor parallelism (``tp``) and expert parallelism (``ep``). The tables EXPERTS and
LAYERS say of which models, and which of their layers it splits; the driver passes them on to checks
and to the rules of ``parallel/``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_distcompat.ext.upstream.drivers import _options
from pytest_distcompat.models import model_of
from pytest_distcompat.parallel.reasons import first_reason

if TYPE_CHECKING:
    from pytest_distcompat.cell import Cell

#: Model -> the name of the modules of experts that transformers' plan spreads over ranks. The files
#: of other models name each expert by itself, and cannot be tested in this way.
EXPERTS = {
    "hf:gpt_oss": "model.layers.*.mlp.experts",
    "hf:granitemoe_swa": "model.layers.*.block_sparse_moe.experts",
}
#: Model with experts -> name of a layer -> how transformers' plan of tensor parallelism splits it.
#: The plan of gpt_oss splits the last layer alone, so that it is not in this table.
LAYERS = {
    "hf:granitemoe_swa": {
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
    }
}
#: Options that were tried on a model that transformers cuts while it loads it.
BESIDE = frozenset(
    {"model", "tp", "ep", "save_only_model", "grad_accum", "activation_checkpointing"}
)


def loads_best(cell: Cell) -> bool:
    """Tell whether Trainer is to load the checkpoint with the lowest loss of an evaluation.

    A setting of the cell asks for it.
    """
    return bool(cell.settings("TrainingArguments").get("load_best_model_at_end"))


def trainer_reason(cell: Cell, device: str) -> str | None:
    """Return why Trainer itself cannot run the cell; None if it can."""
    model = cell.option("model")
    recomputed = cell.option("activation_checkpointing")
    fsdp = "fsdp" in cell.strategy
    recomputed_by_model = bool(recomputed) and (not fsdp or recomputed == "reentrant")
    transformers_model = "transformers" in model_of(cell).preload
    return first_reason(
        (
            bool(cell.option("param_groups")),
            "Trainer makes these two param groups anyway",
        ),
        (
            cell.option("reduce_dtype") != "auto" and fsdp,
            "TrainingArguments have no word for FSDP's policy of dtypes",
        ),
        (
            cell.option("fp8_backend") == "te",
            "Trainer passes no recipe for Transformer Engine to accelerate",
        ),
        (
            cell.precision == "fp8" and "zero" in cell.strategy,
            (
                "DeepSpeed needs the flag of the dtype that is computed in, such as bf16, and "
                "Trainer then takes no fp8 from its environment"
            ),
        ),
        (
            bool(cell.option("packed")) and not transformers_model,
            f"rows of tokens are packed, and model {model} has none",
        ),
        (
            recomputed_by_model and not transformers_model,
            (
                f"Trainer has the model recompute, and model {model} has no "
                "gradient_checkpointing_enable()"
            ),
        ),
        # It hangs, and a known issue never covers a hang.
        (
            cell.own_disks and fsdp,
            (
                "Trainer loads FSDP's optimizer where it finds the file that rank 0 wrote, so on "
                "one node, where it then waits"
            ),
        ),
        # It may hang, too.
        (
            loads_best(cell) and fsdp and cell.option("state_dict") != "full",
            (
                "Trainer looks for the directory of its best checkpoint before FSDP's sharded "
                "state dicts are written, and some ranks find it "
                "(docs/upstream/transformers_best_sharded.py)"
            ),
        ),
        (
            cell.cp > 1 and cell.strategy == "fsdp2",
            _options.TORCH_CP,
        ),
        (
            cell.cp > 1 and cell.dp_size > 1 and device == "cpu",
            (
                "Trainer gathers the losses of a sequence's parts, and the backward pass of that "
                "takes the ranks of a group for those of all on gloo: "
                "'Global rank 0 is not part of group'"
            ),
        ),
    )


def in_parts_reason(cell: Cell) -> str | None:
    """Return why transformers does not shard the model as the cell asks; None if it does."""
    model = cell.option("model")
    with_experts = ", ".join(EXPERTS)
    reason = first_reason(
        (
            "transformers" not in model_of(cell).preload,
            f"transformers cuts models of its own, and {model} is not one",
        ),
        (
            cell.ep > 1 and model not in EXPERTS,
            (
                f"of models whose experts transformers spreads, {with_experts} alone is tried, "
                f"and {model} is not it"
            ),
        ),
        (
            cell.ep > 1 and cell.precision != "fp32",
            f"which experts {model} chooses turns on rounding, and {cell.precision} rounds",
        ),
        (
            cell.ep > 1 and bool(cell.option("activation_checkpointing")),
            "transformers recomputes whole layers, and experts are blocks of their own",
        ),
        (
            cell.precision not in {"fp32", "bf16_upcast", "bf16_pure"},
            f"a model that is cut while it is loaded is not trained in {cell.precision} yet",
        ),
        (
            not cell.option("save_only_model"),
            (
                "Trainer saves the model alone: "
                "'Resuming is not supported for models sharded at load time'"
            ),
        ),
    )
    if reason is not None:
        return reason
    for name, _ in cell.options:
        if name not in BESIDE:
            return f"a model that is cut while it is loaded is not trained with option {name!r} yet"
    return None

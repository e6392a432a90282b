"""Which models in parts Trainer is driven with, and why not with others; that transformers still refuses what is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.ext.upstream.drivers._trainer_reasons import EXPERTS, LAYERS
from pytest_distcompat.ext.upstream.drivers.trainer import TrainerDriver
from pytest_distcompat.ext.upstream.models import architecture

ALONE = "save_only_model"


@pytest.mark.parametrize(
    "cell",
    [
        f"fsdp2-fp32-w2-tp_2-{ALONE}",
        f"fsdp2-fp32-w4-model_llama_tied-tp_2-{ALONE}",
        f"fsdp2-fp32-w2-model_hf:gpt_oss-grad_accum_2-ep_2-{ALONE}",
        f"fsdp2-fp32-w4-model_hf:granitemoe_swa-tp_2-ep_2-{ALONE}",
    ],
)
def test_a_model_in_parts_is_trained(cell: str) -> None:
    assert TrainerDriver.unsupported_reason(Cell.parse(cell)) is None


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("fsdp2-fp32-w2-tp_2", "Resuming is not supported"),
        ("ddp-fp32-w2-tp_2", "takes no DTensors"),
        ("zero1-fp32-w4-tp_2", "by the deepspeed driver alone"),
        (f"fsdp2-fp32-w2-model_mlp-tp_2-{ALONE}", "mlp is not one"),
        (f"fsdp2-fp32-w2-model_hf:qwen3_moe-ep_2-{ALONE}", "hf:qwen3_moe is not it"),
        (f"fsdp2-fp32-w4-model_hf:gpt_oss-tp_2-ep_2-{ALONE}", "has no plan for tensor parallelism"),
        (f"fsdp2-fp16_mixed-w2-tp_2-{ALONE}", "not trained in fp16_mixed yet"),
        (f"fsdp2-bf16_upcast-w2-model_hf:gpt_oss-ep_2-{ALONE}", "turns on rounding"),
        (f"fsdp2-fp32-w2-frozen-tp_2-{ALONE}", "not trained with option 'frozen' yet"),
    ],
)
def test_what_is_left_out_has_a_reason(cell: str, reason: str) -> None:
    assert reason in str(TrainerDriver.unsupported_reason(Cell.parse(cell)))


@pytest.mark.nightly
def test_trainer_refuses_to_resume_a_model_in_parts(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    model = architecture("hf:llama").make()
    model.__dict__["_is_distributed_loading_by_transformers"] = True
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", save_strategy="steps")
    with pytest.raises(ValueError, match="Resuming is not supported for models sharded at load time"):
        Trainer(model=model, args=arguments)


@pytest.mark.nightly
def test_files_of_other_models_name_each_expert_by_itself(tmp_path: Path) -> None:
    from safetensors import safe_open

    def unsaved(name: str) -> set[str]:
        model = architecture(name).make()
        model.save_pretrained(tmp_path)  # type: ignore[operator]  # of transformers
        with safe_open(tmp_path / "model.safetensors", "pt") as file:
            return {name for name, _ in model.named_parameters()} - set(file.keys())

    for name in EXPERTS:
        assert unsaved(name) == set(), name
    assert {name.rpartition(".")[0] for name in unsaved("hf:qwen3_moe")} == {
        f"model.layers.{layer}.mlp.experts" for layer in range(2)
    }


@pytest.mark.nightly
def test_transformers_cuts_the_layers_that_are_named_here() -> None:
    for name, layers in LAYERS.items():
        plan = architecture(name).make().tp_plan
        assert isinstance(plan, dict)
        assert {layer: plan.get(layer) for layer in layers} == layers
    assert architecture("hf:gpt_oss").make().tp_plan == {"lm_head": "colwise_gather_output"}

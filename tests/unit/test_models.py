"""Choice of the tiny model that the built-in drivers train."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat import models
from pytest_distcompat.cell import Cell
from pytest_distcompat.drivers import DRIVERS
from pytest_distcompat.scenario import STEPS
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.world import World

#: What stands before a test body: the metadata of this environment without transformers', in a process of its own.
WITHOUT = """
from pytest_distcompat import installed
found = installed.version_of
installed.version_of = lambda package, path=None: None if package == "transformers" else found(package, path)
from pytest_distcompat.ext.upstream.drivers import _releases
_releases.installed = lambda package: package != "transformers"
from pytest_distcompat.cell import Cell
from pytest_distcompat.drivers import DRIVERS, preload_of
"""


def run(body: str) -> str:
    """Run that code where transformers is not installed, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + textwrap.dedent(body)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2"])
def test_without_transformers_the_default_model_is_mlp(strategy: str) -> None:
    run(f"""
        from pytest_distcompat.checks import CHECKS
        from pytest_distcompat.world import World
        cell, driver = Cell("{strategy}", "fp32"), DRIVERS.get("torch")
        assert cell.facets()["model"] == "mlp"
        assert driver.unsupported_reason(cell) is None
        assert driver(cell, World(0, 2, 0, "cpu")).blocks == ("Block",)
        assert not [name for name in preload_of(driver, [cell]) if name.startswith("transformers")]
        assert CHECKS.get("parity").not_applicable(cell, driver) is None
        tied = Cell.of("{strategy}", "fp32", model="llama_tied")
        assert driver.unsupported_reason(tied) == "transformers is not installed", "a cell names it"
    """)


def test_without_transformers_known_issues_of_mlp_apply_to_a_cell_without_options() -> None:
    reasons = run("""
        from pytest_distcompat.known import applying, names_in_issues, shipped
        cell = Cell("zero1", "bf16_upcast")
        for one in applying(shipped(), names_in_issues(DRIVERS.get("deepspeed")), "cpu"):
            if one.covers(cell, "export"):
                print(one.reason)
    """)
    assert "zero_to_fp32 leaves frozen parameters out" in reasons


def test_with_transformers_the_default_model_is_llama() -> None:
    assert models.model_of(Cell("ddp", "fp32")).name == "llama"
    assert models.model_of(Cell.of("ddp", "fp32", model="mlp")).name == "mlp"


def test_ranks_use_other_experts_in_the_first_step() -> None:
    first = experts_of_first_step(0)
    second = experts_of_first_step(1)
    assert first != second
    assert first & second


def experts_of_first_step(rank: int) -> set[int]:
    """Return the experts to which the router sends the rows of a rank: the largest of the first four features."""
    batch = models.MODELS.get("moe").batch(0, rank)
    scores = batch["features"][:, :4]
    return set(scores.argmax(-1).tolist())


def assert_reason(driver: str, cell: str, reason: str | None) -> None:
    actual_reason = DRIVERS.get(driver).unsupported_reason(Cell.parse(cell))
    if reason is None:
        assert actual_reason is None
    else:
        assert reason in str(actual_reason)


def test_in_each_step_some_ranks_leave_the_branch_out_and_others_do_not() -> None:
    tiny = models.MODELS.get("branch")
    model = tiny.make()
    for step in range(STEPS):
        used = []
        for rank in range(4):
            model.zero_grad()
            loss = tiny.loss(model, tiny.batch(step, rank))
            loss.backward()  # type: ignore[no-untyped-call]
            branch = model.get_parameter("branch.weight")
            used.append(branch.grad is not None)
        assert used in ([False, True] * 2, [True, False] * 2)


@pytest.mark.parametrize(
    ("driver", "strategy", "issue"),
    [
        ("torch", "ddp", ""),
        ("trainer", "fsdp1", ""),
        ("deepspeed", "zero0", ""),
        ("torch", "fsdp2", "pytorch/pytorch/issues/158719"),
        ("accelerate", "zero1", "deepspeedai/DeepSpeed/issues/1355"),
        ("trainer", "zero3", "deepspeedai/DeepSpeed/issues/1355"),
    ],
)
def test_strategies_in_which_all_ranks_must_use_the_same_parameters_say_so(
    driver: str, strategy: str, issue: str
) -> None:
    assert_reason(driver, Cell.of(strategy, "fp32", model="branch").id, issue or None)


def test_the_parameters_of_twice_are_views_and_its_attributes_its_blocks() -> None:
    model: Any = models.MODELS.get("twice").make()
    parameters = list(model.parameters())
    storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    addresses = {parameter.data_ptr() for parameter in parameters}
    assert len(storages) == 1
    assert len(addresses) == len(parameters)
    assert model.linear is model.block.linear
    with pytest.raises(AttributeError, match="'Block' object has no attribute 'nothing'"):
        _ = model.nothing


@pytest.mark.parametrize(
    ("strategy", "live", "name"),
    [
        ("fsdp1", "_fsdp_wrapped_module.a._fsdp_wrapped_module.weight", "a.weight"),
        (
            "fsdp1",
            "_fsdp_wrapped_module.b._fsdp_wrapped_module._fsdp_wrapped_module.weight",
            "b._fsdp_wrapped_module.weight",
        ),
        ("fsdp1", "_fsdp_wrapped_module.c._fsdp_wrapped_module.weight", "c.weight"),
        ("ddp", "module.b._fsdp_wrapped_module.weight", "b._fsdp_wrapped_module.weight"),
    ],
)
def test_a_module_may_have_the_name_of_a_wrapper(strategy: str, live: str, name: str) -> None:
    known = ("a.weight", "b._fsdp_wrapped_module.weight")
    cell = Cell(strategy, "fp32")
    assert STRATEGIES.get(strategy).canonical(live, cell, known) == name


@pytest.mark.parametrize(
    ("strategy", "live", "name"),
    [
        ("ddp", "critic.module.0.weight", "critic.0.weight"),
        ("ddp", "critic.module.module.weight", "critic.module.weight"),
        ("zero2", "critic.module.0.weight", "critic.0.weight"),
        # The whole model is wrapped, and the critic in it again.
        ("ddp", "module.critic.module.0.weight", "critic.module.0.weight"),
        ("fsdp2", "critic.module.0.weight", "critic.module.0.weight"),
        # A wrapper that the cell does not ask for is no network.
        ("ddp", "_orig_mod.module.critic.0.weight", "_orig_mod.module.critic.0.weight"),
    ],
)
def test_each_network_of_a_model_may_be_wrapped(strategy: str, live: str, name: str) -> None:
    known = ("critic.0.weight", "critic.module.weight")
    assert STRATEGIES.get(strategy).canonical(live, Cell(strategy, "fp32"), known) == name


@pytest.mark.parametrize(
    ("driver", "cell", "reason"),
    [
        ("trainer", "fsdp2-bf16_upcast-w4-model_wide-optimizer_adam8bit", None),
        ("torch", "fsdp2-bf16_upcast-w2-model_wide-optimizer_adam8bit", "cannot step on DTensors of bfloat16"),
        ("torch", "fsdp2-fp32-w8-model_wide-optimizer_adam8bit", "no part of model wide has so many"),
        ("torch", "ddp-fp32-w2-optimizer_adam8bit", "no part of model llama has so many"),
        ("torch", "ddp-fp32-w2-model_wide-compile_aot_eager-optimizer_adam8bit", "nothing is compiled there"),
        ("accelerate", "zero1-fp32-w2-model_wide-optimizer_adam8bit", "silently keeps state in float32"),
        ("torch", "ddp-fp32-w2-model_wide", "the model wide is for optimizer=adam8bit"),
        ("torch", "ddp-bf16_upcast-w2-lora_int8", None),
        ("torch", "fsdp2-fp32-w2-lora_int8", "by aten.split"),
        ("accelerate", "ddp-fp32-w2-lora_int8", "by aten.view"),
        ("deepspeed", "zero1-fp32-w2-lora_int8", "Couldn't swap"),
        ("torch", "ddp-bf16_pure-w2-lora_int8", "in fp32 and bf16_upcast alone"),
    ],
)
def test_where_optimizer_state_or_a_model_is_quantized(driver: str, cell: str, reason: str | None) -> None:
    assert_reason(driver, cell, reason)


@pytest.mark.parametrize(
    ("driver", "cell", "reason"),
    [
        ("trainer", "ddp-fp32-w2-optimizer_sgd", None),
        ("trainer", "fsdp2-bf16_upcast-w2-optimizer_sgd", None),
        ("trainer", "ddp-bf16_upcast-w2-optimizer_sgd", "smaller than bfloat16 resolves"),
        ("torch", "fsdp2-bf16_pure-w2-optimizer_sgd", "smaller than bfloat16 resolves"),
        ("deepspeed", "zero3-bf16_pure-w2-optimizer_sgd", "smaller than bfloat16 resolves"),
        ("trainer", "fsdp1-fp32-w2-optimizer_adafactor", "fsdp1's shards have one dimension, and adafactor updates"),
        ("trainer", "zero2-fp32-w2-optimizer_muon", "zero2's shards have one dimension, and muon updates matrices"),
        ("deepspeed", "zero3-fp32-w2-optimizer_muon", None),
        ("deepspeed", "zero0-fp32-w2-optimizer_adafactor", None),
        ("deepspeed", "zero1-fp32-w2-optimizer_adafactor", "zero1's shards have one dimension, and adafactor updates"),
        ("deepspeed", "zero0-fp32-w2-model_wide-optimizer_adam8bit", "a function for map_location"),
        ("deepspeed", "zero1-fp32-w2-compile_aot_eager-optimizer_muon", "not tried with option 'compile' yet"),
        ("deepspeed", "zero2-bf16_upcast-w2-optimizer_muon", "keeps momentum in the gradients' dtype"),
    ],
)
def test_where_another_optimizer_can_update_what_a_rank_holds(driver: str, cell: str, reason: str | None) -> None:
    assert_reason(driver, cell, reason)


@pytest.mark.parametrize(
    ("driver", "cell", "reason"),
    [
        ("torch", "fsdp2-fp32-w4-model_moe_fused-tp_2", None),
        ("torch", "fsdp2-bf16_upcast-w8-model_moe_fused-grad_accum_2-tp_2-ep_2", None),
        ("torch", "fsdp2-fp32-w4-model_moe_fused-compile_regional-tp_2-ep_2", "with option 'compile' yet"),
        ("torch", "fsdp2-fp32-w2-model_moe_fused-activation_checkpointing-ep_2", None),
        (
            "trainer",
            "fsdp2-fp32-w2-model_hf:gpt_oss-activation_checkpointing-ep_2-save_only_model",
            "transformers recomputes whole layers",
        ),
        ("torch", "fsdp2-bf16_pure-w4-model_moe_fused-tp_2", "parallelism of experts is not driven in bf16_pure yet"),
        ("deepspeed", "zero1-fp32-w4-model_moe_fused-tp_2", "has no experts of a DeepSpeed layer"),
    ],
)
def test_where_experts_are_cut(driver: str, cell: str, reason: str | None) -> None:
    assert_reason(driver, cell, reason)


@pytest.mark.parametrize(("device", "reason"), [("cpu", "torch's SyncBatchNorm refuses CPU tensors"), ("cuda", "")])
@pytest.mark.parametrize("driver", ["torch", "accelerate", "trainer"])
def test_syncbatchnorm_is_for_gpus(driver: str, device: str, reason: str) -> None:
    cell = Cell.of("ddp", "fp32", model="syncbatchnorm")
    actual_reason = DRIVERS.get(driver).unsupported_reason(cell, device)
    if reason:
        assert reason in str(actual_reason)
    else:
        assert actual_reason is None


def test_torch_refuses_syncbatchnorm_on_the_cpu_today(tmp_path: Path) -> None:
    import torch
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on GPU or XPU"):
            torch.nn.SyncBatchNorm(2)(torch.ones(2, 2))
    finally:
        distributed.destroy_process_group()


def test_the_reference_of_syncbatchnorm_takes_the_rows_of_all_ranks_as_one_batch() -> None:
    def losses(model: str, ranks: int) -> list[float]:
        cell = Cell.of("ddp", "fp32", model=model)
        driver: Any = DRIVERS.get("torch")(cell, World(0, ranks, 0, "cpu"))
        built = driver.build_model()
        return [driver.reference(built, number, ranks) for number in range(2)]

    assert losses("syncbatchnorm", 1) == losses("batchnorm", 1)
    assert losses("syncbatchnorm", 2) != pytest.approx(losses("batchnorm", 2), rel=1e-3)


@pytest.mark.parametrize("driver", ["accelerate", "trainer"])
def test_accelerate_has_no_regions_in_a_model_with_one_block(driver: str) -> None:
    one_block = Cell.of("ddp", "fp32", model="dropout", compile="regional").id
    reason = "accelerate compiles by region blocks that repeat, and dropout has one block"
    assert_reason(driver, one_block, reason)
    assert_reason(driver, Cell.of("ddp", "fp32", model="mlp", compile="regional").id, None)
    assert_reason("torch", one_block, None)


def test_extra_state_of_a_model_is_in_its_files_and_counts(tmp_path: Path) -> None:
    cell = Cell.parse("ddp-fp32-w1-model_llama_calibrated")
    tiny = models.model_of(cell)
    model: Any = tiny.make()
    others = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    assert {name.rpartition(".")[2] for name in set(model.state_dict()) - others} == {"_extra_state"}
    model.save_pretrained(tmp_path)
    loaded: Any = tiny.reload(tmp_path)
    batch = tiny.batch(0, 0)
    expected = tiny.outputs(model.eval(), batch)
    assert tiny.outputs(loaded, batch).equal(expected)
    for module in loaded.modules():
        if hasattr(module, "scale"):
            module.scale = 1.0
    assert not tiny.outputs(loaded, batch).equal(expected)

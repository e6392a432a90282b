"""The probe in unmodified scripts: what it sees, that it changes nothing, and the scripts that it must fail."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.ext.scripts import ScriptRun
from pytest_distcompat.ext.scripts.recorder import STRIDE
from pytest_distcompat.failures import Incompatible, UsageProblem

from .conftest import Launch

pytestmark = pytest.mark.spawn

TORCH, ACCELERATE, TWO = "torch_loop.py", "accelerate_loop.py", "two_optimizers.py"


def losses(run: ScriptRun, rank: int = 0) -> list[str]:
    """As the script itself prints them, bit by bit; Trainer rounds what it logs."""
    return re.findall(r"^step \d+ loss .*", run.output_of(rank), re.MULTILINE)


def torch_loop(run: Launch, strategy: str, **settings: Any) -> ScriptRun:
    message = ("--strategy", strategy, "--save-at", "3", "--output", "{output}")
    return run(TORCH, *message, strategy=strategy, output="{output}", **settings)


def accelerate_loop(run: Launch, strategy: str, **settings: Any) -> ScriptRun:
    message: dict[str, Any] = {"launcher": "accelerate", "strategy": strategy, "precision": "bf16_upcast", **settings}
    return run(ACCELERATE, "--save-at", "3", "--output", "{output}", output="{output}/final", **message)


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("fsdp1", "fsdp2"))]
)
def test_a_torch_loop(run: Launch, strategy: str) -> None:
    script_run = torch_loop(run, strategy)
    script_run.check("active", "names", "optimizer", "dtypes", "memory", "final_model_loadable")
    assert not script_run.labels


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("ddp", marks=pytest.mark.nightly)])
def test_a_loop_with_two_optimizers(run: Launch, strategy: str) -> None:
    """One for matrices, one for the rest, beside two that were made and forgotten."""
    script_run = run(TWO, "--strategy", strategy, "--save-at", "3", "--output", "{output}", strategy=strategy)
    script_run.check("active", "names", "optimizer", "dtypes", "memory")
    (built, _) = script_run.trace.at("build")
    assert built.optimizer is not None
    assert built.optimizer.chain == ("Muon + AdamW",)
    assert built.scheduler.count("last_epoch=0") == 2


@pytest.mark.nightly
def test_a_parameter_in_neither_of_two_optimizers(run: Launch) -> None:
    message = r"(?m)^ranks 0, 1: trainable parameter 'module\.3\.bias' is not in the optimizer; expected once"
    with pytest.raises(Incompatible, match=message):
        run(TWO, "--fault", "left out", strategy="ddp").check("optimizer")


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("zero2", marks=pytest.mark.nightly)])
def test_an_accelerate_loop_in_bfloat16(run: Launch, strategy: str) -> None:
    script_run = accelerate_loop(run, strategy)
    script_run.check("active", "names", "optimizer", "dtypes", "memory", "units", "final_model_loadable")


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [1, 3])
def test_a_deepspeed_loop(run: Launch, stage: int) -> None:
    arguments = ["--stage", stage, "--output", "{output}", "--save-at", "3"]
    script_run = run("deepspeed_loop.py", *arguments, strategy=f"zero{stage}")
    script_run.check("active", "names", "optimizer", "dtypes", "memory")


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_deepspeed_loop_with_a_parameter_that_no_loss_depends_on(run: Launch, stage: int) -> None:
    script_run = run("deepspeed_loop.py", "--unused", "--stage", stage, strategy=f"zero{stage}")
    script_run.check("active", "names", "optimizer", "dtypes", "memory")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("loop", "strategy"),
    [
        pytest.param(torch_loop, "ddp", marks=pytest.mark.nightly),
        (accelerate_loop, "fsdp2"),
        pytest.param(accelerate_loop, "zero2", marks=pytest.mark.nightly),
    ],
)
def test_losses_are_the_same_bit_by_bit_without_the_probe(
    run: Launch, loop: Callable[..., ScriptRun], strategy: str
) -> None:
    probed, bare = loop(run, strategy), loop(run, strategy, watch_steps=0)
    assert len(losses(bare)) == 6
    for rank in (0, 1):
        assert losses(probed, rank) == losses(bare, rank)
    assert len(probed.trace.at_index(STRIDE)) == 2
    assert not bare.trace.snapshots


def eight_steps(run: Launch) -> ScriptRun:
    return run(TORCH, "--steps", "8", strategy="ddp", watch_steps=3)


@pytest.mark.nightly
def test_later_steps_are_not_probed(run: Launch) -> None:
    script_run = eight_steps(run)
    script_run.check("active", "optimizer", "dtypes")
    late = script_run.trace.at_index(8 * STRIDE)
    assert len(late) == 2
    assert all(snapshot.model is None and not snapshot.inputs and snapshot.loss is not None for snapshot in late)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("steps", "watched", "message"),
    [
        ("2", 5, "the run took 2 optimizer steps: the check looks at step 3; let the script take 3 or more"),
        pytest.param(
            "6", 2, "watch_steps=2: the check looks at step 3 in full; expected 3 or more", marks=pytest.mark.nightly
        ),
    ],
)
def test_a_run_without_the_third_step_fails_every_check(run: Launch, steps: str, watched: int, message: str) -> None:
    """It is no pass, and no check says of it what is wrong with a step that it did not see."""
    script_run = run(TORCH, "--steps", steps, strategy="ddp", watch_steps=watched)
    verdicts = script_run.verdicts("active", "names", "optimizer", "dtypes", "memory")
    assert {(verdict.status, verdict.message) for verdict in verdicts} == {("failed", message)}


@pytest.mark.nightly
def test_a_run_without_the_probe(run: Launch) -> None:
    with pytest.raises(Incompatible, match="nothing to probe: watch_steps=0 leaves the probe out"):
        torch_loop(run, "ddp", watch_steps=0).check("active")


@pytest.mark.nightly
def test_weights_that_are_not_the_trained_ones(run: Launch) -> None:
    """Those of six steps, where eight were taken."""
    older = torch_loop(run, "ddp").output
    assert older is not None
    script_run = dataclasses.replace(eight_steps(run), output=older / "model.pt")
    with pytest.raises(Incompatible, match="other values after the reload"):
        script_run.check("final_model_loadable")


@pytest.mark.nightly
def test_a_script_that_wraps_nothing_is_never_a_pass(run: Launch) -> None:
    """(a) It was started on two ranks, and each trains alone. It ends well, with a loss that falls."""
    script_run = run(TORCH, "--strategy", "none", strategy="fsdp2")
    assert not script_run.failed, script_run.text()
    with pytest.raises(Incompatible, match="nothing to probe: AdamW stepped, on a model that nothing wrapped"):
        script_run.check("active")


@pytest.mark.nightly
def test_accelerate_without_the_bridge_drops_the_strategy(run: Launch) -> None:
    """(a) Two unsharded processes of one rank each, and exit code 0."""
    script_run = run(ACCELERATE, launcher="accelerate", strategy="fsdp2", bridge=False)
    assert not script_run.failed, script_run.text()
    with pytest.raises(Incompatible, match="runs as a bare model; expected FSDP2 for fsdp2"):
        script_run.check("active")


def test_another_strategy_than_the_given_one(run: Launch) -> None:
    script_run = dataclasses.replace(torch_loop(run, "ddp"), cell=Cell("fsdp2", "fp32"))
    with pytest.raises(Incompatible, match="runs as DDP x 1; expected FSDP2"):
        script_run.check("active")


@pytest.mark.nightly
def test_an_optimizer_that_holds_stale_parameters(run: Launch) -> None:
    """(d)"""
    script_run = run(TORCH, "--strategy", "fsdp2", "--fault", "stale", strategy="fsdp2")
    assert not script_run.failed, script_run.text()
    with pytest.raises(
        Incompatible, match=r"4 of 4 tensors in the optimizer are no parameters of the live model \(stale\)"
    ):
        script_run.check("optimizer")


@pytest.mark.nightly
def test_a_run_that_ends_without_weights(run: Launch) -> None:
    """(c)"""
    script_run = run(TORCH, "--output", "{output}", "--fault", "no weights", strategy="ddp", output="{output}")
    assert not script_run.failed, script_run.text()
    with pytest.raises(Incompatible, match=r"holds no weights \(files: none\)"):
        script_run.check("final_model_loadable")


def test_a_failed_run_passes_no_check(run: Launch) -> None:
    script_run = run("ends.py", "raise", strategy="ddp")
    with pytest.raises(Incompatible, match="the run failed: rank 1 raised ValueError"):
        script_run.check("active")


def test_a_failed_probe_passes_no_check(run: Launch, tmp_path: Path) -> None:
    """Something of torch's that the probe needs is gone: the script never notices."""
    broken = tmp_path / "sitecustomize.py"
    broken.write_text(
        "from pytest_distcompat.ext.scripts.tracked_objects import TrackedObjects\n"
        "def read_unwrapped(self, model): raise RuntimeError('no such thing any more')\n"
        "TrackedObjects.read_unwrapped = read_unwrapped\n",
        encoding="utf-8",
    )
    script_run = run(TORCH, strategy="ddp", environment={"PYTHONPATH": str(tmp_path)})
    assert not script_run.failed, script_run.text()
    assert len(losses(script_run)) == 6
    with pytest.raises(Incompatible, match=r"the probe itself failed, at .*, and saw no more from then on"):
        script_run.check("active")


@pytest.mark.nightly
def test_blocks_that_nobody_names_are_no_pass(run: Launch) -> None:
    message = r"the model's blocks are not known: it declares none \(_no_split_modules\); name their classes by blocks= of launch"
    with pytest.raises(Incompatible, match=message):
        torch_loop(run, "fsdp2").check("active", "units")


def test_a_check_that_does_not_apply_is_named_and_is_no_pass(run: Launch) -> None:
    script_run = torch_loop(run, "ddp")
    script_run.check("active", "units", "float8")
    assert [(verdict.check, verdict.status, verdict.reason) for verdict in script_run.verdicts("units", "float8")] == [
        ("units", "skipped", "the check does not apply: ddp cuts no units, and nothing is recomputed or compiled"),
        ("float8", "skipped", "the check does not apply: fp32 has no 8-bit layers"),
    ]
    with pytest.raises(
        Incompatible, match=r"units \(ddp-fp32-w2\): skipped\nthe check does not apply: ddp cuts no units"
    ):
        script_run.check("units", "float8")
    with pytest.raises(UsageProblem, match="no check is named"):
        script_run.check()


def test_checks_need_the_strategy(run: Launch) -> None:
    script_run = dataclasses.replace(torch_loop(run, "ddp"), cell=None)
    with pytest.raises(UsageProblem, match="got no strategy, so nothing says what should run"):
        script_run.check("active")
    with pytest.raises(UsageProblem, match="'parity' is no check of a script's run"):
        script_run.check("parity")

"""Check ``reshard`` on hand-made traces: state that is lost at another world size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.drivers.accelerate import AccelerateDriver
from pytest_distcompat.drivers.torch import TorchDriver

if TYPE_CHECKING:
    from tests.checks.traces import Story

    from pytest_distcompat.trace import Snapshot

RunsOf = Callable[[str, str], "Story"]
CELLS = ("ddp-fp32-w2", "fsdp1-fp32-w4", "fsdp2-fp32-w2", "zero1-fp32-w2", "zero3-fp32-w2")


@pytest.mark.parametrize(
    "cell", [*CELLS, "fsdp2-fp32-w1", "fsdp1-fp32-w4-dp_replicate_2", "fsdp2-fp32-w4-dp_replicate_2"]
)
def test_sound(runs_of: RunsOf, cell: str) -> None:
    assert runs_of(cell, "reshard").findings("reshard") == []


def test_the_runs_go_up_and_back_and_to_one(runs_of: RunsOf) -> None:
    def sizes(cell: str) -> dict[str, int]:
        return {run.name: run.world_size for run in runs_of(cell, "reshard").trace}

    assert sizes("fsdp2-fp32-w2") == {"train": 2, "up": 4, "back": 2, "one": 1}
    # There is no way from one rank to one.
    assert sizes("fsdp2-fp32-w1") == {"train": 1, "up": 2, "back": 1}


@pytest.mark.parametrize(
    ("cell", "most"), [("fsdp2-fp32-w4-model_moe_fused-tp_2", 4), ("fsdp2-fp32-w4-model_moe_fused-tp_2-ep_2", 2)]
)
def test_as_many_parts_as_data_parallel_ranks_leave(cell: str, most: int) -> None:
    parsed = Cell.parse(cell)
    scenario = CHECKS.get("reshard").runs(parsed, TorchDriver)
    tp = {run.name: run.cell(parsed).tp for run in scenario.runs}
    assert tp["up"] == 1
    assert tp["back"] == most
    assert tp["one"] == 1


@pytest.mark.parametrize("cell", CELLS[:3])
def test_one_shard_with_other_values(runs_of: RunsOf, cell: str) -> None:
    story = runs_of(cell, "reshard")
    where = {"run": "back", "action": "load", "rank": 1}
    other = story.parameters({"digest": "3:1"}, only="outlet.weight", **where)
    change = "unlike from rank to rank" if cell.startswith("ddp") else "other values"
    ranks = story.cell.world_size
    assert other.findings("reshard") == [f"parameter 'outlet.weight': {change} after the load at {ranks} ranks"]


HYBRID = "fsdp2-fp32-w4-dp_replicate_2"


@pytest.mark.parametrize("what", ["parameter", "exp_avg"])
def test_one_copy_of_hybrid_shards_with_other_values(runs_of: RunsOf, what: str) -> None:
    where: dict[str, Any] = {"run": "back", "action": "load", "rank": 2, "only": "outlet.weight"}
    story = runs_of(HYBRID, "reshard")
    other = {"digest": "4:1"}
    if what == "parameter":
        story = story.parameters(other, **where)
    else:
        story = story.state(what, other, **where)
    assert story.findings("reshard") == [f"{what} 'outlet.weight': unlike from rank to rank after the load at 4 ranks"]


def test_a_part_that_one_copy_of_hybrid_shards_lost(runs_of: RunsOf) -> None:
    where: dict[str, Any] = {"run": "back", "action": "load"}
    story = runs_of(HYBRID, "reshard")
    smaller = story.parameters({"local_numel": 1}, only="outlet.weight", rank=2, **where)
    parts = "the parts of ranks 2, 3 are 8 elements; expected 14 after the load at 4 ranks"
    assert f"parameter 'outlet.weight': {parts}" in smaller.findings("reshard")
    empty = story.optimizer({"states": ()}, rank=2, **where)
    empty = empty.optimizer({"states": ()}, rank=3, **where)
    parts = "the parts of ranks 2, 3 are 0 elements; expected 9 after the load at 4 ranks"
    assert f"exp_avg 'inlet.weight': {parts}" in empty.findings("reshard")


@pytest.mark.parametrize("cell", ["ddp-fp32-w2", "fsdp2-fp32-w2"])
def test_a_number_beside_the_elements(runs_of: RunsOf, cell: str) -> None:
    """NAdam's product, Adafactor's factors: no element for each of the parameter's, however that is sharded."""
    number: dict[str, Any] = {"numel": 1, "digest": "1:7"}
    story = runs_of(cell, "reshard")
    for run in story.trace.runs:
        story = story.state("exp_avg", number, run=run)
    assert story.findings("reshard") == []
    where: dict[str, Any] = {"run": "up", "action": "load", "only": "outlet.weight"}
    unlike = story.state("exp_avg", {"digest": "1:8"}, rank=1, **where)
    assert unlike.findings("reshard") == ["exp_avg 'outlet.weight': unlike from rank to rank after the load at 4 ranks"]
    other = story.state("exp_avg", {"digest": "1:8"}, **where)
    first, *_ = other.findings("reshard")
    assert first == "exp_avg 'outlet.weight': other values after the load at 4 ranks"
    # Each rank had another for its shard: whose is whose after the load nobody can say.
    apart = story.state("exp_avg", {"digest": "1:9"}, run="train", rank=1)
    apart = apart.state("exp_avg", {"digest": "1:9"}, run="up", rank=3)
    assert apart.findings("reshard") == []


def test_ranks_in_another_order(runs_of: RunsOf) -> None:
    """Each shard is a sound one, at a place that is not its own."""
    story = runs_of("fsdp1-fp32-w4", "reshard")
    first, second, *_ = story.trace.run("back").at("load")
    swapped = story.snapshot("load", {"model": second.model}, run="back", rank=0)
    swapped = swapped.snapshot("load", {"model": first.model}, run="back", rank=1)
    assert swapped.findings("reshard") == [
        "parameter 'frozen.weight' and 2 others: other values after the load at 4 ranks"
    ]


def test_a_part_that_nobody_holds(runs_of: RunsOf) -> None:
    where = {"run": "one", "action": "load"}
    story = runs_of("fsdp2-fp32-w2", "reshard").parameters({"local_numel": 4}, only="inlet.weight", **where)
    assert story.findings("reshard") == [
        "parameter 'inlet.weight': the parts of all ranks are 4 elements; expected 9 after the load at 1 rank"
    ]


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("cell", ["ddp-fp32-w2", "fsdp2-fp32-w2"])
def test_a_snapshot_with_other_values(runs_of: RunsOf, cell: str, key: str) -> None:
    where = {"run": "up", "action": "load"}
    story = runs_of(cell, "reshard").state(key, {"digest": "3:1"}, only="outlet.weight", **where)
    assert story.findings("reshard") == [f"{key} 'outlet.weight': other values after the load at 4 ranks"]


@pytest.mark.parametrize("key", ["master", "exp_avg"])
@pytest.mark.parametrize("cell", ["zero1-fp32-w2", "zero3-fp32-w2"])
def test_a_part_of_a_flat_master_with_other_values(runs_of: RunsOf, cell: str, key: str) -> None:
    def other(snapshot: Snapshot) -> Snapshot:
        assert snapshot.optimizer is not None
        masters = []
        for info in snapshot.optimizer.masters:
            is_chosen = info.key == key and info.owner == "module.inlet.weight"
            digest = "3:1" if is_chosen else info.digest
            masters.append(replace(info, digest=digest))
        return replace(snapshot, optimizer=replace(snapshot.optimizer, masters=tuple(masters)))

    story = runs_of(cell, "reshard").alter(other, run="up", action="load", rank=0)
    assert story.findings("reshard") == [f"{key} 'inlet.weight': other values after the load at 4 ranks"]


@pytest.mark.parametrize("cell", ["fsdp1-fp32-w2", "fsdp2-fp32-w2"])
def test_the_optimizer_comes_back_empty(runs_of: RunsOf, cell: str) -> None:
    story = runs_of(cell, "reshard").optimizer({"states": ()}, run="one", action="load")
    assert story.findings("reshard") == ["the optimizer's state is empty after the load at 1 rank"]


@pytest.mark.parametrize(("cell", "name"), [("fsdp2-fp32-w2", "inlet.weight"), ("zero3-fp32-w2", "partitions")])
def test_one_step_counts_as_more_than_one(runs_of: RunsOf, cell: str, name: str) -> None:
    story = runs_of(cell, "reshard").state("step", {"digest": "1:c0000000c"}, run="up", action="step", nth=0)
    (finding,) = story.findings("reshard")
    assert finding.startswith(f"step {name!r}")
    assert finding.endswith("other values one step after the load at 4 ranks")


@pytest.mark.parametrize(
    ("ranks", "counted"), [((0, 1, 2, 3), False), ((1, 2, 3), True)], ids=["on no rank", "on one rank"]
)
def test_a_parameter_that_the_rows_of_more_ranks_do_not_reach(
    runs_of: RunsOf, ranks: tuple[int, ...], counted: bool
) -> None:
    step: dict[str, Any] = {"run": "up", "action": "step", "nth": 0}
    story = runs_of("fsdp2-fp32-w2", "reshard")
    story = story.state("step", {"digest": "1:c0000000c"}, only="inlet.weight", **step)
    for rank in ranks:
        story = story.optimizer({"without_gradient": (story.live("inlet.weight"),)}, rank=rank, **step)
    expected = "step 'inlet.weight': other values one step after the load at 4 ranks"
    assert story.findings("reshard") == ([expected] if counted else [])


def test_a_step_that_counts_for_no_parameter_is_told(runs_of: RunsOf) -> None:
    step: dict[str, Any] = {"run": "up", "action": "step", "nth": 0}
    story = runs_of("fsdp2-fp32-w2", "reshard").state("step", {"digest": "1:c0000000c"}, **step)
    names = tuple(info.name for info in story.trace.run("up").at("step")[0].parameters)
    story = story.optimizer({"without_gradient": names}, **step)
    assert story.findings("reshard")[0].startswith("step ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"scheduler": "last_epoch=0"},
            "scheduler is at 'last_epoch=0' after the load at 1 rank; saved at 'last_epoch=3'",
        ),
        (
            {"loss": float("nan")},
            "the loss of the first step after the load at 1 rank is nan; expected a finite number",
        ),
        ({"loss": None}, "the loss of the first step after the load at 1 rank is None; expected a finite number"),
    ],
)
def test_scheduler_and_loss(runs_of: RunsOf, changes: dict[str, Any], message: str) -> None:
    action = "step" if "loss" in changes else "load"
    story = runs_of("fsdp2-fp32-w2", "reshard").snapshot(action, changes, run="one")
    assert story.findings("reshard") == [f"rank 0: {message}"]


def test_the_numbers_of_the_groups(runs_of: RunsOf) -> None:
    where = {"run": "one", "action": "load"}
    story = runs_of("fsdp2-fp32-w2", "reshard")
    changed = story.optimizer({"param_groups": ({"lr": 0.1, "weight_decay": 0.01},)}, **where)
    assert changed.findings("reshard") == [
        "rank 0: lr of the optimizer's group 0 is 0.1 after the load at 1 rank; 0.0125 was saved"
    ]
    changed = story.optimizer({"param_groups": ()}, **where)
    assert changed.findings("reshard") == [
        "rank 0: the optimizer has 0 param groups after the load at 1 rank; 1 were saved"
    ]


@pytest.mark.parametrize(("run", "action"), [("up", "save"), ("up", "load"), ("train", "save")])
def test_a_silent_rank(runs_of: RunsOf, run: str, action: str) -> None:
    story = runs_of("ddp-fp32-w2", "reshard").without(action, run=run, rank=1)
    findings = story.findings("reshard")
    assert any(finding.startswith("rank 1: no report after") for finding in findings)


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("zero1-fp32-w2", "does not claim that zero1 loads"),
        ("fsdp1-fp32-w2-no_use_orig_params", "flat parameters"),
        ("fsdp2-fp32-w2-save_only_model", "hold the model alone"),
        ("fsdp2-fp32-w2", ""),
    ],
)
def test_cells_to_which_it_does_not_apply(cell: str, reason: str) -> None:
    driver = AccelerateDriver if cell.startswith("zero") else TorchDriver
    actual_reason = CHECKS.get("reshard").not_applicable(Cell.parse(cell), driver)
    assert reason in (actual_reason or "")
    assert bool(actual_reason) == bool(reason)

"""Check ``optimizer`` on hand-made traces: the optimizer holds other tensors than the model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.model_values import unused
from pytest_distcompat.trace import WITHOUT_GRADIENT, Snapshot, StateInfo

if TYPE_CHECKING:
    from tests.checks.traces import Sound, Story

CELLS = ("ddp-fp32-w2", "fsdp1-fp32-w2", "fsdp2-bf16_upcast-w2", "zero1-fp32-w2", "zero3-bf16_upcast-w2")


def did_not_move(name: str) -> str:
    return f"trainable parameter {name!r} did not move in three steps, on any rank"


@pytest.mark.parametrize("part", ["model", "optimizer"])
@pytest.mark.parametrize("cell", ["ddp-fp32-w2", "fsdp2-fp32-w2"])
def test_no_optimizer_after_build(sound: Sound, cell: str, part: str) -> None:
    story = sound(cell).snapshot("build", {part: None}, rank=1)
    assert story.findings("optimizer") == [
        "rank 1: no optimizer after build; the driver must set self.model and self.optimizer"
    ]


@pytest.mark.parametrize("cell", ["ddp-fp32-w2", "fsdp1-fp32-w2", "fsdp2-fp32-w2"])
def test_a_stale_optimizer(sound: Sound, cell: str) -> None:
    story = sound(cell)
    stale = story.optimizer({"foreign": 2}, action="build", rank=0)
    stale = stale.parameters({"held": 0}, only="outlet.weight", action="build", rank=0)
    assert stale.findings("optimizer") == [
        "rank 0: 2 of 2 tensors in the optimizer are no parameters of the live model (stale)",
        f"rank 0: trainable parameter {story.live('outlet.weight')!r} is not in the optimizer; expected once",
    ]


def test_a_parameter_in_two_groups(sound: Sound) -> None:
    story = sound("fsdp2-fp32-w2").parameters({"held": 2}, only="outlet.weight", action="build")
    assert story.findings("optimizer") == [
        "rank 0: trainable parameter 'outlet.weight' is in the optimizer 2 times; expected once",
        "rank 1: trainable parameter 'outlet.weight' is in the optimizer 2 times; expected once",
    ]


def test_a_frozen_parameter_may_be_in_the_optimizer(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").parameters({"held": 1}, only="frozen.weight", action="build")
    assert story.findings("optimizer") == []


@pytest.mark.parametrize("cell", ["zero1-fp32-w2", "zero2-fp32-w2", "zero3-fp32-w2"])
@pytest.mark.parametrize(("numel", "elements"), [(0, 4), (8, 12)])
def test_masters_hold_each_element_once(sound: Sound, cell: str, numel: int, elements: int) -> None:
    partitioned = {"module.inlet.weight": 4, "module.outlet.weight": numel}
    story = sound(cell).optimizer({"partitioned": partitioned}, action="build", rank=1)
    message = f"{elements} of 8 elements of trainable parameter 'module.outlet.weight' are in the optimizer"
    assert story.findings("optimizer") == [f"all ranks together: {message}; expected each one once"]


def test_masters_may_be_split_unevenly(sound: Sound) -> None:
    story = sound("zero1-fp32-w2")
    for rank, (inlet, outlet) in enumerate([(8, 1), (0, 7)]):
        partitioned = {"module.inlet.weight": inlet, "module.outlet.weight": outlet}
        story = story.optimizer({"partitioned": partitioned}, action="build", rank=rank)
    assert story.findings("optimizer") == []


@pytest.mark.parametrize("cell", ["ddp-fp32-w2", "fsdp2-fp32-w2"])
def test_frozen_by_the_trainer(sound: Sound, cell: str) -> None:
    # The unwrapped model says what is to be trained.
    story = sound(cell)
    frozen = story.parameters({"trainable": False, "held": 0, "digest": "where it was"}, only="outlet.weight")
    name = story.live("outlet.weight")
    assert frozen.findings("optimizer") == [
        f"rank 0: trainable parameter {name!r} is not in the optimizer; expected once",
        f"rank 1: trainable parameter {name!r} is not in the optimizer; expected once",
        did_not_move(name),
    ]


def test_without_an_unwrapped_model_the_trainer_is_believed(sound: Sound) -> None:
    story = sound("fsdp2-fp32-w2").without("build_model")
    assert story.findings("optimizer") == []
    frozen = story.parameters({"trainable": False, "held": 0, "digest": "where it was"}, only="outlet.weight")
    assert frozen.findings("optimizer") == []


def test_thawed_by_the_trainer(sound: Sound) -> None:
    story = sound("fsdp2-fp32-w2").parameters({"trainable": True, "held": 1}, only="frozen.weight")
    assert story.findings("optimizer") == []
    moved = story.parameters({"digest": "elsewhere"}, only="frozen.weight", action="step")
    assert moved.findings("optimizer") == ["frozen parameter 'frozen.weight' moved"]


@pytest.mark.parametrize("cell", ["ddp-fp32-w2", "fsdp2-fp32-w2"])
def test_moved_by_weight_decay_alone(sound: Sound, cell: str) -> None:
    story = sound(cell)
    where: dict[str, Any] = {"only": "outlet.weight", "action": "step", "nth": 2}
    zero = story.state("exp_avg", {"digest": "4:0"}, **where)
    assert zero.findings("optimizer") == []
    zero = zero.state("exp_avg_sq", {"digest": "4:0"}, **where)
    message = f"trainable parameter {story.live('outlet.weight')!r} had no gradient in three steps"
    assert zero.findings("optimizer") == [f"{message}: its state in the optimizer is all zero"]
    # A rank may hold none of it, or none but padding.
    partly_zero = story.state("", {"digest": "4:0"}, **where, rank=1)
    assert partly_zero.findings("optimizer") == []


@pytest.mark.parametrize("cell", ["zero1-fp32-w2", "zero3-fp32-w2"])
def test_a_partition_without_a_gradient(sound: Sound, cell: str) -> None:
    story = sound(cell).state("", {"digest": "4:0"}, action="step", nth=2)
    assert story.findings("optimizer") == [
        "partition 0 of the optimizer had no gradient in three steps: its state is all zero"
    ]


@pytest.mark.parametrize("cell", CELLS)
def test_a_parameter_that_stays_where_it_was(sound: Sound, cell: str) -> None:
    story = sound(cell)
    still = story.parameters({"digest": "where it was"}, only="outlet.weight")
    assert still.findings("optimizer") == [did_not_move(story.live("outlet.weight"))]


@pytest.mark.parametrize("cell", ["fsdp2-fp32-w2", "zero3-fp32-w2"])
def test_one_rank_may_hold_none_of_it(sound: Sound, cell: str) -> None:
    story = sound(cell).parameters({"digest": "nothing", "local_numel": 0}, only="outlet.weight", rank=1)
    assert story.findings("optimizer") == []


@pytest.mark.parametrize("cell", CELLS)
def test_a_frozen_parameter_that_moves(sound: Sound, cell: str) -> None:
    story = sound(cell)
    moved = story.parameters({"digest": "elsewhere"}, only="frozen.weight", action="step", nth=2, rank=1)
    assert moved.findings("optimizer") == [f"frozen parameter {story.live('frozen.weight')!r} moved"]


def test_a_rank_is_silent(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").without("step", nth=2, rank=0)
    assert story.findings("optimizer") == ["rank 0: no report after three steps"]


def test_silence_hides_no_parameter_that_stays(sound: Sound) -> None:
    story = sound("ddp-fp32-w2").parameters({"digest": "where it was"}, only="outlet.weight")
    changed = story.without("step", nth=2, rank=0)
    assert changed.findings("optimizer") == [
        "rank 0: no report after three steps",
        did_not_move("module.outlet.weight"),
    ]


def with_masters(story: Story, *, still: str = "", unmoved: str = "") -> Story:
    """With what lies in flat masters: of all that is trained, but that of one name has no gradient, or does not change."""
    for action, nth, done in (("build", 0, 0), ("step", 2, 3)):
        masters = []
        for name in ("inlet.weight", "outlet.weight"):
            for key in ("master", "exp_avg", "exp_avg_sq"):
                value = 1 + done
                if name == unmoved:
                    value = 1
                if name == still and key != "master":
                    value = 0
                masters.append(StateInfo(story.live(name), key, "float32", 4, f"4:{value}"))
        story = story.optimizer({"masters": tuple(masters)}, action=action, nth=nth)
    return story


def coarse(story: Story, only: str = "") -> Story:
    """With copies of masters that do not change."""
    for action, nth in (("build", 0), ("step", 2)):
        story = story.parameters({"digest": "one"}, only=only, action=action, nth=nth)
    return story


@pytest.mark.parametrize("cell", ["zero1-bf16_upcast-w2", "zero3-bf16_upcast-w2"])
def test_a_copy_too_coarse_to_move(sound: Sound, cell: str) -> None:
    """A norm's weight near 1 in bfloat16 stays where it is for many steps at an ordinary learning rate; its master moves."""
    story = coarse(sound(cell), "outlet.weight")
    message = did_not_move(story.live("outlet.weight"))
    with_moving_master = with_masters(story)
    with_unmoved_master = with_masters(story, unmoved="outlet.weight")
    assert with_moving_master.findings("optimizer") == []
    assert with_unmoved_master.findings("optimizer") == [message]
    assert story.findings("optimizer") == [message]


def test_masters_that_move_and_copies_that_never_do(sound: Sound) -> None:
    story = with_masters(coarse(sound("zero1-bf16_upcast-w2")))
    findings = [text for text in story.findings("optimizer") if "did not move" in text]
    assert len(findings) == 2


@pytest.mark.parametrize("cell", ["zero1-fp32-w2", "zero3-fp32-w2"])
def test_one_parameter_of_a_partition_without_a_gradient(sound: Sound, cell: str) -> None:
    story = with_masters(sound(cell), still="outlet.weight")
    (finding,) = story.findings("optimizer")
    message = f"trainable parameter {story.live('outlet.weight')!r} had no gradient in three steps"
    assert finding == f"{message}: its state in the optimizer is all zero"


def with_unused(story: Story, **where: Any) -> Story:
    """With a parameter of which the optimizer keeps nothing, and for which it got no gradient in the chosen snapshots."""
    name = story.live("outlet.weight")

    def forget(snapshot: Snapshot) -> Snapshot:
        if snapshot.optimizer is None:
            return snapshot
        others = [state for state in snapshot.optimizer.states if state.owner != name]
        return replace(snapshot, optimizer=replace(snapshot.optimizer, states=tuple(others)))

    story = story.alter(forget).parameters({"digest": "where it was"}, only="outlet.weight")
    return story.optimizer({"without_gradient": (name,)}, action="step", **where)


@pytest.mark.parametrize(
    "cell", ["ddp-fp32-w2", "fsdp2-fp32-w2", "fsdp2-fp32-w4-dp_replicate_2", "zero2-fp32-w2", "zero3-fp32-w2"]
)
def test_a_parameter_that_no_loss_depends_on(sound: Sound, cell: str) -> None:
    """As BERT's pooler under a masked LM loss."""
    story = with_unused(sound(cell)).file(1, keys=("inlet.weight",))
    for check in ("optimizer", "names", "memory", "dtypes", "active"):
        assert story.findings(check) == [], check


@pytest.mark.parametrize("cell", ["ddp-fp32-w2", "fsdp2-fp32-w2"])
def test_a_parameter_whose_gradient_a_recomputation_lost(sound: Sound, cell: str) -> None:
    """torch only warns where no input of a re-entrantly recomputed block requires a gradient."""
    recomputed = {"recomputed": {WITHOUT_GRADIENT: 1}}
    story = with_unused(sound(cell)).snapshot("step", recomputed, rank=0, nth=1)
    (finding,) = story.findings("optimizer")
    start = f"trainable parameter {story.live('outlet.weight')!r} had no gradient in three steps"
    assert finding.startswith(f"{start}: a block is recomputed with")
    changed = sound(cell).snapshot("step", recomputed)
    assert changed.findings("optimizer") == []


@pytest.mark.parametrize("cell", ["ddp-fp32-w2", "fsdp2-fp32-w2"])
def test_an_empty_parameter_has_nothing_to_update(sound: Sound, cell: str) -> None:
    story = sound(cell).parameters({"digest": "where it was"}, only="outlet.weight")
    assert story.findings("optimizer")
    changed = story.parameters({"shape": (0, 13), "local_numel": 0}, only="outlet.weight")
    assert changed.findings("optimizer") == []


def test_one_rank_may_hold_none_of_what_no_loss_depends_on(sound: Sound) -> None:
    story = with_unused(sound("fsdp2-fp32-w2"), rank=0)
    story = story.parameters({"local_numel": 0}, only="outlet.weight", rank=1)
    assert story.findings("optimizer") == []


@pytest.mark.parametrize("check", ["optimizer", "names", "memory"])
@pytest.mark.parametrize("where", [{"rank": 0}, {"nth": 1}, {"nth": 2}], ids=str)
def test_a_gradient_on_any_rank_in_any_step_is_one(sound: Sound, check: str, where: dict[str, int]) -> None:
    """A gradient that was lost on one rank, or later: the parameter is used."""
    story = with_unused(sound("ddp-fp32-w2"), **where)
    assert story.findings(check)


@pytest.mark.parametrize("where", [{"rank": 0}, {"nth": 1}, {"nth": 2}], ids=str)
def test_a_gradient_that_zero_loses_is_one(sound: Sound, where: dict[str, int]) -> None:
    """Autograd has computed it, on some rank or in some step, and the master has not moved."""
    story = with_unused(sound("zero2-fp32-w2"), **where)
    assert story.findings("optimizer") == [did_not_move("module.outlet.weight")]


@pytest.mark.parametrize("cell", ["ddp-fp32-w2", "fsdp2-fp32-w2"])
@pytest.mark.parametrize("changes", [{"held": 0}, {"trainable": False}], ids=str)
def test_a_parameter_that_was_forgotten_or_frozen_is_not_unused(
    sound: Sound, cell: str, changes: dict[str, int]
) -> None:
    story = with_unused(sound(cell)).parameters(changes, only="outlet.weight")
    findings = story.findings("optimizer")
    assert did_not_move(story.live("outlet.weight")) in findings
    assert story.findings("names")


def test_if_no_parameter_has_a_gradient_they_were_lost(sound: Sound) -> None:
    """As by ``zero_grad()`` between backward and step."""
    story = sound("ddp-fp32-w2").parameters({"digest": "where it was"})
    names = ("module.inlet.weight", "module.outlet.weight")
    story = story.optimizer({"states": (), "without_gradient": names}, action="step")
    findings = [text for text in story.findings("optimizer") if "did not move" in text]
    assert findings == [did_not_move(name) for name in names]


def test_if_nothing_beside_what_is_frozen_has_a_gradient_they_were_lost(sound: Sound) -> None:
    """As those of an adapter whose base is frozen."""
    story = sound("ddp-fp32-w2").parameters({"trainable": False}, only="inlet.weight")
    story = story.parameters({"digest": "where it was"}, only="outlet.weight")
    story = story.optimizer({"without_gradient": ("module.outlet.weight",)}, action="step")
    assert did_not_move("module.outlet.weight") in story.findings("optimizer")


def test_state_that_is_there_from_the_start_of_what_no_loss_depends_on(sound: Sound) -> None:
    """Adagrad makes it when it is made itself."""
    name = "module.outlet.weight"
    story = sound("ddp-fp32-w2").parameters({"digest": "where it was"}, only="outlet.weight")
    story = story.state("", {"digest": "4:0"}, only="outlet.weight", action="step")
    story = story.optimizer({"without_gradient": (name,)}, action="step")
    for check in ("optimizer", "names", "memory"):
        assert story.findings(check) == [], check


def test_a_parameter_that_one_rank_has_no_shard_of_is_not_unused(sound: Sound) -> None:
    """A shard of FSDP1 has only its own shape."""
    story = sound("fsdp1-fp32-w2")
    no_shard = {"shape": (0,), "local_numel": 0}
    for nth in range(3):
        story = story.parameters(no_shard, only="outlet.weight", action="step", nth=nth, rank=1)
    assert unused(story.trace.run()) == frozenset()

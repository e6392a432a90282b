"""Check ``observers`` on hand-made traces: a save or an export changes what is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.checks.traces import Sound

CELLS = ("ddp-fp32-w2", "fsdp2-bf16_upcast-w2", "zero3-fp32-w2")
WHERE = pytest.mark.parametrize(("action", "after"), [("save", "save"), ("export", "exported")])


@WHERE
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(
    "change",
    [
        ({"rng": "drawn"}, "random state"),
        ({"scheduler": "stepped"}, "scheduler"),
        ({"scaler": {"scale": 1.0}}, "gradient scaler"),
    ],
)
def test_a_number_is_another(
    sound: Sound, cell: str, action: str, after: str, change: tuple[dict[str, Any], str]
) -> None:
    changes, what = change
    story = sound(cell).snapshot(after, changes, nth=0, rank=1)
    assert story.findings("observers") == [f"rank 1: the {what} is another after the {action}"]


@WHERE
@pytest.mark.parametrize("cell", CELLS)
def test_a_parameter_is_another(sound: Sound, cell: str, action: str, after: str) -> None:
    story = sound(cell)
    changed = story.parameters({"digest": "rounded"}, only="outlet.weight", action=after, rank=0)
    assert changed.findings("observers") == [
        f"rank 0: parameter '{story.live('outlet.weight')}': other values after the {action}"
    ]


@WHERE
def test_a_parameter_is_trainable_no_more(sound: Sound, action: str, after: str) -> None:
    story = sound("ddp-fp32-w2").parameters({"trainable": False}, action=after, rank=0)
    assert story.findings("observers") == [f"rank 0: the set of trainable parameters is another after the {action}"]


@WHERE
def test_a_silent_rank(sound: Sound, action: str, after: str) -> None:
    story = sound("ddp-fp32-w2").without(after, rank=1)
    assert story.findings("observers") == [f"rank 1: no report after {action}"]


def test_a_save_leaves_the_model_in_evaluation_mode(sound: Sound) -> None:
    story = sound("ddp-fp32-w2")
    where = {"nth": 3, "rank": 1}
    part = story.snapshot("step", {"evaluating": ("outlet", "inlet")}, **where)
    before = "in training mode before it"
    assert part.findings("observers") == [
        f"rank 1: 2 modules are in evaluation mode in the step after the save, first 'inlet'; {before}"
    ]
    everything = story.snapshot("step", {"evaluating": ("", "inlet", "outlet")}, **where)
    assert everything.findings("observers") == [
        f"rank 1: the whole model is in evaluation mode in the step after the save; {before}"
    ]
    frozen = story.snapshot("step", {"evaluating": ("frozen",)})
    assert frozen.findings("observers") == []

"""Check ``extra_state`` on hand-made traces: state beside model and optimizer is lost, kept still or unlike on ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.driver import Driver
from pytest_distcompat.trace import ExtraState, ExtraStateInfo

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.checks.traces import Sound, Story

#: After which actions the state is read, as (action, which of that name, how many steps were taken by then).
READ = [
    ("build", 0, 0),
    ("step", 0, 1),
    ("step", 1, 2),
    ("step", 2, 3),
    ("step", 3, 4),
    ("step", 4, 5),
    ("save", 0, 3),
]
READ_RESUMED = [
    ("load", 0, 3),
    ("step", 0, 4),
    ("step", 1, 5),
]


def state(done: int, expected: ExtraState | None = None, **values: str) -> tuple[ExtraStateInfo, ...]:
    """A count, and an average of the weights, after so many steps."""
    if expected is None:
        expected = ExtraState()
    exact = {"count": values.get("count", str(done))}
    rounded = {"mean": values.get("mean", f"mean after {done}")}
    return (ExtraStateInfo("ema", expected, exact, rounded),)


def story_of(sound: Sound, expected: ExtraState | None = None) -> Story:
    """Return a story in which each snapshot has the state."""
    story = sound("ddp-fp32-w2")
    for run, read in (("train", READ), ("resume", READ_RESUMED)):
        for action, nth, done in read:
            story = story.snapshot(action, {"extra": state(done, expected)}, run=run, nth=nth)
    return story


def test_a_state_that_is_kept(sound: Sound) -> None:
    assert story_of(sound).findings("extra_state") == []


def test_it_is_lost(sound: Sound) -> None:
    story = story_of(sound).snapshot("load", {"extra": state(0)}, run="resume", rank=1)
    assert story.findings("extra_state") == ["rank 1: ema.count is another after the load than was saved"]
    average = state(3, mean="of the weights")
    story = story_of(sound).snapshot("load", {"extra": average}, run="resume", rank=1)
    assert story.findings("extra_state") == ["rank 1: ema.mean is another after the load than was saved"]


def test_a_save_changes_it(sound: Sound) -> None:
    story = story_of(sound).snapshot("save", {"extra": state(4)})
    story = story.snapshot("load", {"extra": state(4)}, run="resume")
    assert story.findings("extra_state") == [
        "rank 0: ema.count is another after the save than before",
        "rank 1: ema.count is another after the save than before",
    ]


def test_it_goes_on_from_another_place(sound: Sound) -> None:
    story = story_of(sound).snapshot("step", {"extra": state(1)}, run="resume", nth=0, rank=0)
    expected = "rank 0: ema.count is another in step 1 after the load than in the run that never stopped"
    assert story.findings("extra_state") == [expected]


def test_what_is_computed_may_be_rounded_otherwise(sound: Sound) -> None:
    rounded = state(4, mean="rounded")
    story = story_of(sound).snapshot("step", {"extra": rounded}, run="resume", nth=0)
    assert story.findings("extra_state") == []


def test_it_never_changes(sound: Sound) -> None:
    story = story_of(sound)
    for action, nth, _ in READ:
        story = story.snapshot(action, {"extra": state(0)}, nth=nth)
    for action, nth, _ in READ_RESUMED:
        story = story.snapshot(action, {"extra": state(0)}, run="resume", nth=nth)
    assert story.findings("extra_state") == [
        "rank 0: ema has not changed in three steps",
        "rank 1: ema has not changed in three steps",
    ]


@pytest.mark.parametrize("alike", [True, False])
def test_ranks_have_other_values(sound: Sound, alike: bool) -> None:
    expected = ExtraState(alike=alike)
    story = story_of(sound, expected)
    changes = {"extra": state(2, expected, mean="of rank 1")}
    changed = story.snapshot("step", changes, nth=1, rank=1)
    findings = changed.findings("extra_state")
    if alike:
        assert findings == ["rank 1: ema.mean is another than on rank 0 after step 2"]
    else:
        assert findings == []


@pytest.mark.parametrize("comes_back", [True, False])
def test_what_is_not_to_come_back(sound: Sound, comes_back: bool) -> None:
    expected = ExtraState(comes_back=comes_back)
    story = story_of(sound, expected)
    for action, nth, done in READ_RESUMED:
        from_start = state(done - 3, expected)
        story = story.snapshot(action, {"extra": from_start}, run="resume", nth=nth)
    assert bool(story.findings("extra_state")) == comes_back


def test_ranks_hold_other_parts_of_a_tensor(sound: Sound) -> None:
    def part(done: int, rank: int) -> tuple[ExtraStateInfo, ...]:
        name = f"mean (('Shard(0)', 2, {rank}),)"
        rounded = {name: f"{rank} after {done}"}
        return (ExtraStateInfo("ema", ExtraState(), {}, rounded),)

    story = sound("fsdp2-fp32-w2")
    for rank in (0, 1):
        for action, nth, done in READ:
            story = story.snapshot(action, {"extra": part(done, rank)}, nth=nth, rank=rank)
        for action, nth, done in READ_RESUMED:
            story = story.snapshot(action, {"extra": part(done, rank)}, run="resume", nth=nth, rank=rank)
    assert story.findings("extra_state") == []
    lost = story.snapshot("load", {"extra": part(0, 1)}, run="resume", rank=1)
    finding = "rank 1: ema.mean (('Shard(0)', 2, 1),) is another after the load than was saved"
    assert lost.findings("extra_state") == [finding]


class Names(Driver):
    """Names a state."""

    extra_state: ClassVar[Mapping[str, ExtraState]] = {"ema": ExtraState()}


@pytest.mark.parametrize(
    ("driver", "options", "reason"),
    [
        (Names, {}, None),
        (Names, {"save_only_model": True}, "checkpoints hold weights alone"),
        (Driver, {}, "the driver names no state in extra_state"),
    ],
)
def test_where_it_applies(driver: type[Driver], options: dict[str, Any], reason: str | None) -> None:
    cell = Cell.of("ddp", "fp32", **options)
    assert CHECKS.get("extra_state").not_applicable(cell, driver) == reason

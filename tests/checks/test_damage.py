"""Check ``damage`` on hand-made traces: a corrupted checkpoint that loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.checks import CHECKS
from pytest_distcompat.expect import fails
from pytest_distcompat.judge import judge
from pytest_distcompat.trace import RunFailure

if TYPE_CHECKING:
    from tests.checks.traces import Story

RunsOf = Callable[[str, str], "Story"]
CELLS = ("ddp-fp32-w2", "fsdp2-fp32-w2", "zero3-fp32-w2")


def ending(story: Story, run: str, end: RunFailure | None) -> Story:
    """Return the story with another end of one run."""
    runs = {**story.trace.runs, run: replace(story.trace.run(run), end=end)}
    return replace(story, trace=replace(story.trace, runs=runs))


@pytest.mark.parametrize("cell", CELLS)
def test_sound(runs_of: RunsOf, cell: str) -> None:
    story = runs_of(cell, "damage")
    assert story.findings("damage") == []
    assert judge(CHECKS.get("damage"), story.cell, story.trace).status == "passed"


@pytest.mark.parametrize(("run", "done"), [("truncated", "cut in half"), ("removed", "gone")])
def test_loaded_all_the_same(runs_of: RunsOf, run: str, done: str) -> None:
    story = ending(runs_of("ddp-fp32-w2", "damage"), run, None)
    assert story.findings("damage") == [
        f"file 'checkpoint/shard_0.pt' is {done}: it was loaded without an error, and training went on"
    ]
    late = ending(story, run, RunFailure("raised", "rank 0 raised KeyError: 'step'", "all of it", "step", 4))
    (finding,) = late.findings("damage")
    assert finding.endswith("without an error, and training failed in 'step' only: rank 0 raised KeyError: 'step'")


def test_an_error_that_does_not_name_the_file(runs_of: RunsOf) -> None:
    end = RunFailure("raised", "rank 1 raised Bad: ranks 0, 1\n\n  ...\nEOFError\n", "EOFError", "load", 3)
    story = ending(runs_of("fsdp2-fp32-w2", "damage"), "truncated", end)
    assert story.findings("damage") == [
        "file 'checkpoint/shard_0.pt' is cut in half: the error does not name it: rank 1 raised Bad: ranks 0, 1 ... EOFError"
    ]


SOURCE = """Traceback (most recent call last):
  File "trainer.py", line 3, in load
    state = torch.load(directory / "shard_0.pt")
            ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "torch/serialization.py", line 7, in load
    raise RuntimeError("no central directory")
"""


@pytest.mark.parametrize(
    ("last", "named"), [("RuntimeError: no central directory", True), ("OSError: a/shard_0.pt: cut", False)]
)
def test_a_source_line_in_the_error_does_not_name_the_file(runs_of: RunsOf, last: str, named: bool) -> None:
    end = RunFailure("raised", f"rank 0 raised {last}", f"--- rank 0:\n{SOURCE}{last}\n", "load", 3)
    story = ending(runs_of("ddp-fp32-w2", "damage"), "truncated", end)
    assert any("the error does not name it" in text for text in story.findings("damage")) == named


@pytest.mark.parametrize("kind", ["crashed", "hung"])
def test_a_crash_or_a_hang_is_no_known_failure(runs_of: RunsOf, kind: str) -> None:
    story = ending(runs_of("fsdp2-fp32-w2", "damage"), "removed", RunFailure(kind, "it", "all of it", "load", 3))
    for expectations in ((), (fails("damage", reason="known"),)):
        verdict = judge(CHECKS.get("damage"), story.cell, story.trace, expectations)
        assert verdict.status == kind
        assert verdict.message == "all of it"


def test_nothing_was_corrupted(runs_of: RunsOf) -> None:
    story = runs_of("ddp-fp32-w2", "damage").snapshot("damage", {"files": ()}, run="removed")
    assert story.findings("damage") == ["removed: no file was corrupted"]
    gone = runs_of("ddp-fp32-w2", "damage").without("damage", run="removed")
    assert gone.findings("damage") == ["removed: no file was corrupted"]
    assert judge(CHECKS.get("damage"), gone.cell, gone.trace).status == "failed"

"""Check ``mean`` on hand-made traces: which weights tokens have in the gradients of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.driver import Driver
from pytest_distcompat.judge import judge
from pytest_distcompat.trace import RowWeight, Snapshot, TokenWeights

if TYPE_CHECKING:
    from tests.checks.traces import Sound, Story

#: Tokens of each row, by rank and micro-batch.
TOKENS = {
    (0, 0): (4, 2),
    (0, 1): (1,),
    (1, 0): (8,),
    (1, 1): (3, 3),
}
#: From rank, micro-batch and tokens of a row to the weight of each of them.
Weight = Callable[[int, int, int], float]


def tokens_of_micro_batch(rank: int, micro: int) -> int:
    return sum(TOKENS[rank, micro])


def tokens_of_joint_micro_batch(micro: int) -> int:
    return tokens_of_micro_batch(0, micro) + tokens_of_micro_batch(1, micro)


def tokens_of_rank(rank: int) -> int:
    return tokens_of_micro_batch(rank, 0) + tokens_of_micro_batch(rank, 1)


#: What has an equal weight -> the weight of a token of a row with so many, in that micro-batch.
WEIGHTS: dict[str, Weight] = {
    "token": lambda rank, micro, tokens: 0.5,
    "row": lambda rank, micro, tokens: 1 / tokens,
    "micro_batch": lambda rank, micro, tokens: 1 / tokens_of_micro_batch(rank, micro),
    "joint_micro_batch": lambda rank, micro, tokens: 1 / tokens_of_joint_micro_batch(micro),
    "rank": lambda rank, micro, tokens: 1 / tokens_of_rank(rank),
}


def story_of(sound: Sound, weight: Weight, declared: str = "") -> Story:
    """Return a story with these weights in the first three steps."""
    story = sound("ddp-fp32-w2-grad_accum_2")

    def declare(snapshot: Snapshot) -> Snapshot:
        assert snapshot.unwrapped is not None
        return replace(snapshot, unwrapped=replace(snapshot.unwrapped, mean=declared))

    story = story.alter(declare, action="build_model")
    for rank in (0, 1):
        micros: list[TokenWeights] = []
        for micro in (0, 1):
            rows = []
            for tokens in TOKENS[rank, micro]:
                rows.append(RowWeight(tokens, weight(rank, micro, tokens)))
            micros.append(TokenWeights(tuple(rows), known=True))
        for nth in range(3):
            story = story.snapshot("step", {"token_weights": tuple(micros)}, nth=nth, rank=rank)
    return story


@pytest.mark.parametrize("mean", WEIGHTS)
def test_each_mean_is_told_from_the_others(sound: Sound, mean: str) -> None:
    weight = WEIGHTS[mean]
    undeclared = story_of(sound, weight)
    assert undeclared.findings("mean") == []
    for declared in WEIGHTS:
        findings = story_of(sound, weight, declared).findings("mean")
        if declared == mean:
            assert findings == []
        else:
            assert findings != [], declared


def test_a_mean_of_means_where_one_of_tokens_is_meant(sound: Sound) -> None:
    story = story_of(sound, WEIGHTS["micro_batch"], "token")
    assert story.findings("mean") == ["gradients give each micro-batch the same weight; the driver says each token"]


def test_a_mean_that_is_none_of_them(sound: Sound) -> None:
    # Each rank divides by the tokens of the other one.
    story = story_of(sound, lambda rank, micro, tokens: 1 / tokens_of_rank(1 - rank))
    (finding,) = story.findings("mean")
    assert finding == (
        "step 1: gradients are a mean with other weights than those of each token or each row or each micro-batch or each "
        "micro-batch of all ranks together or each rank: a token of rank 1's micro-batch 1 (8 tokens) has 2 times the weight "
        "of one of rank 0's micro-batch 1 (6 tokens)"
    )


def test_rounding_is_no_other_weight(sound: Sound) -> None:
    story = story_of(sound, lambda rank, micro, tokens: 0.5 + 0.004 * rank, "token")
    assert story.findings("mean") == []


def test_nothing_is_known_of_another_loss(sound: Sound) -> None:
    story = story_of(sound, lambda rank, micro, tokens: rank + 1.0, "token")
    unknown = story.snapshot("step", {"token_weights": (TokenWeights(()),)}, nth=0, rank=1)
    assert unknown.findings("mean") == []
    assert sound("ddp-fp32-w2").findings("mean") == []


def remark(story: Story) -> str:
    """Return what the report says of a claim that holds."""
    return judge(CHECKS.get("mean"), story.cell, story.trace).reason


def test_the_report_says_which_mean_was_found(sound: Sound) -> None:
    assert remark(story_of(sound, WEIGHTS["token"])) == "gradients give each token the same weight"
    assert remark(sound("ddp-fp32-w2")) == ""


def test_a_mean_of_the_ranks_is_shown_beside_the_loss_of_the_joined_batch(sound: Sound) -> None:
    story = story_of(sound, WEIGHTS["rank"])
    # 7 tokens on rank 0, 14 on rank 1.
    for rank, loss in enumerate((3.0, 6.0)):
        story = story.snapshot("step", {"loss": loss}, nth=0, rank=rank)
    assert story.findings("mean") == []
    assert remark(story) == (
        "gradients give each rank the same weight; in step 1 the ranks' losses have the mean 4.5, weighted by their tokens 5"
    )


def test_a_mean_that_is_misspelt(sound: Sound) -> None:
    expected = "'token', 'row', 'micro_batch', 'joint_micro_batch', 'rank'"
    story = story_of(sound, WEIGHTS["token"], "tokens")
    assert story.findings("mean") == [f"the driver's mean is 'tokens'; expected one of {expected}"]


@pytest.mark.parametrize(
    ("cell", "applies"), [("ddp-fp32-w2", True), ("ddp-fp32-w2-compile", False), ("fsdp2-fp32-w4-tp_2", False)]
)
def test_where_it_applies(cell: str, applies: bool) -> None:
    reason = CHECKS.get("mean").not_applicable(Cell.parse(cell), Driver)
    assert (reason is None) == applies

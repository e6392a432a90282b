"""Check ``mean``: over what are the gradients of a step a mean?

A loss may be a mean over all tokens of a step, or a mean of the means of rows, micro-batches or
ranks. They differ if these have different numbers of tokens: a mean of means gives the tokens of a
short batch more weight.

``judge.judge`` calls the check once the run has ended. It gets a cell, one point of the test matrix
such as ``ddp-fp32-w2``, and a trace of the run ``train`` (one process group from start to end). The
snapshots of the first three steps have, for each micro-batch and row, how many tokens are trained
on and what each of them weighs in the gradient of the loss (``token_weights``). The check yields a
finding if the weights are not those that the driver declares, such as ``gradients give each
micro-batch the same weight; the driver says each token``. If it passes, reports show ``_measured``.

Example: two ranks with rows of 1 and 3 tokens. In a mean over tokens each token weighs 1/4. In a
mean over ranks the token of the first weighs 1/2, each of the others 1/6: weight times tokens of
the rank is equal.

Arguments of the decorator ``check``: ``scenario`` has the runs that the check reads; ``until`` the
last snapshots that it needs, as (run, action, which one of that action, from 0); ``order`` its
place in lists; ``not_applicable`` returns why a cell of a driver (the class by which a trainer is
tested) does not have the check, or None; ``remark`` returns what reports say if the check passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._base import check
from pytest_distcompat.driver import Driver
from pytest_distcompat.scenario import SAVED, TRAIN
from pytest_distcompat.trace import RunTrace, Snapshot, Trace

#: How far equal weights may be apart, relatively. They are read from gradients that may be in
#: bfloat16.
TOLERANCE = 0.03

#: The names of means, by what has an equal weight in them -> the words for it. A driver may declare
#: one of the names. A joint micro-batch is the micro-batches of all ranks that have the same number
#: in the step.
MEANS = {
    "token": "each token",
    "row": "each row",
    "micro_batch": "each micro-batch",
    "joint_micro_batch": "each micro-batch of all ranks together",
    "rank": "each rank",
}


def _not_read(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why a cell does not have the check; None if it has."""
    if cell.option("compile"):
        return (
            "a hook that reads the gradient of what the model returns "
            "would break the graph that compile is to see"
        )
    if cell.tp * cell.cp * cell.pp > 1:
        return "ranks have parts of what the model returns, or of its rows"
    return None


def _measured(cell: Cell, trace: Trace) -> str:
    """Return a remark for reports: over what gradients are a mean. Empty if it is not known.

    If it is not each token, the remark also says how far that moves the loss.
    """
    run = trace.run()
    steps = _steps(run)
    if len(steps) < SAVED:
        return ""
    if not all(step.rows for step in steps):
        return ""
    means = steps[-1].means
    text = f"gradients give {_words(means)} the same weight"
    if "token" in means:
        return text
    first_step = run.at("step")
    return text + _two_mean_losses(first_step, steps[0].rows)


def _two_mean_losses(snapshots: Sequence[Snapshot], rows: Iterable[_Row]) -> str:
    """Return the words for two means of the ranks' losses in the first step: plain and by tokens.

    They are empty if a rank has reported no loss, or no rank has a token that is trained on.

    No other check shows the difference if the reference is derived from the trainer's own loss,
    since it then has the same mean.
    """
    tokens_by_rank: Counter[int] = Counter()
    for row in rows:
        tokens_by_rank[row.rank] += row.tokens
    losses = 0.0
    weighted = 0.0
    for snapshot in snapshots:
        if snapshot.loss is None:
            return ""
        losses += snapshot.loss
        weighted += snapshot.loss * tokens_by_rank[snapshot.rank]
    tokens = tokens_by_rank.total()
    if not tokens:
        return ""
    mean_of_ranks = losses / len(snapshots)
    mean_of_tokens = weighted / tokens
    return (
        f"; in step 1 the ranks' losses have the mean {mean_of_ranks:.6g}, "
        f"weighted by their tokens {mean_of_tokens:.6g}"
    )


@check(
    scenario=TRAIN,
    until=(("train", "step", SAVED - 1),),
    order=5,
    not_applicable=_not_read,
    remark=_measured,
)
def mean(cell: Cell, trace: Trace) -> Iterator[str]:
    """Check that gradients are a mean over tokens, rows, micro-batches or ranks, as declared.

    If the driver declares none of these, any will do. The weight of each token is read
    from the gradient of the model's logits, on each rank and in each micro-batch of the first three
    steps; no reference is needed. It can be read only if the loss is a cross-entropy that weights
    the tokens of a row alike. Where ranks have equally many tokens all means are the same.

    If it fails: a mean of means gives tokens of short batches more weight than others. Divide the
    sum over tokens by the number of tokens of all micro-batches and ranks
    (https://github.com/huggingface/transformers/pull/34191), and count the labels that the loss
    uses. What it finds stands in the report although the check passes: a reference that is derived
    from the trainer's own loss has the same mean, so that no other check tells a mean of the ranks'
    means from one over tokens.
    """
    run = trace.run()
    # The driver's attribute ``mean``: a key of ``MEANS``, or empty.
    declared = run.unwrapped.mean if run.unwrapped else ""
    if declared and declared not in MEANS:
        names = ", ".join(repr(name) for name in MEANS)
        yield f"the driver's mean is {declared!r}; expected one of {names}"
        return
    steps = _steps(run)
    means = frozenset(MEANS)
    for number, step in enumerate(steps, start=1):
        # ``means`` are those that fitted all steps before this one.
        if not step.means:
            other = f"gradients are a mean with other weights than those of {_words(means)}"
            example = _example(step.rows)
            yield f"step {number}: {other}: {example}"
            return
        means = step.means
    # The weights of a step are not known, so whether the declared mean fits is not known either.
    if len(steps) < SAVED:
        return
    if declared and declared not in means:
        yield f"gradients give {_words(means)} the same weight; the driver says {MEANS[declared]}"


@dataclass(frozen=True)
class _Row:
    """A row of a batch that has tokens to train on.

    Attributes:
        rank: The rank that trained on it.
        micro_batch: The number of its micro-batch in the step.
        tokens: The number of its tokens that are trained on.
        weight: The weight of each of these tokens in the loss.
    """

    rank: int
    micro_batch: int
    tokens: int
    weight: float


@dataclass(frozen=True)
class _Step:
    """A step whose weights are known.

    Attributes:
        rows: Its rows on all ranks, without those that have no token to train on.
        means: The means (keys of ``MEANS``) that fit the weights of this step and all before it.
    """

    rows: list[_Row]
    means: frozenset[str]


def _steps(run: RunTrace) -> list[_Step]:
    """Return the first steps of a run, up to the first whose weights are unknown.

    They are ``SAVED`` at most, which is 3: the steps before the run saves.
    """
    steps: list[_Step] = []
    means = frozenset(MEANS)
    for nth in range(SAVED):
        rows = _rows_of(run.at("step", nth))
        if rows is None:
            break
        fitting = [name for name in means if _is_equal(rows, name)]
        means = frozenset(fitting)
        steps.append(_Step(rows, means))
    return steps


def _rows_of(snapshots: Iterable[Snapshot]) -> list[_Row] | None:
    """Return the rows of a step on all ranks; None if the weights of any row are unknown."""
    rows: list[_Row] = []
    for snapshot in snapshots:
        if not snapshot.token_weights:
            return None
        for number, weights in enumerate(snapshot.token_weights):
            if not weights.known:
                return None
            for row in weights.rows:
                rows.append(_Row(snapshot.rank, number, row.tokens, row.weight))
    return rows


def _is_equal(rows: list[_Row], mean: str) -> bool:
    """Tell whether the rows have the weights of a mean, a key of ``MEANS``.

    A mean over micro-batches gives each micro-batch the same weight, which its tokens share. So the
    weight of a token times the number of tokens in its micro-batch is the same for all rows.
    """
    shared_weights: list[float] = []
    for row in rows:
        shared_weights.append(row.weight * _tokens_that_share(rows, row, mean))
    if not shared_weights:
        return True
    largest = max(shared_weights)
    return largest - min(shared_weights) <= TOLERANCE * largest


def _tokens_that_share(rows: list[_Row], row: _Row, mean: str) -> int:
    """Return how many tokens are in the unit of the mean that the row is part of.

    The units of the mean ``micro_batch`` are micro-batches, those of ``rank`` are all micro-batches
    of a rank.
    """
    if mean == "token":
        return 1
    if mean == "row":
        return row.tokens
    total = 0
    for other in rows:
        same_rank = other.rank == row.rank
        same_number = other.micro_batch == row.micro_batch
        # ``micro_batch`` needs the same rank and number, ``joint_micro_batch`` the same number,
        # ``rank`` the same rank.
        if (mean == "joint_micro_batch" or same_rank) and (mean == "rank" or same_number):
            total += other.tokens
    return total


def _example(rows: list[_Row]) -> str:
    """Return the words for the micro-batches whose tokens have the most and the least weight."""
    most = max(rows, key=_weight)
    least = min(rows, key=_weight)
    ratio = most.weight / least.weight
    return (
        f"a token of {_place(rows, most)} "
        f"has {ratio:.3g} times the weight of one of {_place(rows, least)}"
    )


def _weight(row: _Row) -> float:
    """Return what rows are compared by: the weight of a token."""
    return row.weight


def _place(rows: list[_Row], row: _Row) -> str:
    """Return the words for the micro-batch of a row."""
    tokens = _tokens_that_share(rows, row, "micro_batch")
    number = row.micro_batch + 1
    return f"rank {row.rank}'s micro-batch {number} ({tokens} tokens)"


def _words(means: Iterable[str]) -> str:
    """Return the words for some means, in the order of ``MEANS``."""
    words: list[str] = []
    for name, word in MEANS.items():
        if name in means:
            words.append(word)
    return " or ".join(words)

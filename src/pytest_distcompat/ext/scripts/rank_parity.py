"""Parity of a script on one rank and on several with the same global batch: same losses, gradients and final weights."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_distcompat.checks import and_others, message
from pytest_distcompat.checks._values import Names
from pytest_distcompat.ext.scripts.launching import Host, check_argument, launch, leave_directory
from pytest_distcompat.ext.scripts.recorder import STRIDE
from pytest_distcompat.ext.scripts.result import ScriptRun
from pytest_distcompat.failures import Incompatible, RunFailedError, UsageProblem, hides_frames
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.trace import RunTrace, Snapshot, shard_groups, together

#: pytest looks for this name: https://docs.pytest.org/en/stable/example/simple.html
__tracebackhide__ = hides_frames


@dataclass(frozen=True)
class Weight:
    """Sums over all elements of a parameter or a buffer: how many these are, their sum, and that of their squares."""

    numel: int
    total: float
    square: float


@dataclass(frozen=True)
class Parity:
    """Two runs of a script, ``one`` on one rank and ``many`` on several, of ``steps`` steps each."""

    one: ScriptRun
    many: ScriptRun
    steps: int
    loss_tolerance: float
    norm_tolerance: float

    @property
    def findings(self) -> list[str]:
        """Return what is wrong: the steps of the runs, else the first step that differs, and weights that do in the end."""
        for title, run in (("on one rank", self.one), ("on several ranks", self.many)):
            problem = run.missing_evidence()
            if problem:
                return [f"the run {title}: {problem}"]
            taken = len(run.trace.indices("step"))
            if taken != self.steps:
                return [f"the run {title} took {taken} steps; expected steps={self.steps}"]
        return [*self._differing_step(), *self._differing_weights()]

    def check(self) -> None:
        """Raise Incompatible with the findings, if there are any."""
        findings = self.findings
        if findings:
            logs = [f"logs: {run.directory}" for run in (self.one, self.many)]
            raise Incompatible("\n".join((message(findings), *self.many.labels, *logs)))

    def _differing_step(self) -> list[str]:
        """Return the findings of the first step whose loss or gradient norm differs: later ones follow from it."""
        for nth in range(self.steps):
            index = (nth + 1) * STRIDE
            one = self.one.trace.at_index(index)
            many = self.many.trace.at_index(index)
            wrong = [*self._other_loss(one, many), *self._other_norms(one, many)]
            if wrong:
                return [f"step {nth + 1}: {text}" for text in wrong]
        return []

    def _other_loss(self, one: Iterable[Snapshot], many: Iterable[Snapshot]) -> Iterator[str]:
        """Yield a finding if the mean of the ranks' losses is not that of the run on one rank."""
        expected = _mean_loss(one)
        found = _mean_loss(many)
        if expected is None or found is None:
            return
        if not math.isclose(found, expected, rel_tol=self.loss_tolerance):
            yield f"the loss is {found:.6g} on several ranks; {expected:.6g} on one ({self.loss_tolerance:.0e} allowed)"

    def _other_norms(self, one: Iterable[Snapshot], many: Sequence[Snapshot]) -> Iterator[str]:
        """Yield a finding for each copy of the model whose gradients have another norm than those of the run on one rank."""
        expected = math.sqrt(sum(step.square for snapshot in one for step in snapshot.steps))
        shares = {
            snapshot.rank: together((step.holders, step.square) for step in snapshot.steps)
            for snapshot in many
        }
        holders = {rank: ranks for rank, (ranks, _) in shares.items()}
        for ranks in shard_groups(holders, len(many)):
            norm = math.sqrt(sum(shares[rank][1] for rank in ranks if rank in shares))
            if not math.isclose(norm, expected, rel_tol=self.norm_tolerance):
                where = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
                allowed = f"{self.norm_tolerance:.0e} allowed"
                yield f"the gradients of {where} have norm {norm:.6g}; {expected:.6g} on one rank ({allowed})"

    def _differing_weights(self) -> Iterator[str]:
        """Yield a finding for parameters and buffers that differ after the last step, from what their sums show."""
        expected = _final_weights(self.one.trace)
        found = _final_weights(self.many.trace)
        others = [
            name
            for name in expected.keys() & found.keys()
            if not self._is_close(expected[name], found[name])
        ]
        if others:
            yield f"after the last step {and_others(others)} have other values than on one rank"

    def _is_close(self, expected: Weight, found: Weight) -> bool:
        """Tell whether sums are equal within the rounding of their terms."""
        if found.numel != expected.numel:
            return True  # parts that are no whole: nothing to compare
        norm = math.sqrt(expected.square)
        close_norm = math.isclose(
            math.sqrt(found.square), norm, rel_tol=self.norm_tolerance, abs_tol=1e-6
        )
        allowed = self.norm_tolerance * norm * math.sqrt(expected.numel) + 1e-6
        return close_norm and abs(found.total - expected.total) <= allowed


def _mean_loss(snapshots: Iterable[Snapshot]) -> float | None:
    """Return the mean of the ranks' losses; None if no rank has one."""
    losses = [snapshot.loss for snapshot in snapshots if snapshot.loss is not None]
    return sum(losses) / len(losses) if losses else None


def _final_weights(run: RunTrace) -> dict[str, Weight]:
    """Return the weights of one copy of the trained model, by unwrapped name, from the last snapshot of each rank."""
    if run.unwrapped is None:
        return {}
    names = Names(run, run.unwrapped)
    last = {snapshot.rank: snapshot for snapshot in run.snapshots if snapshot.action == "export"}
    by_rank: dict[str, dict[int, Weight]] = defaultdict(dict)
    holders: dict[str, dict[int, tuple[int, ...]]] = defaultdict(dict)
    for rank, snapshot in last.items():
        layouts = {info.name: info.layout for info in snapshot.parameters}
        for live, sums in snapshot.sums.items():
            name = names(live)
            by_rank[name][rank] = Weight(*sums)
            holders[name][rank] = layouts[live].holders if live in layouts else ()
    found: dict[str, Weight] = {}
    for name, parts in by_rank.items():
        group, *_ = shard_groups(holders[name])
        weight = _sum(parts[rank] for rank in group if rank in parts)
        if weight.numel < names.sizes.get(name, 0):
            # Each rank has a part of the master alone, as ZeRO partitions it.
            weight = _sum(parts.values())
        found[name] = weight
    return found


def _sum(parts: Iterable[Weight]) -> Weight:
    numel, total, square = 0, 0.0, 0.0
    for part in parts:
        numel += part.numel
        total += part.total
        square += part.square
    return Weight(numel, total, square)


def parity(
    script: str | Path,
    *,
    one: Sequence[str | Path],
    many: Sequence[str | Path],
    steps: int,
    precision: str = "fp32",
    strategy: str = "",
    world_size: int | None = None,
    host: Host | None = None,
    **settings: Any,
) -> Parity:
    """Run the script on one rank and on several, and compare losses, gradient norms and the final weights.

    The arguments are to give both runs the same global batch, in the same order, and no dropout. What a script passes to
    ``backward`` is taken for its loss: the mean over micro-batches and ranks is compared.

    Args:
        script: As for ``launch``.
        one: The arguments of the run on one rank, such as ``["--batch", "8"]``.
        many: Those of the run on several ranks: ``["--batch", "4"]``.
        steps: The number of steps that each takes.
        precision: As for ``launch``; its tolerances hold.
        strategy: As for ``launch``, of the run on several ranks.
        world_size: How many ranks that are, instead of the host's.
        host: As for ``launch``.
        **settings: Further arguments of ``launch``.

    Raises:
        Incompatible: With the differences.
        RunFailedError: If a run fails.
        UsageProblem: For a wrong argument.
    """
    check_argument(
        "steps",
        steps,
        isinstance(steps, int) and steps > 0,
        "expected a number of steps, 1 or more",
    )
    for name, arguments in (("one", one), ("many", many)):
        check_argument(
            name, arguments, isinstance(arguments, (list, tuple)), "expected a list of texts"
        )
    reserved = [
        name for name in ("watch_steps", "stop_after", "allow_failure", "fails") if name in settings
    ]
    if reserved:
        raise UsageProblem(f"parity takes no {reserved[0]}: it says that of each run itself")
    host = host or Host.here()
    ranks = host.world_size if world_size is None else world_size
    check_argument(
        "world_size",
        ranks,
        isinstance(ranks, int) and ranks > 1,
        "expected a number of ranks, 2 or more",
    )
    rounding = PRECISIONS.get(precision)
    common: dict[str, Any] = {
        **settings,
        "precision": precision,
        "watch_steps": steps,
        "host": host,
    }
    runs: list[ScriptRun] = []
    try:
        runs.append(launch(script, *one, world_size=1, **common))
        runs.append(launch(script, *many, world_size=ranks, strategy=strategy, **common))
        # Both runs round, each in its own way.
        found = Parity(
            runs[0], runs[1], steps, 2 * rounding.loss_tolerance, 2 * rounding.norm_tolerance
        )
        found.check()
    except (Incompatible, RunFailedError):
        for run in runs:
            leave_directory(run.directory)
        raise
    return found

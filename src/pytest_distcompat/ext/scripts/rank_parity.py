"""``parity``: a script must learn the same on one rank as on several, from the same global batch.

A user's test calls ``parity("train.py", one=["--batch", "8"], many=["--batch", "4"], steps=5,
strategy="fsdp2")``, directly or by the fixture ``distcompat`` (``plugin``). The script runs twice
(``launch``): on one rank (process) with batches of 8, and on two ranks with batches of 4 each. Then
losses, gradient norms and the final weights of both runs must be equal within tolerances.
``Parity`` has the two runs and compares them. The result is findings, such as ``step 2: the loss is
2.31 on several ranks; 2.29 on one (4e-05 allowed)``.

What is compared are *snapshots*: what a probe in each rank recorded after each step, and at the
end. On several ranks each has only a *shard*, a part, of a tensor, and nothing gathers them. So
tensors are compared by sums over their elements, to which the shards add up. A *replica* is a group
of ranks that together hold one copy of the model: each single rank of DDP, all of FSDP.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_distcompat.checks import and_others, message
from pytest_distcompat.ext.scripts.launch_arguments import check_argument
from pytest_distcompat.ext.scripts.launching import Host, launch, leave_directory
from pytest_distcompat.ext.scripts.recorder import STRIDE
from pytest_distcompat.ext.scripts.result import ScriptRun
from pytest_distcompat.failures import Incompatible, RunFailedError, UsageProblem, hides_frames
from pytest_distcompat.model_values import Names
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.trace import RunTrace, Snapshot, shard_groups, together

#: pytest looks for this name: https://docs.pytest.org/en/stable/example/simple.html
__tracebackhide__ = hides_frames


@dataclass(frozen=True)
class Weight:
    """Sums over the elements of a parameter or a buffer, which stand for its values.

    The sums over its shards add up to those of the tensor.

    Attributes:
        numel: The number of elements.
        total: Their sum.
        square: The sum of their squares.
    """

    numel: int
    total: float
    square: float


@dataclass(frozen=True)
class Parity:
    """Two runs of a script that must agree.

    Attributes:
        one: The run on one rank.
        many: The run on several ranks.
        steps: The number of optimizer steps that each run must take.
        loss_tolerance: How far apart losses may be, relative to those on one rank.
        norm_tolerance: The same for norms of gradients and weights.
    """

    one: ScriptRun
    many: ScriptRun
    steps: int
    loss_tolerance: float
    norm_tolerance: float

    @property
    def findings(self) -> list[str]:
        """Return what is wrong.

        A run that did not take ``steps`` steps is the only finding. Otherwise the findings are
        those of the first step that differs, and those of the final weights.
        """
        for title, run in (("on one rank", self.one), ("on several ranks", self.many)):
            # Why the probe recorded nothing to compare.
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
            # A label says what the CPU bridge changed in a library.
            lines = [message(findings), *self.many.labels]
            for run in (self.one, self.many):
                lines.append(f"logs: {run.directory}")
            raise Incompatible("\n".join(lines))

    def _differing_step(self) -> list[str]:
        """Return the findings of the first step that differs; later steps differ because of it."""
        for nth in range(self.steps):
            # The index of the snapshots after step 3 is 300.
            index = (nth + 1) * STRIDE
            one_rank = self.one.trace.at_index(index)
            several_ranks = self.many.trace.at_index(index)
            findings = list(self._differing_loss(one_rank, several_ranks))
            findings += self._differing_norms(one_rank, several_ranks)
            if findings:
                return [f"step {nth + 1}: {text}" for text in findings]
        return []

    def _differing_loss(
        self, one_rank: Iterable[Snapshot], several_ranks: Iterable[Snapshot]
    ) -> Iterator[str]:
        """Yield a finding if the mean of the ranks' losses differs from the loss on one rank."""
        expected = _mean_loss(one_rank)
        loss = _mean_loss(several_ranks)
        if expected is None or loss is None:
            return
        if not math.isclose(loss, expected, rel_tol=self.loss_tolerance):
            allowed = f"{self.loss_tolerance:.0e} allowed"
            yield f"the loss is {loss:.6g} on several ranks; {expected:.6g} on one ({allowed})"

    def _differing_norms(
        self, one_rank: Iterable[Snapshot], several_ranks: Sequence[Snapshot]
    ) -> Iterator[str]:
        """Yield a finding for each replica whose gradients have another norm than on one rank.

        A replica is a group of ranks that together hold one copy of the model: each single rank of
        DDP, all ranks of FSDP.
        """
        squares: list[float] = []
        for snapshot in one_rank:
            squares += [step.square for step in snapshot.steps]
        expected = math.sqrt(sum(squares))
        for ranks, norm in _norms_by_replica(several_ranks).items():
            if not math.isclose(norm, expected, rel_tol=self.norm_tolerance):
                plural = "s" if len(ranks) > 1 else ""
                listed = ", ".join(map(str, ranks))
                owners = f"rank{plural} {listed}"
                allowed = f"{self.norm_tolerance:.0e} allowed"
                yield (
                    f"the gradients of {owners} have norm {norm:.6g}; "
                    f"{expected:.6g} on one rank ({allowed})"
                )

    def _differing_weights(self) -> Iterator[str]:
        """Yield a finding if sums of parameters or buffers differ after the last step."""
        expected = _final_weights(self.one.trace)
        weights = _final_weights(self.many.trace)
        differing: list[str] = []
        for name in expected.keys() & weights.keys():
            if not self._is_close(expected[name], weights[name]):
                differing.append(name)
        if differing:
            yield f"after the last step {and_others(differing)} have other values than on one rank"

    def _is_close(self, expected: Weight, weight: Weight) -> bool:
        """Tell whether sums are equal within the rounding of their terms."""
        if weight.numel != expected.numel:
            # The recorded shards do not add up to the full tensor: there is nothing to compare.
            return True
        expected_norm = math.sqrt(expected.square)
        norm = math.sqrt(weight.square)
        if not math.isclose(norm, expected_norm, rel_tol=self.norm_tolerance, abs_tol=1e-6):
            return False
        # How far apart may the sums of n elements be? By Cauchy-Schwarz, errors with a norm of E
        # change the sum by up to E * sqrt(n).
        allowed = self.norm_tolerance * expected_norm * math.sqrt(expected.numel) + 1e-6
        return abs(weight.total - expected.total) <= allowed


def _norms_by_replica(snapshots: Sequence[Snapshot]) -> dict[tuple[int, ...], float]:
    """Return the norm of the full gradients of each replica of the model, by the replica's ranks.

    For example ``{(0, 1): 2.5}`` for FSDP on 2 ranks, ``{(0,): 2.5, (1,): 2.5}`` for DDP.

    Args:
        snapshots: One of each rank, after the same step.
    """
    #: Rank -> all ranks that hold one copy of the gradients together with it.
    holders_by_rank: dict[int, tuple[int, ...]] = {}
    #: Rank -> its share of the sum of the squares of all gradients.
    square_by_rank: dict[int, float] = {}
    for snapshot in snapshots:
        # An optimizer may step several times, each time with other parameters.
        parts = [(step.holders, step.square) for step in snapshot.steps]
        holders, square = together(parts)
        holders_by_rank[snapshot.rank] = holders
        square_by_rank[snapshot.rank] = square
    norms: dict[tuple[int, ...], float] = {}
    for ranks in shard_groups(holders_by_rank, len(snapshots)):
        squares = [square_by_rank.get(rank, 0.0) for rank in ranks]
        norms[ranks] = math.sqrt(sum(squares))
    return norms


def _mean_loss(snapshots: Iterable[Snapshot]) -> float | None:
    """Return the mean of the ranks' losses; None if no rank has one."""
    losses = [snapshot.loss for snapshot in snapshots if snapshot.loss is not None]
    if not losses:
        return None
    return sum(losses) / len(losses)


@dataclass
class _Shards:
    """The shards of one parameter or buffer.

    Attributes:
        sums: The sums over the shard of each rank.
        holders: By rank, the ranks whose shards together are the full tensor; empty if unknown.
    """

    sums: dict[int, Weight] = field(default_factory=dict)
    holders: dict[int, tuple[int, ...]] = field(default_factory=dict)


def _final_weights(run: RunTrace) -> dict[str, Weight]:
    """Return the sums over each full tensor of the trained model, by its unwrapped name.

    That is the name that it has before DDP, FSDP or DeepSpeed wraps the model. A tensor of which
    several replicas exist is read from the first of them.
    """
    if run.unwrapped is None:
        # The model was not recorded before something wrapped it, so names cannot be compared.
        return {}
    names = Names(run, run.unwrapped)
    weights: dict[str, Weight] = {}
    for name, shards in _final_shards(run, names).items():
        first_replica = shard_groups(shards.holders)[0]
        sums = [shards.sums[rank] for rank in first_replica if rank in shards.sums]
        weight = _sum(sums)
        if weight.numel < names.sizes.get(name, 0):
            # ZeRO shards only the float32 master, of which each rank has recorded its own part.
            weight = _sum(shards.sums.values())
        weights[name] = weight
    return weights


def _final_shards(run: RunTrace, names: Names) -> dict[str, _Shards]:
    """Return the shards of each tensor at the end of a run, by its name in the unwrapped model."""
    # The trained model may be recorded several times; the last ``export`` of each rank counts.
    last_snapshots: dict[int, Snapshot] = {}
    for snapshot in run.snapshots:
        if snapshot.action == "export":
            last_snapshots[snapshot.rank] = snapshot
    shards: dict[str, _Shards] = defaultdict(_Shards)
    for rank, snapshot in last_snapshots.items():
        layouts = {info.name: info.layout for info in snapshot.parameters}
        for live_name, sums in snapshot.sums.items():
            # A live name may have the prefix of a wrapper: ``module.layer.weight``.
            tensor = shards[names(live_name)]
            tensor.sums[rank] = Weight(*sums)
            tensor.holders[rank] = ()
            if live_name in layouts:
                tensor.holders[rank] = layouts[live_name].holders
    return shards


def _sum(parts: Iterable[Weight]) -> Weight:
    """Return the sums over the elements of all these parts."""
    numel = 0
    total = 0.0
    square = 0.0
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
    """Run a script on one rank and on several; compare losses, gradient norms and weights.

    The arguments must give both runs the same global batch, in the same order, and no dropout.
    The loss of a step is what the script calls ``backward`` on, as the mean over micro-batches and
    ranks.

    Args:
        script: As for ``launch``.
        one: The arguments of the run on one rank, such as ``["--batch", "8"]``.
        many: The arguments of the run on several ranks, such as ``["--batch", "4"]``.
        steps: The number of optimizer steps of each run.
        precision: As for ``launch``. It decides the tolerances.
        strategy: As for ``launch``, for the run on several ranks.
        world_size: The number of ranks of the run on several; the host's by default.
        host: As for ``launch``.
        **settings: Further arguments of ``launch``.

    Raises:
        Incompatible: With the differences.
        RunFailedError: If a run fails.
        UsageProblem: For a wrong argument.
    """
    _check_arguments(one, many, steps, settings)
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
    #: The runs so far, whose logs stay if anything is wrong.
    runs: list[ScriptRun] = []
    try:
        one_rank = launch(script, *one, world_size=1, **common)
        runs.append(one_rank)
        several_ranks = launch(script, *many, world_size=ranks, strategy=strategy, **common)
        runs.append(several_ranks)
        # Twice the tolerance of one run, because both runs round.
        compared = Parity(
            one=one_rank,
            many=several_ranks,
            steps=steps,
            loss_tolerance=2 * rounding.loss_tolerance,
            norm_tolerance=2 * rounding.norm_tolerance,
        )
        compared.check()
    except (Incompatible, RunFailedError):
        # The directories stay after this process, for the user to read the logs.
        for run in runs:
            leave_directory(run.directory)
        raise
    return compared


def _check_arguments(
    one: Sequence[str | Path], many: Sequence[str | Path], steps: int, settings: Mapping[str, Any]
) -> None:
    """Raise UsageProblem for a wrong argument of ``parity``."""
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
    # ``parity`` passes these to ``launch`` itself.
    for name in ("watch_steps", "stop_after", "allow_failure", "fails"):
        if name in settings:
            raise UsageProblem(f"parity takes no {name}: it says that of each run itself")

"""Check: a claim about (cell, trace) with a stable name; and what several checks share."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_distcompat.cell import OPTIONS, Cell
from pytest_distcompat.driver import Driver
from pytest_distcompat.scenario import MESH, OTHER_REFERENCE, REFERENCE_RUN, Scenario
from pytest_distcompat.settings.rules import concerns_checkpoints
from pytest_distcompat.trace import CollectiveInfo, OptimizerInfo, Snapshot, Trace, UnwrappedInfo

if TYPE_CHECKING:
    from pytest_distcompat.runner import Runner

Claim = Callable[[Cell, Trace], Iterable[str]]
#: (cell, driver) -> why the check does not apply to that cell; None if it does.
NotApplicable = Callable[[Cell, type[Driver]], str | None]
#: (cell, trace) -> what is worth telling though the claim holds; empty for nothing.
Remark = Callable[[Cell, Trace], str]
#: The runs that a check reads, or a function that returns them for a cell and a driver.
Runs = Scenario | Callable[[Cell, type[Driver]], Scenario]

#: How many findings a message shows: a model that is wrong throughout has hundreds of the same kind.
FINDINGS_SHOWN = 12
#: A finding of one rank, such as "step 3: rank 1: the loss ...": what stands before the rank, its number, and the rest.
_OF_RANK = re.compile(r"(?P<before>|[^:]*: )rank (?P<rank>\d+)(?P<after>: .*)", re.DOTALL)

#: Collectives that sum gradients.
REDUCTIONS = frozenset({"allreduce", "reduce", "reduce_scatter", "reduce_scatter_base", "reduce_scatter_tensor",
                        "reduce_scatter_tensor_coalesced", "allreduce_coalesced", "all_reduce"})  # fmt: skip

#: Options that change what a checkpoint holds, or how.
CHECKPOINT_OPTIONS = frozenset(
    {
        *(
            "model",
            "state_dict",
            "use_orig_params",
            "cpu_offload",
            "param_groups",
            "frozen",
            "lora",
            "save_only_model",
        ),
        *("float32_norms", "optimizer", "checkpoints", *MESH),
    }
)

#: What a load restores depends on, and an export.
RESUMED = CHECKPOINT_OPTIONS | {
    *(
        "precision",
        "world_size",
        "compile",
        "grad_accum",
        "grad_accum_dtype",
        "async_save",
        "ignored_modules",
    )
}
EXPORTED = CHECKPOINT_OPTIONS | {
    "precision",
    "world_size",
    "compile",
    "activation_checkpointing",
    "grad_accum_dtype",
}
#: How far the runs of scenario RESUME must have come: two steps after the save, and after the load.
UNTIL_RESUMED = (("train", "step", 4), ("resume", "step", 1))
#: What the parts of a checkpoint depend on, which another number of ranks or another strategy must find by name.
RESHARDED = frozenset({"model", "state_dict", "use_orig_params", "checkpoints", *MESH}) - {
    "dp_replicate",
    "pp_schedule",
}


def _applies_to_all(cell: Cell, driver: type[Driver]) -> str | None:
    return None


def _no_remark(cell: Cell, trace: Trace) -> str:
    return ""


@dataclass(frozen=True)
class Execution:
    """What a check's runs in a cell gave.

    Attributes:
        trace: What the runs recorded.
        seed: What the runs were drawn by; None if they were not drawn.
        may_pass: Whether they leave out what is known to fail: then an expectation without a failure is no news.
    """

    trace: Trace
    seed: int | None = None
    may_pass: bool = False


@dataclass(frozen=True)
class Check:
    """A claim with a stable name.

    Attributes:
        name: The check's id.
        scenario: The runs that the claim reads.
        until: For each run that the claim reads, the last action whose snapshots it needs: (run, action, nth). The check
            fails if the run broke off before that action; a run that broke off later does not concern it.
        claim: Yields the findings for a cell and its trace; nothing if the claim holds.
        order: Where the check stands in lists.
        not_applicable: Returns the reason why the check does not apply to a cell, or None. A check that does not apply
            has no test item; the report shows the reason.
        limit: Name of the limit that the user must set for anything to be asserted: ``--distcompat-<limit>``.
        raises: Runs that must end in an exception: there a crash or a hang is the verdict, whenever it came.
        costly: Whether it takes several runs that no other check reads.
        depends_on: The facets of a cell (``cell.FACETS``) that the outcome depends on, besides the strategy; None: all. The
            default profile runs the check in one cell of those that are alike in them.
        remark: What reports say beside a claim that holds.
    """

    name: str
    scenario: Runs
    until: tuple[tuple[str, str, int], ...]
    claim: Claim
    order: int = 0
    not_applicable: NotApplicable = _applies_to_all
    limit: str = ""
    raises: tuple[str, ...] = ()
    costly: bool = False
    depends_on: frozenset[str] | None = None
    remark: Remark = _no_remark

    def execute(self, runner: Runner, name: str, driver: type[Driver], cell: Cell) -> Execution:
        """Run what the claim reads in a cell. A check whose runs depend on what earlier ones show overrides this.

        Args:
            runner: What runs it.
            name: The driver as its suite names it, by which ranks find it.
            driver: The driver.
            cell: The cell.
        """
        return Execution(runner.trace(name, cell, self.runs(cell, driver)))

    def runs(self, cell: Cell, driver: type[Driver]) -> Scenario:
        """Return the runs that the claim reads in that cell."""
        if isinstance(self.scenario, Scenario):
            return self.scenario
        return self.scenario(cell, driver)

    @property
    def text(self) -> str:
        """Return the claim and the likely causes of a failure: the docstring of the claim."""
        return inspect.getdoc(self.claim) or ""

    def findings(self, cell: Cell, trace: Trace) -> list[str]:
        """Return the findings, each once; empty if the claim holds.

        Where two settings contradict each other it is to hold against the reference that follows the one or the other.
        """
        findings = _without_repetitions(self.claim(cell, trace))
        if not findings or OTHER_REFERENCE not in trace.runs:
            return findings
        other_findings = _without_repetitions(self._claim_against(OTHER_REFERENCE, cell, trace))
        if not other_findings:
            return []
        for finding in other_findings:
            findings.append(
                f"against the other of two settings that contradict each other: {finding}"
            )
        return findings

    def agrees_with(self, cell: Cell, trace: Trace) -> list[int]:
        """Return which of two settings that contradict each other, 0 or 1, have a reference that the claim holds against."""
        settings: list[int] = []
        for nth, reference in enumerate((REFERENCE_RUN.name, OTHER_REFERENCE)):
            if not any(self._claim_against(reference, cell, trace)):
                settings.append(nth)
        return settings

    def _claim_against(self, reference: str, cell: Cell, trace: Trace) -> Iterable[str]:
        """Return the findings of the claim with the run of that name as the reference."""
        runs = {**trace.runs, REFERENCE_RUN.name: trace.runs[reference]}
        return self.claim(cell, dataclasses.replace(trace, runs=runs))

    def __call__(self, cell: Cell, trace: Trace) -> Iterator[str]:
        """Call the claim and return its findings as they come."""
        return iter(self.claim(cell, trace))


def check(
    *,
    scenario: Runs,
    until: tuple[tuple[str, str, int], ...],
    order: int = 0,
    not_applicable: NotApplicable = _applies_to_all,
    limit: str = "",
    raises: tuple[str, ...] = (),
    costly: bool = False,
    depends_on: frozenset[str] | None = None,
    remark: Remark = _no_remark,
) -> Callable[[Claim], Check]:
    """Make a Check of a function: its name becomes the check's name, its docstring states the claim."""

    def check_of(claim: Claim) -> Check:
        return Check(
            claim.__name__.rstrip("_"),
            scenario,
            until,
            claim,
            order=order,
            not_applicable=not_applicable,
            limit=limit,
            raises=raises,
            costly=costly,
            depends_on=depends_on,
            remark=remark,
        )

    return check_of


def _without_repetitions(findings: Iterable[str]) -> list[str]:
    # A dict, because it keeps the order and has each only once.
    return list(dict.fromkeys(findings))


@dataclass(frozen=True)
class _TextOfRanks:
    """A finding without its rank: the text before that and the text after it, which is empty if it names none."""

    before: str
    after: str = ""


def message(findings: list[str]) -> str:
    """Return the first findings, one a line, and how many more there are. What several ranks have in common is one line."""
    ranks_by_text: dict[_TextOfRanks, list[str]] = {}
    for finding in findings:
        of_rank = _OF_RANK.fullmatch(finding)
        if of_rank is None:
            ranks_by_text.setdefault(_TextOfRanks(finding), [])
        else:
            text = _TextOfRanks(of_rank["before"], of_rank["after"])
            ranks_by_text.setdefault(text, []).append(of_rank["rank"])
    lines: list[str] = []
    for text, ranks in ranks_by_text.items():
        if ranks:
            lines.append(f"{text.before}{_listed(ranks)}{text.after}")
        else:
            lines.append(text.before)
    if len(lines) > FINDINGS_SHOWN:
        lines[FINDINGS_SHOWN:] = [f"... and {len(lines) - FINDINGS_SHOWN} more"]
    return "\n".join(lines)


def pairs(
    before: tuple[Snapshot, ...], after: tuple[Snapshot, ...]
) -> Iterator[tuple[Snapshot, Snapshot]]:
    """Yield the two snapshots of each rank that reported both."""
    before_by_rank = {snapshot.rank: snapshot for snapshot in before}
    for snapshot in after:
        if snapshot.rank in before_by_rank:
            yield before_by_rank[snapshot.rank], snapshot


def gradient_reductions(cell: Cell, snapshot: Snapshot) -> Iterator[CollectiveInfo]:
    """Yield the collectives that may sum gradients: of several floats, not between parts of a layer (activations) or stages."""
    for info in snapshot.collectives:
        sums_floats = info.op in REDUCTIONS and info.numel > 1 and "float" in info.dtype
        if sums_floats and not _moves_activations(cell, snapshot.rank, info):
            yield info


def _moves_activations(cell: Cell, rank: int, info: CollectiveInfo) -> bool:
    """Tell whether a collective is one of tensor parallelism or of a pipeline: all its ranks are peers there."""
    if not info.ranks:
        return False
    for peers in (cell.tp_peers(rank), cell.pp_peers(rank)):
        if len(peers) > 1 and set(info.ranks).issubset(peers):
            return True
    return False


def requested(cell: Cell, unwrapped: UnwrappedInfo | None, option: str) -> bool:
    """Tell whether the trainer was given the cell's value of the option: the cell has it, or the driver supports it."""
    if cell.option(option) != OPTIONS[option].default:
        return True
    return unwrapped is not None and option in unwrapped.obeyed


def named_ranks(ranks: Sequence[int], world_size: int) -> str:
    """Return the words for some ranks in a finding: "all ranks", "rank 1" or "ranks 0, 2"."""
    if len(ranks) == world_size:
        return "all ranks"
    return _listed(ranks)


def _listed(ranks: Sequence[int | str]) -> str:
    numbers = ", ".join(str(rank) for rank in ranks)
    if len(ranks) > 1:
        return f"ranks {numbers}"
    return f"rank {numbers}"


def and_others(names: Iterable[str]) -> str:
    """Return the words for some names in a finding: the first in their order, and how many there are besides."""
    first, *others = sorted(names)
    if not others:
        return repr(first)
    return f"{first!r} and {len(others)} others"


def first_three(names: Sequence[str]) -> str:
    """Return the first three names, for the end of a finding that says how many there are."""
    return ", ".join(repr(name) for name in names[:3])


def every_rank(snapshots: tuple[Snapshot, ...], world_size: int, action: str) -> Iterator[str]:
    """Yield a finding if a rank did not report after that action: without a report nothing is proved."""
    missing = set(range(world_size))
    for snapshot in snapshots:
        missing.difference_update(snapshot.ranks)
    if missing:
        numbers = ", ".join(str(rank) for rank in sorted(missing))
        yield f"rank {numbers}: no report after {action}"


def module_of(name: str) -> str:
    """Return the name of the module that has the parameter."""
    return name.rpartition(".")[0]


def with_rank(snapshot: Snapshot, texts: Iterable[str]) -> Iterator[str]:
    """Yield each text as a finding about the snapshot's rank."""
    for text in texts:
        yield f"rank {snapshot.rank}: {text}"


def finite_losses(snapshots: Iterable[Snapshot], step: str) -> Iterator[str]:
    """Yield a finding for each rank whose loss is missing or not finite: two infinite losses compare equal."""
    for snapshot in snapshots:
        if snapshot.loss is None or not math.isfinite(snapshot.loss):
            yield f"rank {snapshot.rank}: the loss of {step} is {snapshot.loss}; expected a finite number"


def stale(optimizer: OptimizerInfo, when: str = "") -> str:
    """Return the finding that the optimizer holds tensors which are no parameters of the live model."""
    tensors = f"{optimizer.foreign} of {optimizer.entries} tensors in the optimizer"
    return f"{tensors} are no parameters of the live model{when} (stale)"


def other_mode(expected: Snapshot, snapshot: Snapshot, step: str, where: str) -> Iterator[str]:
    """Yield a finding if modules train in a step of one snapshot and not in that of another: dropout and BatchNorm follow it."""
    stopped = set(snapshot.evaluating) - set(expected.evaluating)
    if stopped:
        yield f"rank {snapshot.rank}: {_in_mode('evaluation', stopped, step)}; in training mode {where}"
    training = set(expected.evaluating) - set(snapshot.evaluating)
    if training:
        yield f"rank {snapshot.rank}: {_in_mode('training', training, step)}; in evaluation mode {where}"


def _in_mode(mode: str, modules: set[str], step: str) -> str:
    """Return the words for modules that are in a mode; the name of the whole model is empty."""
    if "" in modules:
        return f"the whole model is in {mode} mode in {step}"
    return f"{len(modules)} modules are in {mode} mode in {step}, first {min(modules)!r}"


def trained_again(loaded: Iterable[Snapshot], trained: Iterable[Snapshot]) -> Iterator[str]:
    """Yield a finding for each rank that took as many steps during its load as before the save: it may have retrained."""
    # torch itself takes one step in a load, with zero gradients, to create the optimizer's state.
    before: Counter[int] = Counter()
    for snapshot in trained:
        before[snapshot.rank] += len(snapshot.steps)
    for snapshot in loaded:
        # Not ``> 0``, which is false for NaN.
        steps = sum(step.square != 0 for step in snapshot.steps)
        if steps and steps >= before[snapshot.rank]:
            finding = f"the optimizer took {steps} steps with gradients during the load"
            yield f"rank {snapshot.rank}: {finding}; expected the state to be read from the checkpoint, not trained again"


def _options_beside_checkpoints(cell: Cell) -> list[str]:
    """Return the cell's options, without ``set`` if all settings are read while a checkpoint is written or loaded."""
    names = [name for name, _ in cell.options]
    if cell.set and all(concerns_checkpoints(setting) for setting in cell.set):
        names.remove("set")
    return names


def only_where_it_differs(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why another cell tests the claim: files are found alike in all precisions and with most options."""
    others = []
    for name in _options_beside_checkpoints(cell):
        if name not in {"model", "state_dict"}:
            others.append(name)
    if cell.precision != "fp32" or others:
        return "files are found as they are in fp32 without that option, and it is tested there"
    return None


def saved_as_elsewhere(cell: Cell) -> str | None:
    """Return why another cell tests the claim; None if this one does."""
    # Runs at other world sizes are the most expensive ones.
    for name in _options_beside_checkpoints(cell):
        if name not in CHECKPOINT_OPTIONS:
            return f"{name} changes how the model is trained, not what is saved, and what is saved is tested without it"
    if cell.precision not in {"fp32", "bf16_upcast"}:
        return f"a checkpoint in {cell.precision} is combined like those in fp32 and bf16_upcast, where it is tested"
    return None

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
from pytest_distcompat.trace import CollectiveInfo, OptimizerInfo, Snapshot, Trace, UnwrappedInfo

if TYPE_CHECKING:
    from pytest_distcompat.runner import Runner

Claim = Callable[[Cell, Trace], Iterable[str]]
#: (cell, driver) -> why the check does not apply to that cell; None if it does.
NotApplicable = Callable[[Cell, type[Driver]], str | None]
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
        *("model", "state_dict", "use_orig_params", "cpu_offload", "param_groups", "frozen", "lora", "save_only_model"),
        *("float32_norms", "optimizer", "checkpoints", *MESH),
    }
)

#: What a load restores depends on, and an export.
RESUMED = CHECKPOINT_OPTIONS | {
    *("precision", "world_size", "compile", "grad_accum", "grad_accum_dtype", "async_save", "ignored_modules")
}
EXPORTED = CHECKPOINT_OPTIONS | {"precision", "world_size", "compile", "activation_checkpointing", "grad_accum_dtype"}
#: How far the runs of scenario RESUME must have come: two steps after the save, and after the load.
UNTIL_RESUMED = (("train", "step", 4), ("resume", "step", 1))
#: What the parts of a checkpoint depend on, which another number of ranks or another strategy must find by name.
RESHARDED = frozenset({"model", "state_dict", "use_orig_params", "checkpoints", *MESH}) - {
    "dp_replicate",
    "pp_schedule",
}


def _applies_to_all(cell: Cell, driver: type[Driver]) -> str | None:
    return None


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
        return self.scenario if isinstance(self.scenario, Scenario) else self.scenario(cell, driver)

    @property
    def text(self) -> str:
        """Return the claim and the likely causes of a failure: the docstring of the claim."""
        return inspect.getdoc(self.claim) or ""

    def findings(self, cell: Cell, trace: Trace) -> list[str]:
        """Return the findings, each once; empty if the claim holds.

        Where two settings contradict each other it is to hold against the reference that follows the one or the other.
        """
        found = list(dict.fromkeys(self.claim(cell, trace)))
        if not found or (other := trace.runs.get(OTHER_REFERENCE)) is None:
            return found
        runs = {**trace.runs, "reference": other}
        against = dict.fromkeys(self.claim(cell, dataclasses.replace(trace, runs=runs)))
        second = [f"against the other of two settings that contradict each other: {one}" for one in against]
        return [*found, *second] if second else []

    def agrees_with(self, cell: Cell, trace: Trace) -> list[int]:
        """Return which of two settings that contradict each other, 0 or 1, have a reference that the claim holds against."""
        references = (trace.runs[REFERENCE_RUN.name], trace.runs[OTHER_REFERENCE])
        runs = ({**trace.runs, REFERENCE_RUN.name: reference} for reference in references)
        return [nth for nth, one in enumerate(runs) if not any(self.claim(cell, dataclasses.replace(trace, runs=one)))]

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
) -> Callable[[Claim], Check]:
    """Make a Check of a function: its name becomes the check's name, its docstring states the claim."""
    others = (order, not_applicable, limit, raises, costly, depends_on)
    return lambda claim: Check(claim.__name__.rstrip("_"), scenario, until, claim, *others)


def message(findings: list[str]) -> str:
    """Return the first findings, one a line, and how many more there are. What several ranks have in common is one line."""
    ranks: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        of_rank = _OF_RANK.fullmatch(finding)
        key = (of_rank["before"], of_rank["after"]) if of_rank else (finding, "")
        ranks.setdefault(key, []).extend([of_rank["rank"]] if of_rank else ())
    lines = [f"{before}{_listed(of)}{after}" if of else before for (before, after), of in ranks.items()]
    if len(lines) > FINDINGS_SHOWN:
        lines[FINDINGS_SHOWN:] = [f"... and {len(lines) - FINDINGS_SHOWN} more"]
    return "\n".join(lines)


def pairs(before: tuple[Snapshot, ...], after: tuple[Snapshot, ...]) -> Iterator[tuple[Snapshot, Snapshot]]:
    """Yield the two snapshots of each rank that reported both."""
    was = {snapshot.rank: snapshot for snapshot in before}
    return ((was[snapshot.rank], snapshot) for snapshot in after if snapshot.rank in was)


def gradient_reductions(cell: Cell, snapshot: Snapshot) -> Iterator[CollectiveInfo]:
    """Yield the collectives that may sum gradients: of several floats, not between parts of a layer (activations) or stages."""
    peers = [{*ranks} for ranks in (cell.tp_peers(snapshot.rank), cell.pp_peers(snapshot.rank)) if len(ranks) > 1]
    for info in snapshot.collectives:
        activations = info.ranks and any(ranks.issuperset(info.ranks) for ranks in peers)
        if info.op in REDUCTIONS and info.numel > 1 and "float" in info.dtype and not activations:
            yield info


def requested(cell: Cell, unwrapped: UnwrappedInfo | None, option: str) -> bool:
    """Tell whether the trainer was given the cell's value of the option: the cell has it, or the driver supports it."""
    return cell.option(option) != OPTIONS[option].default or (unwrapped is not None and option in unwrapped.obeyed)


def named_ranks(ranks: Sequence[int], world_size: int) -> str:
    """Return the words for some ranks in a finding: "all ranks", "rank 1" or "ranks 0, 2"."""
    return "all ranks" if len(ranks) == world_size else _listed(ranks)


def _listed(ranks: Sequence[int | str]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def and_others(names: Iterable[str]) -> str:
    """Return the words for some names in a finding: the first in their order, and how many there are besides."""
    first, *others = sorted(names)
    return f"{first!r}{f' and {len(others)} others' if others else ''}"


def first_three(names: Sequence[str]) -> str:
    """Return the first three names, for the end of a finding that says how many there are."""
    return ", ".join(map(repr, names[:3]))


def every_rank(snapshots: tuple[Snapshot, ...], world_size: int, action: str) -> Iterator[str]:
    """Yield a finding if a rank did not report after that action: without a report nothing is proved."""
    missing = sorted(set(range(world_size)).difference(*(snapshot.ranks for snapshot in snapshots)))
    if missing:
        yield f"rank {', '.join(map(str, missing))}: no report after {action}"


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
    found = f"{optimizer.foreign} of {optimizer.entries} tensors in the optimizer"
    return f"{found} are no parameters of the live model{when} (stale)"


def other_mode(expected: Snapshot, found: Snapshot, step: str, where: str) -> Iterator[str]:
    """Yield a finding if modules train in a step of one snapshot and not in that of another: dropout and BatchNorm follow it."""
    for mode, than, names in (
        ("evaluation", "training", set(found.evaluating) - set(expected.evaluating)),
        ("training", "evaluation", set(expected.evaluating) - set(found.evaluating)),
    ):
        if names:
            modules = "the whole model is" if "" in names else f"{len(names)} modules are"
            first = "" if "" in names else f", first {min(names)!r}"
            yield f"rank {found.rank}: {modules} in {mode} mode in {step}{first}; in {than} mode {where}"


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


def only_where_it_differs(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why another cell tests the claim: files are found alike in all precisions and with most options."""
    others = [name for name, _ in cell.options if name not in {"model", "state_dict"}]
    if cell.precision != "fp32" or others:
        return "files are found as they are in fp32 without that option, and it is tested there"
    return None


def saved_as_elsewhere(cell: Cell) -> str | None:
    """Return why another cell tests the claim; None if this one does."""
    # Runs at other world sizes are the most expensive ones.
    if other := next((name for name, _ in cell.options if name not in CHECKPOINT_OPTIONS), None):
        return f"{other} changes how the model is trained, not what is saved, and what is saved is tested without it"
    if cell.precision not in {"fp32", "bf16_upcast"}:
        return f"a checkpoint in {cell.precision} is combined like those in fp32 and bf16_upcast, where it is tested"
    return None

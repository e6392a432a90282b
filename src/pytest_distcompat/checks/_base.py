"""``Check``, a claim about the recorded runs of a cell, and functions that several checks share."""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_distcompat.calls import Call, kind_of, refusal_reason
from pytest_distcompat.cell import OPTIONS, Cell
from pytest_distcompat.driver import Driver
from pytest_distcompat.law import law_of
from pytest_distcompat.scenario import EVALUATED_RESUME, MESH, RESUME, Scenario
from pytest_distcompat.trace import CollectiveInfo, OptimizerInfo, Snapshot, Trace, UnwrappedInfo
from pytest_distcompat.wording import listed_ranks

if TYPE_CHECKING:
    from pytest_distcompat.runner import Runner

Claim = Callable[[Cell, Trace], Iterable[str]]
#: Called with a cell and a driver: why the check does not apply to that cell; None if it does.
NotApplicable = Callable[[Cell, type[Driver]], str | None]
#: (cell, trace) -> what is worth telling though the claim holds; empty for nothing.
Remark = Callable[[Cell, Trace], str]
#: The runs that a check reads, or a function that returns them for a cell and a driver.
Runs = Scenario | Callable[[Cell, type[Driver]], Scenario]

#: The snapshots of several ranks after one action, one for each rank that reported.
Snapshots = tuple[Snapshot, ...]

#: How many findings a message shows: a model that is wrong throughout has hundreds of the same
#: kind.
FINDINGS_SHOWN = 12
#: A finding of one rank, such as "step 3: rank 1: the loss ...": what stands before the rank, its
#: number, and the rest.
_OF_RANK = re.compile(r"(?P<before>|[^:]*: )rank (?P<rank>\d+)(?P<after>: .*)", re.DOTALL)

#: Collectives that sum gradients.
REDUCTIONS = frozenset(
    {
        "all_reduce",
        "allreduce",
        "allreduce_coalesced",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_base",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
    }
)

#: Options that change what a checkpoint holds, or how.
CHECKPOINT_OPTIONS = frozenset(
    {
        *MESH,
        "checkpoints",
        "cpu_offload",
        "float32_norms",
        "frozen",
        "lora",
        "model",
        "optimizer",
        "param_groups",
        "save_only_model",
        "state_dict",
        "use_orig_params",
    }
)

#: The facets of a cell that decide what a resumed trainer restores.
RESUMED = CHECKPOINT_OPTIONS | {
    "precision",
    "world_size",
    "compile",
    "grad_accum",
    "grad_accum_dtype",
    "async_save",
    "ignored_modules",
}
#: The options of cells in which an evaluation between two steps is tried: those that decide how
#: parameters are held, and what a module computes by its mode.
EVALUATED_OPTIONS = frozenset(
    {
        "model",
        "set",
        "activation_checkpointing",
        "cpu_offload",
        "dp_replicate",
        "grad_accum",
        "reshard_after_forward",
        "tp",
    }
)

#: The facets of a cell that decide what an export holds.
EXPORTED = CHECKPOINT_OPTIONS | {
    "precision",
    "world_size",
    "compile",
    "activation_checkpointing",
    "grad_accum_dtype",
}
#: The actions of scenario RESUME that a check of resumed training needs: two steps after the save,
#: and two after the load.
UNTIL_RESUMED = (("train", "step", 4), ("resume", "step", 1))
#: The facets of a cell that decide by which names another number of ranks, or another strategy,
#: finds the parts of a checkpoint.
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
    """What a check's runs in a cell recorded, and how they were chosen.

    Attributes:
        trace: What the runs recorded.
        seed: The seed of runs that were drawn at random; None for others.
        may_pass: Whether the runs leave out what is known to fail. Then it is no news if an
            expected failure does not appear.
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
        until: For each run that the claim reads, the last action whose snapshots it needs: (name of
            the run, action, which one of that action). The check fails if the run ended in an error
            before that action, and does not mind an error after it.
        claim: Yields the findings for a cell and its trace; nothing if the claim holds.
        order: Where the check stands in lists.
        not_applicable: Returns the reason why the check does not apply to a cell, or None. A check
            that does not apply has no test item; the report shows the reason.
        limit: Name of the limit that the user must set for anything to be asserted:
            ``--distcompat-<limit>``.
        raises: The names of runs that must end in an exception. If one of them crashes or hangs
            instead, that is the verdict, whatever ``until`` says.
        costly: Whether it takes several runs that no other check reads.
        depends_on: The facets of a cell (``cell.FACETS``) that the outcome depends on, besides the
            strategy; None for all. Of several cells that do not differ in them, the default profile
            runs the check in only one.
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
        """Run in a cell what the claim reads.

        A check that decides by its first runs which ones come next overrides this.

        Args:
            runner: Runs the scenarios.
            name: The name of the driver in its suite, by which ranks find it.
            driver: The driver.
            cell: The cell.
        """
        return Execution(runner.trace(name, cell, self.runs(cell, driver)))

    def runs(self, cell: Cell, driver: type[Driver]) -> Scenario:
        """Return the runs that the claim reads in that cell, by the law of the cell."""
        scenario = self.scenario
        if not isinstance(scenario, Scenario):
            scenario = scenario(cell, driver)
        return law_of(cell).runs(cell, scenario)

    @property
    def text(self) -> str:
        """Return the claim and the likely causes of a failure: the docstring of the claim."""
        return inspect.getdoc(self.claim) or ""

    def findings(self, cell: Cell, trace: Trace) -> list[str]:
        """Return the findings, each once; empty if the claim holds."""
        return _without_repetitions(self.claim(cell, trace))

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
    """Make a ``Check`` of a function.

    The check has the function's name, and its docstring as the claim.
    """

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
    """The texts of a finding before and after its rank; a finding without a rank is all before."""

    before: str
    after: str = ""


def message(findings: list[str]) -> str:
    """Return the first findings, one a line, and how many more there are.

    A finding that several ranks share is one line: "ranks 0, 2: ...".
    """
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
            names = listed_ranks(ranks)
            lines.append(f"{text.before}{names}{text.after}")
        else:
            lines.append(text.before)
    hidden = len(lines) - FINDINGS_SHOWN
    if hidden > 0:
        lines[FINDINGS_SHOWN:] = [f"... and {hidden} more"]
    return "\n".join(lines)


def pairs(before: Snapshots, after: Snapshots) -> Iterator[tuple[Snapshot, Snapshot]]:
    """Yield the two snapshots of each rank that reported both."""
    before_by_rank = {snapshot.rank: snapshot for snapshot in before}
    for snapshot in after:
        if snapshot.rank in before_by_rank:
            yield before_by_rank[snapshot.rank], snapshot


def gradient_reductions(cell: Cell, snapshot: Snapshot) -> Iterator[CollectiveInfo]:
    """Yield the collectives that may sum gradients.

    They reduce several floats, and are not those of activations between the ranks of tensor
    parallelism or of a pipeline.
    """
    for info in snapshot.collectives:
        if info.op not in REDUCTIONS or "float" not in info.dtype:
            continue
        if info.numel > 1 and not _moves_activations(cell, snapshot.rank, info):
            yield info


def _moves_activations(cell: Cell, rank: int, info: CollectiveInfo) -> bool:
    """Tell whether a collective runs only among ranks of one tensor-parallel group or pipeline."""
    if not info.ranks:
        return False
    ranks = set(info.ranks)
    for peers in (cell.tp_peers(rank), cell.pp_peers(rank)):
        if len(peers) > 1 and ranks.issubset(peers):
            return True
    return False


def requested(cell: Cell, unwrapped: UnwrappedInfo | None, option: str) -> bool:
    """Tell whether the trainer was given the cell's value of an option.

    It was if that is not the default, or if the driver passes on the option at all.
    """
    if cell.option(option) != OPTIONS[option].default:
        return True
    return unwrapped is not None and option in unwrapped.obeyed


def first_three(names: Sequence[str]) -> str:
    """Return the first three names, for the end of a finding that says how many there are."""
    return ", ".join(repr(name) for name in names[:3])


def every_rank(snapshots: Snapshots, world_size: int, action: str) -> Iterator[str]:
    """Yield a finding if ranks did not report after that action: nothing is proved for them."""
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
    """Yield a finding for each rank whose loss is missing or not finite.

    A comparison would not notice: two infinite losses are equal.
    """
    for snapshot in snapshots:
        if snapshot.loss is None or not math.isfinite(snapshot.loss):
            yield (
                f"rank {snapshot.rank}: the loss of {step} is {snapshot.loss}; "
                "expected a finite number"
            )


def stale(optimizer: OptimizerInfo, when: str = "") -> str:
    """Return the finding that the optimizer holds tensors that are no parameters of the model."""
    tensors = f"{optimizer.foreign} of {optimizer.entries} tensors in the optimizer"
    return f"{tensors} are no parameters of the live model{when} (stale)"


def other_mode(expected: Snapshot, snapshot: Snapshot, step: str, where: str) -> Iterator[str]:
    """Yield a finding if modules are not in the mode, training or evaluation, that is expected.

    Dropout and BatchNorm compute something else in each.

    Args:
        expected: The snapshot of the step that is compared with.
        snapshot: The snapshot of the step.
        step: The words for the step.
        where: The words for where it is otherwise: "in the reference".
    """
    in_evaluation = set(snapshot.evaluating) - set(expected.evaluating)
    if in_evaluation:
        modules = _in_mode("evaluation", in_evaluation, step)
        yield f"rank {snapshot.rank}: {modules}; in training mode {where}"
    in_training = set(expected.evaluating) - set(snapshot.evaluating)
    if in_training:
        modules = _in_mode("training", in_training, step)
        yield f"rank {snapshot.rank}: {modules}; in evaluation mode {where}"


def _in_mode(mode: str, modules: set[str], step: str) -> str:
    """Return the words for modules that are in a mode; the whole model has an empty name."""
    if "" in modules:
        return f"the whole model is in {mode} mode in {step}"
    first = min(modules)
    return f"{len(modules)} modules are in {mode} mode in {step}, first {first!r}"


def trained_again(loaded: Iterable[Snapshot], trained: Iterable[Snapshot]) -> Iterator[str]:
    """Yield a finding for each rank that seems to have trained again instead of loading.

    Such a rank took as many optimizer steps during its load as before the save.
    """
    # torch itself takes one step in a load, with zero gradients, to create the optimizer's state.
    before: Counter[int] = Counter()
    for snapshot in trained:
        before[snapshot.rank] += len(snapshot.steps)
    for snapshot in loaded:
        # Not ``> 0``, which is false for NaN.
        steps = sum(step.square != 0 for step in snapshot.steps)
        if steps and steps >= before[snapshot.rank]:
            finding = f"the optimizer took {steps} steps with gradients during the load"
            expected = "expected the state to be read from the checkpoint, not trained again"
            yield f"rank {snapshot.rank}: {finding}; {expected}"


def not_evaluated(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why no evaluation between two steps is tried in a cell; None if one is."""
    calls = driver.live_calls
    if calls is None or not kind_of(calls, "evaluate"):
        return "the driver declares no call evaluate(), by which it evaluates between two steps"
    refusal = refusal_reason(Call("evaluate"), calls, cell.strategy)
    if refusal:
        return refusal
    if cell.precision not in {"fp32", "fp16_mixed"}:
        return f"in {cell.precision} an evaluation does what it does in fp32, where it is tried"
    for name, _ in cell.options:
        if name not in EVALUATED_OPTIONS:
            return f"an evaluation between steps is not tried with option {name!r}"
    return None


def resume_runs(cell: Cell, driver: type[Driver]) -> Scenario:
    """Return a training and a run that resumes it, and evaluates where that is tried."""
    if not_evaluated(cell, driver):
        return RESUME
    return EVALUATED_RESUME


def options_beside_checkpoints(cell: Cell) -> list[str]:
    """Return the cell's options but those that matter only when a checkpoint is saved or loaded."""
    read_at_checkpoints = law_of(cell).read_at_checkpoints(cell)
    return [name for name, _ in cell.options if name not in read_at_checkpoints]


def only_where_it_differs(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why the claim is tested in another cell; None if it is tested in this one.

    It is a claim about which checkpoint files are found. Precisions and most options do not matter
    for that.
    """
    others = []
    for name in options_beside_checkpoints(cell):
        if name not in {"model", "state_dict"}:
            others.append(name)
    if cell.precision != "fp32" or others:
        return "files are found as they are in fp32 without that option, and it is tested there"
    return None


def saved_as_elsewhere(cell: Cell) -> str | None:
    """Return why a claim about saved tensors is tested in another cell; None if in this one."""
    # Each such cell would need runs at other world sizes, which are the most expensive ones.
    for name in options_beside_checkpoints(cell):
        if name not in CHECKPOINT_OPTIONS:
            changes = f"{name} changes how the model is trained, not what is saved"
            return f"{changes}, and what is saved is tested without it"
    if cell.precision not in {"fp32", "bf16_upcast"}:
        return (
            f"a checkpoint in {cell.precision} is combined like those in fp32 and bf16_upcast, "
            "where it is tested"
        )
    return None

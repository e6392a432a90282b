"""``Check``, a claim about the recorded runs of a cell, and functions that several checks share.

Most modules of this package define checks, by the decorator ``check`` on a function:

    @check(scenario=TRAIN, until=(("train", "step", 2),))
    def dtypes(cell: Cell, trace: Trace) -> Iterator[str]:
        ...
        yield "rank 0: AdamW updates bfloat16 masters; expected float32"

How a check is used, in this order:

1. ``not_applicable`` says whether a cell has the check at all. A cell is one point of the test
   matrix, such as ``fsdp2-bf16_upcast-w2`` (strategy, precision, 2 ranks).
2. ``execute`` runs the *scenario*: one or more runs, each one process group from start to end. In a
   run each rank performs actions, such as ``build``, ``step`` and ``save``, and records a
   *snapshot* after each. Checks of a cell share their runs. ``engine.run_check`` calls it.
3. ``findings`` calls the function with the cell and the *trace*, the snapshots of all runs. The
   function yields *findings*, a sentence for each thing that is wrong. The claim holds if there are
   none. ``judge.judge`` calls it, through the law of the cell.
4. ``message`` makes the text of the failure of the findings.
"""

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
from pytest_distcompat.trace import OptimizerInfo, Snapshot, Trace, UnwrappedInfo
from pytest_distcompat.wording import listed_ranks

if TYPE_CHECKING:
    from pytest_distcompat.runner import Runner

#: The function of a check: (cell, trace) -> findings.
Claim = Callable[[Cell, Trace], Iterable[str]]
#: Called with a cell and a driver: why the check does not apply to that cell; None if it does.
NotApplicable = Callable[[Cell, type[Driver]], str | None]
#: (cell, trace) -> what reports say beside a claim that holds; empty for nothing.
Remark = Callable[[Cell, Trace], str]
#: The runs that a check reads, or a function that returns them for a cell and a driver.
Runs = Scenario | Callable[[Cell, type[Driver]], Scenario]

#: The snapshots of several ranks after one action, one for each rank that reported.
Snapshots = tuple[Snapshot, ...]

#: The most findings that a message shows. A model that is wrong throughout has hundreds.
FINDINGS_SHOWN = 12
#: A finding about one rank, such as "step 3: rank 1: the loss ...": the text before the rank, its
#: number, and the text after it.
_OF_RANK = re.compile(r"(?P<before>|[^:]*: )rank (?P<rank>\d+)(?P<after>: .*)", re.DOTALL)

# Facets of cells (strategy, precision, world size, options) that decide about the outcome of
# checks, for ``Check.depends_on``. ``MESH`` has the options that arrange ranks in a grid: ``tp``,
# ``pp``, ``dp_replicate`` and so on.

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

#: The facets that decide what a resumed trainer restores.
RESUMED = CHECKPOINT_OPTIONS | {
    "precision",
    "world_size",
    "compile",
    "grad_accum",
    "grad_accum_dtype",
    "async_save",
    "ignored_modules",
}
#: The options that a cell may have in which an evaluation between two steps is tried. They decide
#: how parameters are held, and what a module computes in training and evaluation mode. ``set`` has
#: the single settings of libraries, ``AdamW.eps=0.5``.
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

#: The facets that decide what an export holds.
EXPORTED = CHECKPOINT_OPTIONS | {
    "precision",
    "world_size",
    "compile",
    "activation_checkpointing",
    "grad_accum_dtype",
}
#: The facets that decide by which names another number of ranks, or another strategy, finds the
#: parts of a checkpoint. How often a part is replicated, and in which order pipeline stages
#: compute, changes no name.
RESHARDED = frozenset({"model", "state_dict", "use_orig_params", "checkpoints", *MESH}) - {
    "dp_replicate",
    "pp_schedule",
}
#: For ``Check.until``: checks of resumed training need two steps after the save, and two after the
#: load.
UNTIL_RESUMED = (("train", "step", 4), ("resume", "step", 1))


def _applies_to_all(cell: Cell, driver: type[Driver]) -> str | None:
    return None


def _no_remark(cell: Cell, trace: Trace) -> str:
    return ""


@dataclass(frozen=True)
class Execution:
    """The recorded runs of a check in a cell, and how they were chosen.

    Attributes:
        trace: What the runs recorded.
        seed: The seed if an extension drew the runs at random; else None.
        may_pass: Whether the runs leave out what is known to fail, as those of the extension
            ``walk`` do. Then an expected failure need not appear.
    """

    trace: Trace
    seed: int | None = None
    may_pass: bool = False


@dataclass(frozen=True)
class Check:
    """A claim with a stable name.

    Attributes:
        name: The check's id: ``resume``.
        scenario: The runs that the claim reads.
        until: For each run that the claim reads, the last action whose snapshots it needs: (name of
            the run, action, which one of that action). ``("train", "step", 2)`` is the third step.
            The check fails if the run ended in an error before that action. An error after it does
            not matter.
        claim: Yields the findings for a cell and its trace; nothing if the claim holds.
        order: Where the check stands in lists: by ascending order, then by name.
        not_applicable: Returns the reason why the check does not apply to a cell, or None. A check
            that does not apply has no test item; the report shows the reason.
        limit: The name of a limit without which the check does not apply, such as ``throughput``,
            which the user sets by ``--distcompat-throughput``. Empty if there is none.
        raises: The names of runs that may end in an exception, which the claim itself judges, such
            as a run that loads a damaged checkpoint. If one of them crashes or hangs instead, that
            is the verdict, whatever ``until`` says.
        costly: Whether the check needs several runs that no other check reads. The profile
            ``smoke`` runs such a check in one cell only.
        depends_on: The facets of a cell (``cell.FACETS``) that the outcome depends on, besides the
            strategy; None for all. Of several cells that do not differ in them, the default profile
            runs the check in only one.
        remark: Returns what reports say beside a claim that holds; empty for nothing.
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
        """Run in a cell what the claim reads, and return the recorded runs.

        A subclass of an extension overrides it, to choose further runs by the first ones.

        Args:
            runner: Runs scenarios, each distinct run once.
            name: The name by which ranks find the driver: ``my_trainer.testing:Driver``.
            driver: The driver, the class by which the trainer is tested.
            cell: The cell.
        """
        return Execution(runner.trace(name, cell, self.runs(cell, driver)))

    def runs(self, cell: Cell, driver: type[Driver]) -> Scenario:
        """Return the runs that the claim reads in that cell.

        A *law* says how checks judge a cell (``law``). Most cells have the plain one, which takes
        the runs as they are. An extension may add a law for its own cells, which may change them.
        """
        scenario = self.scenario
        if not isinstance(scenario, Scenario):
            scenario = scenario(cell, driver)
        return law_of(cell).runs(cell, scenario)

    @property
    def text(self) -> str:
        """Return the docstring of the claim. Failures show it: the claim, and likely causes."""
        return inspect.getdoc(self.claim) or ""

    def findings(self, cell: Cell, trace: Trace) -> list[str]:
        """Return the findings, each once; empty if the claim holds."""
        return _without_repetitions(self.claim(cell, trace))

    def __call__(self, cell: Cell, trace: Trace) -> Iterator[str]:
        """Call the claim, and return an iterator of its findings."""
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
    """Make a ``Check`` of a function. The arguments are the attributes of ``Check``.

    The check has the function's name, without an underscore at its end. Its docstring is the text
    of the check.
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
    """Return the findings in their order, each once."""
    return list(dict.fromkeys(findings))


@dataclass(frozen=True)
class _TextOfRanks:
    """The text of a finding before and after its rank; without a rank all is ``before``."""

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
    """Yield (before, after) of each rank that has a snapshot in both."""
    before_by_rank = {snapshot.rank: snapshot for snapshot in before}
    for snapshot in after:
        if snapshot.rank in before_by_rank:
            yield before_by_rank[snapshot.rank], snapshot


def requested(cell: Cell, unwrapped: UnwrappedInfo | None, option: str) -> bool:
    """Tell whether a check may expect the cell's value of an option: the trainer was given it.

    A value that is not the default is always given. The default is given only if the driver
    supports the option (``obeyed``). Else the trainer may do what it likes, as a script does that
    sets the option by itself.
    """
    if cell.option(option) != OPTIONS[option].default:
        return True
    return unwrapped is not None and option in unwrapped.obeyed


def first_three(names: Sequence[str]) -> str:
    """Return the first three names as text: ``'a', 'b', 'c'``."""
    return ", ".join(repr(name) for name in names[:3])


def every_rank(snapshots: Snapshots, world_size: int, action: str) -> Iterator[str]:
    """Yield a finding if ranks have no snapshot after an action, as nothing is shown for them.

    Args:
        snapshots: The snapshots after the action.
        world_size: The number of ranks that should have one.
        action: The words for the action: ``three steps``.
    """
    missing = set(range(world_size))
    for snapshot in snapshots:
        missing.difference_update(snapshot.ranks)
    if missing:
        numbers = ", ".join(str(rank) for rank in sorted(missing))
        yield f"rank {numbers}: no report after {action}"


def module_of(name: str) -> str:
    """Return the name of the module that has the parameter: ``lm_head`` of ``lm_head.weight``."""
    return name.rpartition(".")[0]


def with_rank(snapshot: Snapshot, texts: Iterable[str]) -> Iterator[str]:
    """Yield each text as a finding about the snapshot's rank: ``rank 0: TEXT``."""
    for text in texts:
        yield f"rank {snapshot.rank}: {text}"


def finite_losses(snapshots: Iterable[Snapshot], step: str) -> Iterator[str]:
    """Yield a finding for each rank whose loss is missing or not finite.

    A comparison of losses would not notice: two infinite losses are equal. ``step`` is the words
    for the step: ``step 3``.
    """
    for snapshot in snapshots:
        if snapshot.loss is None or not math.isfinite(snapshot.loss):
            yield (
                f"rank {snapshot.rank}: the loss of {step} is {snapshot.loss}; "
                "expected a finite number"
            )


def stale(optimizer: OptimizerInfo, when: str = "") -> str:
    """Return the finding about an optimizer with tensors that are no parameters of the model.

    ``when`` is empty, or words such as `` after the load``, which begin with a space.
    """
    tensors = f"{optimizer.foreign} of {optimizer.entries} tensors in the optimizer"
    return f"{tensors} are no parameters of the live model{when} (stale)"


def other_mode(expected: Snapshot, snapshot: Snapshot, step: str, where: str) -> Iterator[str]:
    """Yield findings for modules that are in another mode in a step than in the expected one.

    The mode is training or evaluation. Dropout and BatchNorm compute something else in each.

    Args:
        expected: The snapshot of a rank after the expected step.
        snapshot: The snapshot after the step.
        step: The words for the step: ``the step after the save``.
        where: The words for the expected step: ``before it``.
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
    """Return the words for modules that are in a mode; the name of the whole model is empty."""
    if "" in modules:
        return f"the whole model is in {mode} mode in {step}"
    first = min(modules)
    return f"{len(modules)} modules are in {mode} mode in {step}, first {first!r}"


def trained_again(loaded: Iterable[Snapshot], trained: Iterable[Snapshot]) -> Iterator[str]:
    """Yield a finding for each rank that seems to have trained again instead of loading.

    Such a rank took as many optimizer steps during the load as before the save.

    Args:
        loaded: The snapshots after the load, whose ``steps`` are optimizer steps during the load.
        trained: The snapshots after each step before the save.
    """
    # torch itself takes one step in a load, with zero gradients, to create the optimizer's state.
    before: Counter[int] = Counter()
    for snapshot in trained:
        before[snapshot.rank] += len(snapshot.steps)
    for snapshot in loaded:
        # ``square`` is the sum of squares of the gradients. Not ``> 0``, which is false for NaN.
        steps = sum(step.square != 0 for step in snapshot.steps)
        if steps and steps >= before[snapshot.rank]:
            finding = f"the optimizer took {steps} steps with gradients during the load"
            expected = "expected the state to be read from the checkpoint, not trained again"
            yield f"rank {snapshot.rank}: {finding}; {expected}"


def not_evaluated(cell: Cell, driver: type[Driver]) -> str | None:
    """Return why no evaluation between two steps is tried in a cell; None if one is tried."""
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
    """Return the runs ``train`` and ``resume``; the latter also evaluates where that is tried.

    The check ``midway`` reads the evaluation. All checks of resumed training take the same runs, so
    that they share them.
    """
    if not_evaluated(cell, driver):
        return RESUME
    return EVALUATED_RESUME

"""What a check is."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from pytest_distcompat.cell import OPTIONS, Cell
from pytest_distcompat.driver import Driver
from pytest_distcompat.failures import Incompatible
from pytest_distcompat.scenario import Scenario
from pytest_distcompat.trace import Snapshot, Trace, UnwrappedInfo

Claim = Callable[[Cell, Trace], Iterable[str]]
#: (cell, driver) -> why the claim says nothing there; empty if it does.
NotApplicable = Callable[[Cell, type[Driver]], str | None]
#: The runs that a claim is about; where they depend on the cell or on what the driver can do, a function of both.
Runs = Scenario | Callable[[Cell, type[Driver]], Scenario]

#: How many findings a message shows; a model that is all wrong has hundreds alike.
SHOWN = 12

#: Collectives that add gradients up.
REDUCTIONS = frozenset({"allreduce", "reduce", "reduce_scatter", "reduce_scatter_base", "reduce_scatter_tensor",
                        "reduce_scatter_tensor_coalesced", "allreduce_coalesced", "all_reduce"})  # fmt: skip

#: Options that change what a checkpoint holds, or how.
SAVING = frozenset(
    {
        "model",
        "state_dict",
        "use_orig_params",
        "cpu_offload",
        "param_groups",
        "frozen",
        "lora",
        "save_only_model",
        "float32_norms",
        "dp_replicate",
    }
)


def _everywhere(cell: Cell, driver: type[Driver]) -> str | None:
    return None


@dataclass(frozen=True)
class Check:
    """A claim with a stable name.

    Attributes:
        until: For each run that the claim reads, the last action whose snapshots it needs: (run, action, nth). A run that
            broke off earlier leaves the check without its evidence, which is a failure; one that broke off later does
            not concern it.
        not_applicable: Returns the reason why the claim says nothing in a cell, or None. Then there is no item, and the
            report has the reason.
    """

    name: str
    scenario: Runs
    until: tuple[tuple[str, str, int], ...]
    claim: Claim
    order: int = 0
    not_applicable: NotApplicable = _everywhere
    #: The limit that the user must give for there to be anything to assert: ``--distcompat-<limit>``.
    limit: str = ""
    #: The runs that are to end in an exception: a crash or a hang there is the verdict, whenever it came.
    raises: tuple[str, ...] = ()
    #: Whether it takes several runs that no other check reads.
    costly: bool = False

    def runs(self, cell: Cell, driver: type[Driver]) -> Scenario:
        """The runs that the claim is about, in that cell."""
        return self.scenario if isinstance(self.scenario, Scenario) else self.scenario(cell, driver)

    @property
    def text(self) -> str:
        """The claim and what to do if it fails, in words."""
        return inspect.getdoc(self.claim) or ""

    def findings(self, cell: Cell, trace: Trace) -> list[str]:
        """What is wrong; empty if the claim holds."""
        return list(dict.fromkeys(self.claim(cell, trace)))

    def verify(self, cell: Cell, trace: Trace) -> None:
        """Raise Incompatible with all findings if the claim does not hold. For use without the suite."""
        found = self.findings(cell, trace)
        if found:
            raise Incompatible(message(found))

    def __call__(self, cell: Cell, trace: Trace) -> Iterator[str]:
        """The bare function."""
        return iter(self.claim(cell, trace))


def check(
    *,
    scenario: Runs,
    until: tuple[tuple[str, str, int], ...],
    order: int = 0,
    not_applicable: NotApplicable = _everywhere,
    limit: str = "",
    raises: tuple[str, ...] = (),
    costly: bool = False,
) -> Callable[[Claim], Check]:
    """Make a Check of a function whose name is the check's and whose docstring is its claim."""

    def make(claim: Claim) -> Check:
        return Check(claim.__name__.rstrip("_"), scenario, until, claim, order, not_applicable, limit, raises, costly)

    return make


def message(findings: list[str]) -> str:
    """All findings, a line each, cut where they repeat themselves."""
    shown = findings[:SHOWN]
    if len(findings) > SHOWN:
        shown.append(f"... and {len(findings) - SHOWN} more")
    return "\n".join(shown)


def pairs(before: tuple[Snapshot, ...], after: tuple[Snapshot, ...]) -> Iterator[tuple[Snapshot, Snapshot]]:
    """Each rank's two snapshots; a rank that did not report has none to compare."""
    was = {snapshot.rank: snapshot for snapshot in before}
    return ((was[snapshot.rank], snapshot) for snapshot in after if snapshot.rank in was)


def asked(cell: Cell, unwrapped: UnwrappedInfo | None, option: str) -> bool:
    """Whether the trainer was told what the cell says of that option: it is in the cell, or the driver speaks it."""
    return cell.option(option) != OPTIONS[option].default or (unwrapped is not None and option in unwrapped.obeyed)


def named_ranks(ranks: Sequence[int], world_size: int) -> str:
    """How a finding speaks of ranks that hold something among them."""
    if len(ranks) == world_size:
        return "all ranks"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def every_rank(snapshots: tuple[Snapshot, ...], world_size: int, what: str) -> Iterator[str]:
    """A finding if a rank did not report: silence is no proof."""
    missing = sorted(set(range(world_size)) - {snapshot.rank for snapshot in snapshots})
    if missing:
        yield f"rank {', '.join(map(str, missing))}: no report after {what}"


def finite_losses(snapshots: Iterable[Snapshot], what: str) -> Iterator[str]:
    """Yield a finding for each rank whose loss is missing or infinite: two infinities are equal, which proves nothing."""
    for snapshot in snapshots:
        if snapshot.loss is None or not math.isfinite(snapshot.loss):
            yield f"rank {snapshot.rank}: the loss of {what} is {snapshot.loss}; expected a finite number"


def trained_again(loaded: Iterable[Snapshot], trained: Iterable[Snapshot]) -> Iterator[str]:
    """Yield a finding for each rank that took as many steps in its load as there were before the save: it may have read nothing.

    torch itself takes one step in a load, to make the optimizer's state: with zero gradients, or on releases before 2.3
    with gradients that were never filled.
    """
    before: Counter[int] = Counter()
    for snapshot in trained:
        before[snapshot.rank] += len(snapshot.steps)
    for snapshot in loaded:
        # Not "is larger than 0": no comparison holds of NaN.
        steps = sum(step.square != 0 for step in snapshot.steps)
        if steps and steps >= before[snapshot.rank]:
            told = f"the optimizer took {steps} steps with gradients during the load"
            yield f"rank {snapshot.rank}: {told}; expected the state to be read from the checkpoint, not trained again"


def only_where_it_differs(cell: Cell, driver: type[Driver]) -> str | None:
    """Why the claim is tested elsewhere: files are found the same way in all precisions and with most options."""
    others = [name for name, _ in cell.options if name not in {"model", "state_dict"}]
    if cell.precision != "fp32" or others:
        return "files are found as they are in fp32 without that option, and it is tested there"
    return None


def saved_as_elsewhere(cell: Cell) -> str:
    """Why the claim is tested elsewhere; empty if it is tested here. Runs at other world sizes are the dearest there are."""
    others = [name for name, _ in cell.options if name not in SAVING]
    if others:
        return (
            f"{others[0]} changes how the model is trained, not what is saved, and what is saved is tested without it"
        )
    if cell.precision not in {"fp32", "bf16_mixed"}:
        return f"a checkpoint in {cell.precision} is put together as those in fp32 and bf16_mixed are"
    return ""

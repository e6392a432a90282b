"""Profiles, which select the cells of a session: smoke, default, pairwise, full.

A *cell* is one point of the matrix: strategy x precision x number of ranks (world size) x options,
such as ``fsdp2-bf16_upcast-w2-compile``. A suite declares its own cells by a ``Matrix``; its
*driver* is the trainer under test. The option ``--distcompat-profile`` says what to make of them.
At collection ``plugin.suite.cases`` calls

- ``cells`` for the cells of a suite, before checks are known: ``smoke`` has each strategy and each
  precision once, ``full`` adds all options;
- ``left_out``, once it knows which checks apply in which cell, for the checks that the profile
  does not run there, each with a reason, which the report shows.

Each cell and check that remain become one pytest item. Extensions add profiles by entry points
(``AddedProfile``).

A *facet* of a cell is anything that a check may depend on: its strategy, its precision, or an
option. An *axis* is an option that adds a dimension to the device mesh, such as ``tp``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_distcompat.cell import OPTIONS, Cell, Matrix, OptionValue
from pytest_distcompat.checks import CHECKS, Check
from pytest_distcompat.driver import Driver
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.law import law_of
from pytest_distcompat.registry import Registry

#: The meaning of each profile, from the one with the fewest cells to the one with the most.
PROFILES = {
    "smoke": "each strategy and each precision of the matrix once, no options; "
    "checks with runs of their own in one cell only",
    "default": "the suite's matrix; "
    "a check with runs of its own only once in cells alike in all that it depends on",
    "pairwise": "the suite's matrix, "
    "and every pair of strategy, precision and option values that the driver can do",
    "full": "every strategy with every precision that the suite's matrix has together, "
    "with every option value by itself, and every two axes of the mesh",
}


@dataclass(frozen=True)
class Selection:
    """What the cells of a profile are made of: the suite's matrix, taken apart.

    Attributes:
        driver: The driver of the suite.
        own: The cells of the suite's matrix.
        strategies: The names of the strategies of the matrix: ``("ddp", "fsdp2")``.
        precisions: The names of its precisions: ``("fp32", "bf16_upcast")``.
        world_sizes: The world sizes of the matrix; profiles that take one world size only take the
            first.
        supported: Tells whether the driver can run a cell on this machine.
        shared: Returns a directory in which processes of one session share what was read from the
            libraries; None without one.
    """

    driver: type[Driver]
    own: tuple[Cell, ...]
    strategies: tuple[str, ...]
    precisions: tuple[str, ...]
    world_sizes: tuple[int, ...]
    supported: Callable[[Cell], bool]
    shared: Callable[[], Path] | None

    @property
    def world_size(self) -> int:
        """Return the first world size."""
        return self.world_sizes[0]

    @property
    def claimed(self) -> tuple[tuple[str, str], ...]:
        """Return each strategy with each precision that the matrix has together with it.

        A suite may have fp8 with one strategy only, as an extra of its matrix: the other strategies
        are not tried with it.
        """
        pairs = [(cell.strategy, cell.precision) for cell in self.own]
        return tuple(dict.fromkeys(pairs))


#: By cell and check, why a profile does not run the check there.
LeftOut = dict[tuple[Cell, str], str]


def _nothing_left_out(applicable: Mapping[Cell, Collection[str]]) -> LeftOut:  # noqa: ARG001
    """Leave nothing out: the default of ``AddedProfile.left_out``."""
    return {}


@dataclass(frozen=True)
class AddedProfile:
    """A profile of an extension.

    Attributes:
        name: The value of ``--distcompat-profile``.
        meaning: What it runs.
        cells: Returns the cells.
        check: The only check that it runs, in its cells of whatever precision; None for all that
            apply.
        left_out: Returns the checks that it does not run, given those that apply to each cell.
        order: Where it stands in lists.
    """

    name: str
    meaning: str
    cells: Callable[[Selection], Iterable[Cell]]
    check: Check | None = None
    left_out: Callable[[Mapping[Cell, Collection[str]]], LeftOut] = _nothing_left_out
    order: int = 0


@dataclass(frozen=True)
class AddedCheck:
    """A check of an extension, and a cell that the extension adds for it."""

    cell: Cell
    check: Check


#: The profiles of extensions.
ADDED_PROFILES: Registry[AddedProfile] = Registry(
    "pytest_distcompat.profiles", AddedProfile, "profile", has_modules=False
)


def all_profiles() -> dict[str, str]:
    """Return the meaning of each profile by its name, those of extensions last."""
    added = {name: profile.meaning for name, profile in ADDED_PROFILES.by_name.items()}
    return {**PROFILES, **added}


def find_added(name: str) -> AddedProfile | None:
    """Return the extension's profile of that name; None for a profile of this module."""
    if name in PROFILES:
        return None
    return ADDED_PROFILES.by_name.get(name)


#: The options that add a dimension to the device mesh. ``full`` combines every two of them, and
#: each of them with each of BESIDE_AXES.
AXES = ("dp_replicate", "tp", "sp", "cp", "ep", "pp")
BESIDE_AXES: tuple[tuple[str, OptionValue], ...] = (
    ("compile", "regional"),
    ("activation_checkpointing", True),
    ("grad_accum", 2),
    ("model", "llama_dropout"),
)

#: Options that concern how a model is made, saved and sharded. The others concern training. A cell
#: of ``pairwise`` has at most one option of each kind beside those that its options need.
MODEL_OPTIONS = (
    "model",
    "state_dict",
    "cpu_offload",
    "reshard_after_forward",
    "use_orig_params",
    "cpu_ram_efficient_loading",
    "meta_init",
    "loaded",
    "wrap_policy",
    "save_only_model",
    "float32_norms",
)

#: One option with its value, ``("tp", 2)``; None for no option.
Choice = tuple[str, OptionValue] | None


def cells(
    profile: str,
    matrix: Matrix,
    *,
    driver: type[Driver],
    names: tuple[Sequence[str], Sequence[str]],
    world_size: int,
    device: str,
    shared: Callable[[], Path] | None = None,
) -> list[Cell]:
    """Return the cells of a suite in a session, in a fixed order.

    Args:
        profile: The name of the profile.
        matrix: The suite's matrix.
        driver: The suite's driver.
        names: All strategies and all precisions, for a matrix that names none.
        world_size: The world size, for a matrix that names none.
        device: ``cuda`` or ``cpu``.
        shared: Returns a directory in which the processes of a session share what they read from
            libraries; None without one.
    """
    # Imported late: modules that only list the profiles do not need drivers.
    from pytest_distcompat.drivers import unsupported_reason

    def supported(cell: Cell) -> bool:
        return not unsupported_reason(driver, cell, device)

    all_strategies, all_precisions = names
    selection = Selection(
        driver,
        own=tuple(matrix.cells(all_strategies, all_precisions, world_size)),
        strategies=tuple(matrix.strategies or all_strategies),
        precisions=tuple(matrix.precisions or all_precisions),
        world_sizes=matrix.world_sizes or (world_size,),
        supported=supported,
        shared=shared,
    )
    selectors: Mapping[str, Callable[[Selection], Iterable[Cell]]] = {
        "default": lambda selection: selection.own,
        "smoke": _smoke,
        "pairwise": _pairwise,
    }
    added = find_added(profile)
    if added is not None:
        return _spread(added.cells(selection), matrix)
    selected = selectors.get(profile, _full)(selection)
    if profile == "default":
        # The cells of the matrix, which are spread over machines already.
        return list(selected)
    return _spread(selected, matrix)


def _spread(cells: Iterable[Cell], matrix: Matrix) -> list[Cell]:
    """Return the cells over as many machines as those of the matrix, each once."""
    spread = [cell.spread_as(matrix) for cell in cells]
    return list(dict.fromkeys(spread))


def left_out(
    profile: str,
    applicable: Mapping[Cell, Collection[str]],
    checks: Mapping[str, Check] = CHECKS.by_name,
) -> LeftOut:
    """Return the reasons for which a profile leaves checks out, by cell and name of the check.

    - ``smoke`` runs a costly check, which needs more runs than the training that all checks share,
      only in the last cell, whose strategy shards the most.
    - ``default`` runs a check once for all cells that differ only in facets on which it does not
      depend (``Check.depends_on``).

    Args:
        profile: The name of the profile.
        applicable: The names of the checks that apply, by cell, in the order of the cells.
        checks: All checks by name.
    """
    added = find_added(profile)
    reasons: LeftOut = {} if added is None else added.left_out(applicable)
    for cell, names in applicable.items():
        checks_of_cell = {name: checks[name] for name in names}
        by_law = law_of(cell).left_out(cell, checks_of_cell, profile)
        for name, reason in by_law.items():
            reasons[cell, name] = reason
    for name, check in checks.items():
        cells: list[Cell] = []
        for cell, names in applicable.items():
            if name in names:
                cells.append(cell)
        if profile == "smoke" and check.costly:
            for cell in cells[:-1]:
                reasons[cell, name] = f"the smoke profile runs it in {cells[-1]} only"
        if profile == "default" and check.depends_on is not None:
            for cell, reason in _repeated(cells, check.depends_on):
                reasons[cell, name] = reason
    return reasons


def _repeated(cells: Iterable[Cell], depends_on: Collection[str]) -> Iterator[tuple[Cell, str]]:
    """Yield the cells in which a check that depends on these facets would only repeat itself.

    Each comes with the reason, which names an earlier cell with the same values of these facets.
    """
    # All that the check depends on -> the first cell with these values.
    first: dict[tuple[object, ...], Cell] = {}
    for cell in cells:
        facets = cell.facets()
        values = [facets[name] for name in sorted(depends_on)]
        # Cells on different numbers of machines are never alike. The number of ranks is left out
        # here: a check that depends on it names it as a facet.
        machines = dataclasses.replace(cell.spread, world_size=0)
        # Nor are cells with different settings, such as ``AdamW.amsgrad=true``.
        alike = (cell.strategy, machines, cell.set, *values)
        earlier = first.setdefault(alike, cell)
        if earlier != cell:
            reason = (
                f"the default profile runs it in {earlier}, "
                "which is alike in all that it depends on"
            )
            yield cell, reason


def _full(selection: Selection) -> Iterator[Cell]:
    """Yield a cell for each option value, the cells of ``_composed``, and the suite's own cells."""
    choices = option_choices(selection.driver)
    for strategy, precision in selection.claimed:
        for world_size in selection.world_sizes:
            for choice in choices:
                yield cell_of(selection.driver, strategy, precision, world_size, choice)
    yield from _composed(selection)
    yield from selection.own


def option_choices(driver: type[Driver], names: Iterable[str] = tuple(OPTIONS)) -> list[Choice]:
    """Return None for no option, then each value of each option that the driver supports.

    An option's default is left out, because a cell without the option has it.
    """
    choices: list[Choice] = [None]
    for name in names:
        if name in driver.options:
            # The first value is the default.
            choices += [(name, value) for value in OPTIONS[name].values[1:]]
    return choices


def cell_of(
    driver: type[Driver], strategy: str, precision: str, world_size: int, *choices: Choice
) -> Cell:
    """Return a cell with these options, and the further options and ranks that they need.

    Of ``fsdp2``, ``fp32``, 2 ranks and the choice ``("sp", True)`` it is
    ``fsdp2-fp32-w4-tp_2-sp``: sequence parallelism needs tensor parallelism, which is combined with
    data parallelism on 4 ranks.

    Args:
        driver: The driver of the cell.
        strategy: The strategy.
        precision: The precision.
        world_size: The number of ranks, unless the mesh needs more.
        *choices: The options.
    """
    chosen: dict[str, OptionValue] = {}
    for choice in choices:
        if choice is not None:
            name, value = choice
            chosen[name] = value
    options = {**_needed_options(driver, chosen), **chosen}
    if options.get("sp"):
        options.setdefault("tp", 2)
    if options.get("pp_schedule"):
        options.setdefault("pp", 2)
    if options.get("ep"):
        # Expert parallelism needs a model with experts: ZeRO's are DeepSpeed's own.
        model = "moe_deepspeed" if strategy.startswith("zero") else "moe_fused"
        options.setdefault("model", model)
    world_size = max(world_size, _least_world_size(options))
    return Cell(strategy, precision, world_size, tuple(options.items()))


def _needed_options(
    driver: type[Driver], chosen: Mapping[str, OptionValue]
) -> dict[str, OptionValue]:
    """Return the options that the driver needs in addition to the chosen ones.

    It declares them in ``needs_options`` by an option (``sp``), by a value of an option
    (``optimizer_muon``), or by several options together (``tp+cp``).
    """
    keys: list[str] = []
    for name, value in chosen.items():
        keys += [name, OPTIONS[name].token(value)]
    keys.append("+".join(chosen))
    needed: dict[str, OptionValue] = {}
    for key in keys:
        needed |= driver.needs_options.get(key, {})
    return needed


def _least_world_size(options: Mapping[str, OptionValue]) -> int:
    """Return the least number of ranks for the device mesh of these options."""
    replicas = int(options.get("dp_replicate", 1))
    tp = int(options.get("tp", 1))
    cp = int(options.get("cp", 1))
    pp = int(options.get("pp", 1))
    model_parallel = tp * cp * pp
    least = 1
    if replicas > 1:
        # Each replica is sharded over at least two ranks.
        least = 2 * replicas * model_parallel
    if model_parallel > 1 or options.get("ep"):
        # With four ranks a mesh of two, such as ``tp=2``, is combined with data parallelism.
        least = max(least, 4)
    return least


def _composed(selection: Selection) -> Iterator[Cell]:
    """Yield a cell for every two of AXES together, and for each of AXES with each of BESIDE_AXES.

    An option that cannot run by itself is left out: the cell with this option only has the reason.
    """
    driver = selection.driver
    # The first value of each axis that is not the default: ``("tp", 2)``.
    axes = [(name, OPTIONS[name].values[1]) for name in AXES]
    choices: list[tuple[str, OptionValue]] = []
    for name, value in (*axes, *BESIDE_AXES):
        if name in driver.options:
            choices.append((name, value))
    for strategy, precision in selection.claimed:
        make = functools.partial(cell_of, driver, strategy, precision, selection.world_size)
        able = [choice for choice in choices if selection.supported(make(choice))]
        for first, second in itertools.combinations(able, 2):
            if first[0] in AXES:
                yield make(first, second)


def _smoke(selection: Selection) -> Iterator[Cell]:
    """Yield a cell for each strategy, precisions in turn, then one for each unused precision.

    With the strategies ddp and fsdp2 and the precisions fp32, bf16_upcast and fp16_mixed it yields
    ddp-fp32, fsdp2-bf16_upcast and ddp-fp16_mixed, if the driver supports all.
    """
    precisions = selection.precisions
    remaining = dict.fromkeys(precisions)
    ring = deque(precisions)
    for strategy in selection.strategies:
        cell = _first_supported(selection, [strategy], ring)
        # The next strategy tries the next precision first.
        ring.rotate(-1)
        if cell is not None:
            remaining.pop(cell.precision, None)
            yield cell
    for precision in remaining:
        cell = _first_supported(selection, selection.strategies, [precision])
        if cell is not None:
            yield cell


def _first_supported(
    selection: Selection, strategies: Iterable[str], precisions: Iterable[str]
) -> Cell | None:
    """Return the first cell of these strategies and precisions that can run here, or None."""
    for strategy, precision in itertools.product(strategies, precisions):
        cell = Cell(strategy, precision, selection.world_size)
        if selection.supported(cell):
            return cell
    return None


def _pairwise(selection: Selection) -> Iterator[Cell]:
    """Yield the suite's own cells, then a covering array of all pairs of values.

    A covering array is a small set of cells in which each pair of values of two factors occurs. The
    four factors are the strategy, the precision, one option of the model, and one of the training.
    The array comes from covertable: allpairspy misses pairs if there are constraints. The own cells
    are there because some checks need cells without options.
    """
    try:
        from covertable import make
    except ImportError:
        raise UsageProblem(
            "the profile pairwise needs covertable: pip install 'pytest-distcompat[pairwise]'"
        ) from None

    driver = selection.driver
    claimed = selection.claimed
    yield from selection.own
    # Two factors have options, so that a cell of the array has at most one of each kind.
    of_model: list[str] = []
    of_training: list[str] = []
    for name in OPTIONS:
        if name in MODEL_OPTIONS:
            of_model.append(name)
        else:
            of_training.append(name)
    model_choices = option_choices(driver, of_model)
    training_choices = option_choices(driver, of_training)

    @functools.cache
    def possible(strategy: str, precision: str, *choices: Choice) -> bool:
        # Cached, because covertable asks often, and a driver looks for the libraries that it needs.
        cell = cell_of(driver, strategy, precision, selection.world_size, *choices)
        return (strategy, precision) in claimed and selection.supported(cell)

    def row_is_possible(row: Mapping[int, Any]) -> bool:
        # The keys are the indices of ``factors``.
        return possible(row[0], row[1], row[2], row[3])

    # covertable leaves out each combination for which ``evaluate`` is false.
    constraint = {
        "operator": "fn",
        "requires": [0, 1, 2, 3],
        "evaluate": row_is_possible,
    }
    strategies = list(dict.fromkeys(strategy for strategy, _precision in claimed))
    precisions = list(dict.fromkeys(precision for _strategy, precision in claimed))
    factors = [strategies, precisions, model_choices, training_choices]
    for strategy, precision, of_model_choice, of_training_choice in make(
        factors, constraints=[constraint]
    ):
        yield cell_of(
            driver,
            strategy,
            precision,
            selection.world_size,
            of_model_choice,
            of_training_choice,
        )

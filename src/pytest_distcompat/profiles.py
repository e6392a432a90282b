"""Profiles, which select the cells of a session: smoke, default, pairwise, full."""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_distcompat.cell import OPTIONS, Cell, Matrix, OptionValue
from pytest_distcompat.checks import CHECKS, Check
from pytest_distcompat.driver import Driver
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.models import architectures
from pytest_distcompat.registry import Registry
from pytest_distcompat.settings import rules
from pytest_distcompat.settings.slice import SLICE

#: Name to meaning, from the least to the most.
PROFILES = {
    "smoke": "each strategy and each precision of the matrix once, no options; checks with runs of their own in one cell only",
    "default": "the suite's matrix; a check with runs of its own only once in cells alike in all that it depends on",
    "pairwise": "the suite's matrix, and every pair of strategy, precision and option values that the driver can do",
    "zoo": "every causal language model of transformers and one class of each other task, under DDP, FSDP2 and ZeRO-3",
    "sweep": "every setting of the installed libraries that the driver makes objects with, one at a time (distcompat settings)",
    "full": "every strategy with every precision that the suite's matrix has together, with every option value by itself, and "
    "every two axes of the mesh",
}


@dataclass(frozen=True)
class AddedProfile:
    """A profile of an extension: one check in cells that it chooses, whatever their precision.

    Attributes:
        name: The value of ``--distcompat-profile``.
        meaning: What it runs.
        check: The check.
        cells: Returns the cells for a driver, the strategies of the suite's matrix and a number of ranks.
    """

    name: str
    meaning: str
    check: Check
    cells: Callable[[type[Driver], Sequence[str], int], list[Cell]]


@dataclass(frozen=True)
class AddedCheck:
    """A check of an extension, and the cell that it adds for it."""

    cell: Cell
    check: Check


#: The profiles of extensions.
ADDED_PROFILES: Registry[AddedProfile] = Registry(
    "pytest_distcompat.profiles", AddedProfile, "profile", has_modules=False
)


def all_profiles() -> dict[str, str]:
    """Return name and meaning of all profiles, those of extensions last."""
    added = {name: profile.meaning for name, profile in ADDED_PROFILES.by_name.items()}
    return {**PROFILES, **added}


def find_added(name: str) -> AddedProfile | None:
    """Return the profile of an extension; None for a name that is another's."""
    if name in PROFILES:
        return None
    return ADDED_PROFILES.by_name.get(name)


#: The axes of a mesh, of which ``full`` puts every two together, and what it puts beside each.
AXES = ("dp_replicate", "tp", "sp", "cp", "ep", "pp")
BESIDE_AXES: tuple[tuple[str, OptionValue], ...] = (
    ("compile", "regional"),
    ("activation_checkpointing", True),
    ("grad_accum", 2),
    ("model", "llama_dropout"),
)

#: Options of how a model is made, stored and sharded; the others concern training. A cell of ``pairwise`` has one of each kind.
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

#: What the profile ``zoo`` runs of each architecture: one strategy of each kind, and what may depend on the model's modules.
ZOO_STRATEGIES = ("ddp", "fsdp2", "zero3")
ZOO_CHECKS = ("active", "names", "resume", "parity", "gradients", "export")

#: What the profile ``sweep`` runs of each setting: what one training shows. Rules add checks with runs of their own.
SWEEP_CHECKS = (
    "active",
    "names",
    "units",
    "optimizer",
    "dtypes",
    "parity",
    "clipping",
    "gradients",
    "accumulation",
)

_SLICED = frozenset(itertools.chain.from_iterable(SLICE.values()))

#: One option with its value; None for none.
Choice = tuple[str, OptionValue] | None


def cells(
    profile: str,
    matrix: Matrix,
    *,
    driver: type[Driver],
    names: tuple[Sequence[str], Sequence[str]],
    world_size: int,
    device: str,
    shared: Path | None = None,
) -> list[Cell]:
    """Return the cells of a session, in a fixed order.

    ``names`` are all strategies and all precisions; they and ``world_size`` are for a matrix that names none. Processes of
    one session share in ``shared`` what was read from the libraries.
    """
    # Imported late: modules that only list the profiles do not need drivers.
    from pytest_distcompat.drivers import unsupported_reason

    def supported(cell: Cell) -> bool:
        return not unsupported_reason(driver, cell, device)

    all_strategies, all_precisions = names
    selection = _Selection(
        driver,
        own=tuple(matrix.cells(all_strategies, all_precisions, world_size)),
        strategies=tuple(matrix.strategies or all_strategies),
        precisions=tuple(matrix.precisions or all_precisions),
        world_sizes=matrix.world_sizes or (world_size,),
        supported=supported,
        shared=shared,
    )
    selectors: Mapping[str, Callable[[_Selection], Iterable[Cell]]] = {
        "default": lambda selection: selection.own,
        "smoke": _smoke,
        "zoo": _zoo,
        "sweep": _sweep,
        "pairwise": _pairwise,
    }
    added = find_added(profile)
    if added is not None:
        strategies = dict.fromkeys(strategy for strategy, _precision in selection.claimed)
        return added.cells(driver, list(strategies), selection.world_size)
    selected = selectors.get(profile, _full)(selection)
    if profile == "default":
        return list(selected)
    return list(dict.fromkeys(selected))


@dataclass(frozen=True)
class _Selection:
    """What the cells of a profile are made of.

    Attributes:
        driver: The driver of the suite.
        own: The cells of the suite's matrix.
        strategies: The strategies of the matrix.
        precisions: The precisions of the matrix.
        world_sizes: The world sizes of the matrix; profiles that take one world size only take the first.
        supported: Tells whether the driver can run a cell here.
        shared: A directory in which processes of one session share what was read from the libraries.
    """

    driver: type[Driver]
    own: tuple[Cell, ...]
    strategies: tuple[str, ...]
    precisions: tuple[str, ...]
    world_sizes: tuple[int, ...]
    supported: Callable[[Cell], bool]
    shared: Path | None

    @property
    def world_size(self) -> int:
        """Return the first world size."""
        return self.world_sizes[0]

    @property
    def claimed(self) -> tuple[tuple[str, str], ...]:
        """Return each strategy with each precision that the matrix has together with it.

        A suite may have fp8 with one strategy only, as an extra of its matrix: the other strategies are not tried with it.
        """
        return tuple(dict.fromkeys((cell.strategy, cell.precision) for cell in self.own))


def left_out(
    profile: str,
    applicable: Mapping[Cell, Collection[str]],
    checks: Mapping[str, Check] = CHECKS.by_name,
) -> dict[tuple[Cell, str], str]:
    """Return the checks that a profile leaves out, by (cell, check), each with the reason.

    ``zoo`` runs ``ZOO_CHECKS`` only. ``smoke`` runs ``costly`` checks, which have runs of their own, in the last cell
    only, which is sharded the most. ``default`` runs no check in a cell that differs from an earlier one only in what
    the check does not depend on.
    """
    if profile == "zoo":
        return _left_out_of_zoo(applicable)
    reasons: dict[tuple[Cell, str], str] = {}
    for cell, names in applicable.items():
        if profile == "sweep" or cell.id in _SLICED:
            reasons |= _left_out_of_sweep(cell, names)
    if profile == "default":
        reasons = {**_costly_of_slice(applicable, checks), **reasons}
    for name, check in checks.items():
        cells = [cell for cell, names in applicable.items() if name in names]
        if profile == "smoke" and check.costly:
            for cell in cells[:-1]:
                reasons[cell, name] = f"the smoke profile runs it in {cells[-1]} only"
        if profile == "default" and check.depends_on is not None:
            for cell, reason in _repeated(cells, check.depends_on):
                reasons[cell, name] = reason
    return reasons


def _left_out_of_zoo(applicable: Mapping[Cell, Collection[str]]) -> dict[tuple[Cell, str], str]:
    """Return all checks but ``ZOO_CHECKS``, by (cell, check), each with the reason."""
    reasons: dict[tuple[Cell, str], str] = {}
    for cell, checks in applicable.items():
        for check in checks:
            if check not in ZOO_CHECKS:
                reasons[cell, check] = f"the zoo profile runs {', '.join(ZOO_CHECKS)} only"
    return reasons


def _repeated(cells: Iterable[Cell], depends_on: Collection[str]) -> Iterator[tuple[Cell, str]]:
    """Yield the cells that are like an earlier one in these facets, each with the reason to run a check only there."""
    first: dict[tuple[object, ...], Cell] = {}
    for cell in cells:
        facets = cell.facets()
        values = [facets[name] for name in sorted(depends_on)]
        earlier = first.setdefault((cell.strategy, cell.nodes, cell.set, *values), cell)
        if earlier != cell:
            yield (
                cell,
                f"the default profile runs it in {earlier}, which is alike in all that it depends on",
            )


def _costly_of_slice(
    applicable: Mapping[Cell, Collection[str]], checks: Mapping[str, Check]
) -> dict[tuple[Cell, str], str]:
    """Return the checks with runs of their own in cells of the sweep's slice."""
    reasons: dict[tuple[Cell, str], str] = {}
    for cell, names in applicable.items():
        if cell.id not in _SLICED:
            continue
        for name in names:
            if checks[name].costly:
                reasons[cell, name] = "the sweep runs it"
    return reasons


def _left_out_of_sweep(cell: Cell, checks: Collection[str]) -> dict[tuple[Cell, str], str]:
    """Return the checks that are not run for the settings of a cell: those meant to fail, and those that no rule adds."""
    wanted = set(SWEEP_CHECKS)
    reason_by_failing_check: dict[str, str] = {}
    for setting in cell.set:
        rule = rules.rule_of(setting.partition("=")[0])
        wanted.update(rule.get("checks", ()))
        for check in rules.meant_to_fail(setting):
            reason_by_failing_check.setdefault(check, rule["reason"])
    reasons: dict[tuple[Cell, str], str] = {}
    for check in checks:
        if reason_by_failing_check.get(check):
            reasons[cell, check] = reason_by_failing_check[check]
        elif check not in wanted:
            reasons[cell, check] = f"of this setting only {', '.join(SWEEP_CHECKS)} are run"
    return reasons


def _zoo(selection: _Selection) -> Iterator[Cell]:
    """Yield each architecture under each of ``ZOO_STRATEGIES``; nothing for a driver with a model of its own."""
    if "model" not in selection.driver.options:
        return
    for model in architectures():
        for strategy in ZOO_STRATEGIES:
            if strategy in selection.strategies:
                yield Cell.of(strategy, "fp32", selection.world_size, model=model)


def _sweep(selection: _Selection) -> Iterator[Cell]:
    """Yield a cell for each value of each setting, under each strategy that has it and can run it here."""
    driver = selection.driver
    for setting in rules.settings_of(driver.sources, selection.shared):
        for strategy, text in itertools.product(setting.strategies, setting.cells):
            if strategy not in selection.strategies:
                continue
            cell = Cell(strategy, setting.precision, selection.world_size)
            cell = with_set(driver, cell, text, **setting.options)
            if selection.supported(cell):
                yield cell


def with_set(driver: type[Driver], cell: Cell, text: str, **options: OptionValue) -> Cell:
    """Return the cell with settings and options, of a small model if the driver has several."""
    if "model" in driver.options:
        options.setdefault("model", "mlp")
    if "optimizer" not in driver.options:
        # It makes the one that its sources name.
        options.pop("optimizer", None)
    options["set"] = text
    return Cell.of(cell.strategy, cell.precision, cell.world_size, **options)


def _full(selection: _Selection) -> Iterator[Cell]:
    """Yield every option value by itself, every two axes of the mesh, then the suite's own cells."""
    choices = option_choices(selection.driver)
    for pair, world_size, choice in itertools.product(
        selection.claimed, selection.world_sizes, choices
    ):
        strategy, precision = pair
        yield cell_of(selection.driver, strategy, precision, world_size, choice)
    yield from _composed(selection)
    yield from selection.own


def option_choices(driver: type[Driver], names: Iterable[str] = tuple(OPTIONS)) -> list[Choice]:
    """Return no option, then each value, except defaults, of each of these options that the driver supports."""
    choices: list[Choice] = [None]
    for name in names:
        if name in driver.options:
            choices += [(name, value) for value in OPTIONS[name].values[1:]]
    return choices


def cell_of(
    driver: type[Driver], strategy: str, precision: str, world_size: int, *choices: Choice
) -> Cell:
    """Return a cell with these options, those that they need, and as many ranks as their mesh needs at least."""
    chosen = dict(choice for choice in choices if choice is not None)
    options = {**_needed_options(driver, chosen), **chosen}
    if options.get("sp"):
        options.setdefault("tp", 2)
    if options.get("pp_schedule"):
        options.setdefault("pp", 2)
    if options.get("ep"):
        options.setdefault("model", "moe_deepspeed" if strategy.startswith("zero") else "moe_fused")
    world_size = max(world_size, _least_world_size(options))
    return Cell(strategy, precision, world_size, tuple(options.items()))


def _needed_options(
    driver: type[Driver], chosen: Mapping[str, OptionValue]
) -> dict[str, OptionValue]:
    """Return the options that the driver needs beside the chosen ones.

    It declares them for an option (``sp``), for a value of one (``optimizer_muon``) and for several together (``tp+cp``).
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
    """Return how many ranks the mesh of these options needs at least."""
    replicas = int(options.get("dp_replicate", 1))
    parts = math.prod(int(options.get(name, 1)) for name in ("tp", "cp", "pp"))
    least = 1
    if replicas > 1:
        # A replica has at least two shards.
        least = 2 * replicas * parts
    if parts > 1 or options.get("ep"):
        # Beside tensor parallelism there is data parallelism, if four ranks are enough.
        least = max(least, 4)
    return least


def _composed(selection: _Selection) -> Iterator[Cell]:
    """Yield every two axes of the mesh beside each other, and each beside what changes what its layers compute.

    Where one of the two cannot run by itself, the reason is that of its own cell.
    """
    driver = selection.driver
    choices = [(name, OPTIONS[name].values[1]) for name in AXES]
    choices += BESIDE_AXES
    choices = [choice for choice in choices if choice[0] in driver.options]
    for strategy, precision in selection.claimed:
        make = functools.partial(cell_of, driver, strategy, precision, selection.world_size)
        able = [choice for choice in choices if selection.supported(make(choice))]
        for first, second in itertools.combinations(able, 2):
            if first[0] in AXES:
                yield make(first, second)


def _smoke(selection: _Selection) -> Iterator[Cell]:
    """Yield each strategy with the next precision that it supports, then the remaining precisions."""
    precisions = selection.precisions
    remaining = dict.fromkeys(precisions)
    ring = deque(precisions)
    for strategy in selection.strategies:
        cell = _first_supported(selection, [strategy], ring)
        # The next strategy begins with the next precision.
        ring.rotate(-1)
        if cell is not None:
            remaining.pop(cell.precision, None)
            yield cell
    for precision in remaining:
        cell = _first_supported(selection, selection.strategies, [precision])
        if cell is not None:
            yield cell


def _first_supported(
    selection: _Selection, strategies: Iterable[str], precisions: Iterable[str]
) -> Cell | None:
    """Return the first cell of these strategies and precisions that the driver can run here; None if it can run none."""
    for strategy, precision in itertools.product(strategies, precisions):
        cell = Cell(strategy, precision, selection.world_size)
        if selection.supported(cell):
            return cell
    return None


def _pairwise(selection: _Selection) -> Iterator[Cell]:
    """Yield the suite's own cells, then a covering array of strength 2: every pair of values that the driver can do.

    The own cells, because a bug may need a strategy, a precision and an option together, and some checks need cells without
    options. The array by covertable; allpairspy leaves out pairs where there are constraints.
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
    model_choices = option_choices(driver, [name for name in OPTIONS if name in MODEL_OPTIONS])
    training_choices = option_choices(
        driver, [name for name in OPTIONS if name not in MODEL_OPTIONS]
    )

    @functools.cache
    def possible(strategy: str, precision: str, *choices: Choice) -> bool:
        # Cached: covertable calls it often, and a driver looks for the libraries that it needs.
        cell = cell_of(driver, strategy, precision, selection.world_size, *choices)
        return (strategy, precision) in claimed and selection.supported(cell)

    constraint = {
        "operator": "fn",
        "requires": [0, 1, 2, 3],
        "evaluate": lambda row: possible(row[0], row[1], row[2], row[3]),
    }
    strategies = list(dict.fromkeys(strategy for strategy, _precision in claimed))
    precisions = list(dict.fromkeys(precision for _strategy, precision in claimed))
    rows = make([strategies, precisions, model_choices, training_choices], constraints=[constraint])
    for row in rows:
        yield cell_of(driver, row[0], row[1], selection.world_size, row[2], row[3])

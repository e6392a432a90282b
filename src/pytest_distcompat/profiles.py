"""Profiles, which select the cells of a session: smoke, default, pairwise, full."""

from __future__ import annotations

import functools
import itertools
import math
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
    "wrap_policy",
    "save_only_model",
    "float32_norms",
)

#: What the profile ``zoo`` runs of each architecture: one strategy of each kind, and what may depend on the model's modules.
ZOO_STRATEGIES = ("ddp", "fsdp2", "zero3")
ZOO_CHECKS = ("active", "names", "resume", "parity", "gradients", "export")

#: What the profile ``sweep`` runs of each setting: what one training shows. Rules add checks with runs of their own.
SWEEP_CHECKS = ("active", "names", "units", "optimizer", "dtypes", "parity", "clipping", "gradients", "accumulation")

_SLICED = frozenset(itertools.chain.from_iterable(SLICE.values()))

#: One option with its value; None for none.
Choice = tuple[str, OptionValue] | None


def cells(  # noqa: PLR0911 - a return for each profile
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

    own = list(matrix.cells(*names, world_size))
    if profile == "default":
        return own
    strategies, precisions = matrix.strategies or names[0], matrix.precisions or names[1]
    world_sizes = matrix.world_sizes or (world_size,)
    if profile == "smoke":
        return list(_smoke(strategies, precisions, world_sizes[0], supported))
    # A suite may have fp8 with one strategy only, as an extra of its matrix: the other strategies are not tried with it.
    claimed = tuple(dict.fromkeys((cell.strategy, cell.precision) for cell in own))
    if profile == "zoo":
        models = architectures() if "model" in driver.options else ()
        chosen = [strategy for strategy in ZOO_STRATEGIES if strategy in strategies]
        return [Cell.of(strategy, "fp32", world_sizes[0], model=model) for model in models for strategy in chosen]
    if profile == "sweep":
        return [cell for cell in _sweep(driver, strategies, world_sizes[0], shared) if supported(cell)]
    added = find_added(profile)
    if added is not None:
        claimed_strategies = dict.fromkeys(strategy for strategy, _ in claimed)
        return added.cells(driver, list(claimed_strategies), world_sizes[0])
    if profile == "pairwise":
        # Keep the suite's own cells too: a bug may need a strategy, a precision and an option together, and some checks need
        # cells without options.
        return list(dict.fromkeys([*own, *_pairwise(claimed, world_sizes[0], driver, supported)]))
    found = [
        cell_of(driver, *pair, size, choice)
        for pair, size, choice in itertools.product(claimed, world_sizes, option_choices(driver))
    ]
    found += _composed(driver, claimed, world_sizes[0], supported)
    return list(dict.fromkeys([*found, *own]))


def left_out(
    profile: str, applicable: Mapping[Cell, Collection[str]], checks: Mapping[str, Check] = CHECKS.by_name
) -> dict[tuple[Cell, str], str]:
    """Return the checks that a profile leaves out, by (cell, check), each with the reason.

    ``zoo`` runs ``ZOO_CHECKS`` only. ``smoke`` runs ``costly`` checks, which have runs of their own, in the last cell
    only, which is sharded the most. ``default`` runs no check in a cell that differs from an earlier one only in what
    the check does not depend on.
    """
    found: dict[tuple[Cell, str], str] = {}
    if profile == "zoo":
        others = ((cell, check) for cell, checks in applicable.items() for check in checks if check not in ZOO_CHECKS)
        return dict.fromkeys(others, f"the zoo profile runs {', '.join(ZOO_CHECKS)} only")
    for cell, names in applicable.items():
        if profile == "sweep" or cell.id in _SLICED:
            found |= _left_out_of_sweep(cell, names)
    for name, check in checks.items():
        cells = [cell for cell, names in applicable.items() if name in names]
        if profile == "smoke" and check.costly:
            found |= {(cell, name): f"the smoke profile runs it in {cells[-1]} only" for cell in cells[:-1]}
        if profile == "default" and check.depends_on is not None:
            found |= {(cell, name): reason for cell, reason in _repeated(cells, check.depends_on)}
    return found


def _repeated(cells: Iterable[Cell], depends_on: Collection[str]) -> Iterator[tuple[Cell, str]]:
    """Yield the cells that are like an earlier one in these facets, each with the reason to run a check only there."""
    first: dict[tuple[object, ...], Cell] = {}
    for cell in cells:
        alike = (cell.strategy, cell.nodes, cell.set, *(cell.facets()[name] for name in sorted(depends_on)))
        if (other := first.setdefault(alike, cell)) != cell:
            yield cell, f"the default profile runs it in {other}, which is alike in all that it depends on"


def _left_out_of_sweep(cell: Cell, checks: Collection[str]) -> dict[tuple[Cell, str], str]:
    """Return the checks that are not run for the settings of a cell: those meant to fail, and those that no rule adds."""
    asked = [(rules.rule_of(one.partition("=")[0]), rules.meant_to_fail(one)) for one in cell.set]
    wanted = {*SWEEP_CHECKS, *(check for rule, _ in asked for check in rule.get("checks", ()))}
    found: dict[tuple[Cell, str], str] = {}
    for check in checks:
        if meant := next((rule["reason"] for rule, failing in asked if check in failing), ""):
            found[cell, check] = meant
        elif check not in wanted:
            found[cell, check] = f"of this setting only {', '.join(SWEEP_CHECKS)} are run"
    return found


def _sweep(driver: type[Driver], strategies: Collection[str], world_size: int, shared: Path | None) -> Iterator[Cell]:
    """Yield a cell for each value of each setting, under each strategy that has it."""
    for setting in rules.settings_of(driver.sources, shared):
        for strategy, text in itertools.product(setting.strategies, setting.cells):
            if strategy in strategies:
                yield with_set(driver, Cell(strategy, setting.precision, world_size), text, **setting.options)


def with_set(driver: type[Driver], cell: Cell, text: str, **options: OptionValue) -> Cell:
    """Return the cell with settings and options, of a small model if the driver has several."""
    model = {"model": "mlp"} if "model" in driver.options else {}
    if "optimizer" not in driver.options:
        # It makes the one that its sources name.
        options.pop("optimizer", None)
    return Cell.of(cell.strategy, cell.precision, cell.world_size, **{**model, **options, "set": text})


def option_choices(driver: type[Driver], selects: Callable[[str], bool] = lambda name: True) -> list[Choice]:  # noqa: ARG005
    """Return no option, then each value, except defaults, of each option that the driver supports."""
    found: list[Choice] = [None]
    for name in (name for name in OPTIONS if name in driver.options and selects(name)):
        found += [(name, value) for value in OPTIONS[name].values[1:]]
    return found


def cell_of(driver: type[Driver], strategy: str, precision: str, world_size: int, *choices: Choice) -> Cell:
    """Return the cell with these options and those that they need, with at least as many ranks as they need."""
    chosen = dict(choice for choice in choices if choice is not None)
    tokens = [token for name, value in chosen.items() for token in (name, OPTIONS[name].token(value))]
    tokens.append("+".join(chosen))
    options = {name: value for one in tokens for name, value in driver.needs_options.get(one, {}).items()} | chosen
    if options.get("sp"):
        options.setdefault("tp", 2)
    if options.get("pp_schedule"):
        options.setdefault("pp", 2)
    if options.get("ep"):
        options.setdefault("model", "moe_deepspeed" if strategy.startswith("zero") else "moe_fused")
    replicas, parts = (
        int(options.get("dp_replicate", 1)),
        math.prod(int(options.get(name, 1)) for name in ("tp", "cp", "pp")),
    )
    # A replica has at least two shards, and beside tensor parallelism there is data parallelism, if four ranks are enough.
    least = max(2 * replicas * parts if replicas > 1 else 1, 4 if parts > 1 or options.get("ep") else 1)
    return Cell(strategy, precision, max(world_size, least), tuple(options.items()))


def _composed(
    driver: type[Driver], claimed: Iterable[tuple[str, str]], world_size: int, supported: Callable[[Cell], bool]
) -> Iterator[Cell]:
    """Yield every two axes of the mesh beside each other, and each beside what changes what its layers compute.

    Where one of the two cannot run by itself, the reason is that of its own cell.
    """
    choices = [(name, OPTIONS[name].values[1]) for name in AXES] + [*BESIDE_AXES]
    for strategy, precision in claimed:
        make = functools.partial(cell_of, driver, strategy, precision, world_size)
        able = [choice for choice in choices if choice[0] in driver.options and supported(make(choice))]
        for one, other in itertools.combinations(able, 2):
            if one[0] in AXES:
                yield make(one, other)


def _smoke(
    strategies: Iterable[str], precisions: Sequence[str], world_size: int, supported: Callable[[Cell], bool]
) -> Iterator[Cell]:
    """Yield each strategy with the next precision that it supports, then the remaining precisions."""
    ring, left, chosen = itertools.cycle(precisions), dict.fromkeys(precisions), []
    for strategy in strategies:
        options = [Cell(strategy, precision, world_size) for precision in itertools.islice(ring, len(precisions))]
        cell = next((cell for cell in options if supported(cell)), None)
        next(ring)
        if cell is not None:
            chosen.append(cell)
            left.pop(cell.precision, None)
    for precision in left:
        cell = next((cell for s in strategies if supported(cell := Cell(s, precision, world_size))), None)
        chosen += [cell] if cell is not None else []
    yield from dict.fromkeys(chosen)


def _pairwise(
    claimed: Collection[tuple[str, str]], world_size: int, driver: type[Driver], supported: Callable[[Cell], bool]
) -> Iterator[Cell]:
    """Yield a covering array of strength 2 by covertable; allpairspy leaves out pairs where there are constraints."""
    # ``claimed`` are the strategies and precisions that occur together.
    try:
        from covertable import make
    except ImportError:
        raise UsageProblem("the profile pairwise needs covertable: pip install 'pytest-distcompat[pairwise]'") from None

    model_choices = option_choices(driver, lambda name: name in MODEL_OPTIONS)
    training_choices = option_choices(driver, lambda name: name not in MODEL_OPTIONS)

    @functools.cache
    def possible(strategy: str, precision: str, *choices: Choice) -> bool:
        # Cached: covertable calls it often, and a driver looks for the libraries that it needs.
        cell = cell_of(driver, strategy, precision, world_size, *choices)
        return (strategy, precision) in claimed and supported(cell)

    constraint = {
        "operator": "fn",
        "requires": [0, 1, 2, 3],
        "evaluate": lambda row: possible(*(row[factor] for factor in range(4))),
    }
    factors = [list(dict.fromkeys(names)) for names in zip(*claimed, strict=True)]
    for row in make([*factors, model_choices, training_choices], constraints=[constraint]):
        yield cell_of(driver, row[0], row[1], world_size, row[2], row[3])

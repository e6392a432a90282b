"""How many of the cells that a suite could have a run takes: smoke, default, pairwise, full."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from pytest_distcompat.cell import OPTIONS, Cell, Matrix, OptionValue
from pytest_distcompat.driver import Driver
from pytest_distcompat.failures import UsageProblem

#: Name to meaning, from the least to the most.
PROFILES = {
    "smoke": "each strategy and each precision of the matrix once, no options; checks with runs of their own in one cell only",
    "default": "the suite's matrix",
    "pairwise": "the suite's matrix, and every pair of strategy, precision and option values that the driver can do",
    "full": "every strategy with every precision that the suite's matrix has together, with every option value by itself",
}

#: Options of how a model is made, kept and cut; the others are of how it is trained. A cell of ``pairwise`` has one of each.
KEEPING = (
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
) -> list[Cell]:
    """The cells of a run, in a fixed order. ``names`` are all strategies and all precisions, for what the matrix leaves open.

    Raises UsageProblem where ``pairwise`` is asked for without the library that it needs.
    """
    # Not for who only names the profiles.
    from pytest_distcompat.drivers._declared import unsupported_reason

    def able(cell: Cell) -> bool:
        return not unsupported_reason(driver, cell, device)

    own = list(matrix.cells(*names, world_size))
    if profile == "default":
        return own
    strategies, precisions = matrix.strategies or names[0], matrix.precisions or names[1]
    world_sizes = matrix.world_sizes or (world_size,)
    if profile == "smoke":
        return list(_smoke(strategies, precisions, world_sizes[0], able))
    # A suite may claim fp8 for one strategy only, as an extra of its matrix: nobody asks for it with another.
    claimed = tuple(dict.fromkeys((cell.strategy, cell.precision) for cell in own))
    if profile == "pairwise":
        # Pairs are not all: a bug may want a strategy, a precision and an option together, which the matrix has where it
        # was met, and some claims are tested in cells without options.
        return list(dict.fromkeys([*own, *_pairwise(claimed, world_sizes[0], driver, able)]))
    found = [
        _cell(*pair, size, choice) for pair, size, choice in itertools.product(claimed, world_sizes, _choices(driver))
    ]
    return list(dict.fromkeys([*found, *own]))


def left_out(
    profile: str, asked: Mapping[Cell, Collection[str]], costly: Collection[str]
) -> dict[tuple[Cell, str], str]:
    """What a profile leaves out of the checks that a suite could ask: (cell, check) -> the reason.

    ``asked`` maps the suite's cells to the checks that apply there. ``smoke`` asks a check that takes several runs of its
    own in the last of them only, which is the one that is cut the most.
    """
    found: dict[tuple[Cell, str], str] = {}
    for check in costly if profile == "smoke" else ():
        there = [cell for cell, checks in asked.items() if check in checks]
        found |= {(cell, check): f"the smoke profile asks it of {there[-1]} only" for cell in there[:-1]}
    return found


def _choices(driver: type[Driver], of: Callable[[str], bool] = lambda name: True) -> list[Choice]:  # noqa: ARG005
    """No option, then each value of each that the driver speaks, the defaults aside."""
    found: list[Choice] = [None]
    for name in (name for name in OPTIONS if name in driver.options and of(name)):
        found += [(name, value) for value in OPTIONS[name].values[1:]]
    return found


def _cell(strategy: str, precision: str, world_size: int, *choices: Choice) -> Cell:
    options = tuple(choice for choice in choices if choice is not None)
    copies = int(dict(options).get("dp_replicate", 1))
    # Two shards a copy are the least that is one.
    return Cell(strategy, precision, world_size if copies == 1 else max(world_size, 2 * copies), options)


def _smoke(
    strategies: Iterable[str], precisions: Sequence[str], world_size: int, able: Callable[[Cell], bool]
) -> Iterator[Cell]:
    """Each strategy with the next precision that it can do, then the precisions that are left, with whatever can do them."""
    ring, left, chosen = itertools.cycle(precisions), dict.fromkeys(precisions), []
    for strategy in strategies:
        options = [Cell(strategy, precision, world_size) for precision in itertools.islice(ring, len(precisions))]
        cell = next((cell for cell in options if able(cell)), None)
        next(ring)
        if cell is not None:
            chosen.append(cell)
            left.pop(cell.precision, None)
    for precision in left:
        cell = next((cell for s in strategies if able(cell := Cell(s, precision, world_size))), None)
        chosen += [cell] if cell is not None else []
    yield from dict.fromkeys(chosen)


def _pairwise(
    claimed: Collection[tuple[str, str]], world_size: int, driver: type[Driver], able: Callable[[Cell], bool]
) -> Iterator[Cell]:
    """A covering array of strength 2 over four factors, by covertable: https://covertable.walkframe.com.

    ``claimed`` are the strategies and precisions that are to be together.

    allpairspy is better known and was left: with constraints it leaves out pairs that could be had.
    """
    try:
        from covertable import make
    except ImportError:
        raise UsageProblem("the profile pairwise needs covertable: pip install 'pytest-distcompat[pairwise]'") from None

    kept = _choices(driver, lambda name: name in KEEPING)
    trained = _choices(driver, lambda name: name not in KEEPING)

    @functools.cache
    def possible(strategy: str, precision: str, *choices: Choice) -> bool:
        # Asked many times of each: and a driver looks for the libraries that it needs.
        cell = _cell(strategy, precision, world_size, *choices)
        return (strategy, precision) in claimed and able(cell)

    constraint = {
        "operator": "fn",
        "requires": [0, 1, 2, 3],
        "evaluate": lambda row: possible(*(row[factor] for factor in range(4))),
    }
    factors = [list(dict.fromkeys(names)) for names in zip(*claimed, strict=True)]
    for row in make([*factors, kept, trained], constraints=[constraint]):
        yield _cell(row[0], row[1], world_size, row[2], row[3])

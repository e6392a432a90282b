"""Profiles say how many cells a run takes; what each promises is counted here."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Collection, Iterable
from typing import Any

import pytest

from pytest_distcompat import suite
from pytest_distcompat.cell import FACETS, Cell, Matrix
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers import DRIVERS
from pytest_distcompat.ext.upstream.sweep.fields import Source
from pytest_distcompat.ext.upstream.sweep.slice import SLICE
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.profiles import AXES, BESIDE_AXES, all_profiles, cells, left_out
from pytest_distcompat.strategies import STRATEGIES

NAMES = (STRATEGIES.names(), PRECISIONS.names())


def of(profile: str, driver: type[Driver], matrix: Matrix | None = None) -> list[Cell]:
    return cells(profile, matrix or Matrix(), driver=driver, names=NAMES, world_size=2, device="cpu")


def ids(cells: Iterable[Cell]) -> list[str]:
    return [cell.id for cell in cells]


def strategies(cells: Iterable[Cell]) -> set[str]:
    return {cell.strategy for cell in cells}


def precisions(cells: Iterable[Cell]) -> set[str]:
    return {cell.precision for cell in cells}


def by_night(names: Iterable[str], *, but: Collection[str]) -> list[Any]:
    """Return parameters of which all but those run in the night only."""
    params: list[Any] = []
    for name in names:
        if name in but:
            params.append(name)
        else:
            params.append(pytest.param(name, marks=pytest.mark.nightly))
    return params


#: The covering array of a driver takes seconds; it is made by one piece of code for all of them.
@pytest.fixture(params=by_night(DRIVERS.names(), but={"torch"}))
def driver(request: pytest.FixtureRequest) -> type[Driver]:
    return DRIVERS.get(request.param)


#: The others ask the libraries for all their settings and pairs.
QUICK_PROFILES = all_profiles().keys() - {"sweep", "pairwise"}


@pytest.mark.parametrize("profile", by_night(all_profiles(), but=QUICK_PROFILES))
def test_every_profile_is_the_same_each_time_and_has_no_cell_twice(profile: str, driver: type[Driver]) -> None:
    cells = of(profile, driver)
    assert cells == of(profile, driver)
    assert len(cells) == len(set(cells)) > 0


def test_default_is_the_matrix() -> None:
    matrix = Matrix(("ddp",), ("fp32",), extra=(Cell.parse("fsdp2-fp32-w2-compile"),))
    cells = of("default", DRIVERS.get("torch"), matrix)
    assert ids(cells) == ["ddp-fp32-w2", "fsdp2-fp32-w2-compile"]


def test_smoke_has_each_strategy_and_each_precision_that_can_be_run(driver: type[Driver]) -> None:
    cells = of("smoke", driver)
    all_cells = itertools.starmap(Cell, itertools.product(*NAMES))
    supported = [cell for cell in all_cells if not driver.unsupported_reason(cell, "cpu")]
    assert strategies(cells) == strategies(supported)
    assert precisions(cells) == precisions(supported)
    for cell in cells:
        assert not cell.options
    assert len(cells) <= len(STRATEGIES.names()) + len(PRECISIONS.names())


def test_smoke_stays_inside_the_matrix() -> None:
    cells = of("smoke", DRIVERS.get("torch"), Matrix(("fsdp2",), ("fp32", "bf16_pure")))
    assert ids(cells) == ["fsdp2-fp32-w2", "fsdp2-bf16_pure-w2"]


def test_smoke_runs_a_costly_check_in_one_cell_with_a_reason_in_the_others() -> None:
    ddp = Cell("ddp", "fp32")
    fsdp2 = Cell("fsdp2", "fp32")
    zero3 = Cell("zero3", "fp32")
    checks = {ddp: ["names", "reshard"], fsdp2: ["names", "reshard"], zero3: ["names"]}
    message = "the smoke profile runs it in fsdp2-fp32-w2 only"
    assert left_out("smoke", checks) == {(ddp, "reshard"): message}
    assert not left_out("default", checks)


def test_default_runs_a_check_once_in_cells_alike_in_all_that_it_depends_on() -> None:
    plain = Cell("fsdp2", "fp32")
    lower = Cell("fsdp2", "bf16_upcast")
    recomputed = Cell.of("fsdp2", "fp32", activation_checkpointing=True)
    full = Cell.of("fsdp2", "fp32", state_dict="full")
    larger = Cell("fsdp2", "fp32", 4)
    other = Cell("fsdp1", "fp32")
    staged = Cell.of("fsdp2", "fp32", pp=2)
    spread = Cell("fsdp2", "fp32", nodes=2)
    chosen = (plain, lower, recomputed, full, larger, other, staged, spread)
    cells_of = {cell: ["names", "resume", "reshard"] for cell in chosen}
    left = left_out("default", cells_of)
    assert set(left) == {
        (lower, "reshard"),
        (recomputed, "reshard"),
        (larger, "reshard"),
        (recomputed, "resume"),
    }
    assert left[recomputed, "resume"].startswith("the default profile runs it in fsdp2-fp32-w2, ")
    # What a check depends on are facets, and where none stands for it, it runs.
    assert not left_out("default", {recomputed: ["resume"]})
    assert not left_out("full", cells_of)
    for check in CHECKS.by_name.values():
        if check.depends_on is not None:
            assert check.depends_on <= set(FACETS)


def test_full_has_every_option_by_itself(driver: type[Driver]) -> None:
    cells = ids(of("full", driver))
    for strategy, precision in itertools.product(*NAMES):
        plain = Cell(strategy, precision)
        assert plain.id in cells
        if "model" in driver.options:
            mlp = Cell.of(strategy, precision, model="mlp")
            assert mlp.id in cells


def test_full_and_pairwise_add_no_combination_of_strategy_and_precision() -> None:
    # What the suite claims of fp8, it claims of one strategy.
    fp8 = Matrix(("fsdp2",), ("fp8",))
    matrix = Matrix(("ddp", "fsdp2"), ("fp32",), extra=(fp8,))
    claimed = {("ddp", "fp32"), ("fsdp2", "fp32"), ("fsdp2", "fp8")}
    for profile in ("full", "pairwise"):
        cells = of(profile, DRIVERS.get("torch"), matrix)
        combinations = {(cell.strategy, cell.precision) for cell in cells}
        assert combinations == claimed
        fp8_with_options = [cell for cell in cells if cell.precision == "fp8" and cell.options]
        assert fp8_with_options


def pairs(cell: Cell) -> set[frozenset[object]]:
    """Return the pairs of values that a cell covers."""
    values = [("strategy", cell.strategy), ("precision", cell.precision), *cell.options]
    return set(map(frozenset, itertools.combinations(values, 2)))


def composed(cell: Cell) -> bool:
    """Return whether axes are beside each other, or beside what changes the computation of layers."""
    names = set()
    for name, value in cell.options:
        if name in AXES or (name, value) in BESIDE_AXES:
            names.add(name)
    if names.isdisjoint(AXES):
        return False
    if cell.option("sp"):
        # Sequence parallelism comes with tensor parallelism: together they are one axis.
        names.discard("tp")
    return len(names) > 1


@pytest.mark.parametrize(
    ("cell", "is_there"),
    [
        ("fsdp2-fp32-w8-dp_replicate_2-tp_2", True),
        ("fsdp2-fp32-w4-tp_2-pp_2", True),
        ("fsdp2-bf16_upcast-w4-tp_2-cp_2", True),
        ("fsdp2-fp32-w4-model_moe_fused-tp_2-ep_2", True),
        ("fsdp2-fp32-w4-activation_checkpointing-tp_2-sp", True),
        ("ddp-fp32-w4-grad_accum_2-pp_2", True),
        ("fsdp2-fp32-w4-model_llama_dropout-tp_2-sp", True),
        # The llama has heads for two ranks.
        ("fsdp2-fp32-w4-model_mlp-tp_4", True),
        # DDP takes no DTensors, which the cell with that axis alone says.
        ("ddp-fp32-w4-tp_2-pp_2", False),
    ],
)
def test_full_has_every_two_axes_that_can_each_be_run(cell: str, is_there: bool) -> None:
    cells = of("full", DRIVERS.get("torch"))
    assert (Cell.parse(cell) in cells) == is_there


def test_two_axes_may_need_another_model_than_each() -> None:
    cells = of("full", DRIVERS.get("trainer"))
    both = Cell.parse("fsdp2-fp32-w4-model_hf:granitemoe_swa-tp_2-ep_2-save_only_model")
    experts = Cell.parse("fsdp2-fp32-w4-model_hf:gpt_oss-ep_2-save_only_model")
    assert both in cells
    assert experts in cells


def test_pairwise_covers_every_pair_that_can_be_run(driver: type[Driver]) -> None:
    cells = of("pairwise", driver)
    full = of("full", driver)
    default = of("default", driver)
    covered = set()
    for cell in cells:
        covered |= pairs(cell)
        if cell not in default:
            assert not driver.unsupported_reason(cell, "cpu")
    for cell in full:
        # With one option at most: what of that can be run must be there, in some cell, pair by pair.
        if not driver.unsupported_reason(cell, "cpu") and not composed(cell):
            missing = pairs(cell) - covered
            assert not missing, f"{cell}: {missing}"
    assert len(cells) < len(full) / 3


def test_pairwise_has_the_suites_own_cells_too() -> None:
    # No pair: one of a strategy, a precision and an option together.
    matrix = Matrix(("zero0",), ("bf16_upcast",), options=({"frozen": True, "grad_accum": 4},))
    cells = of("pairwise", DRIVERS.get("deepspeed"), matrix)
    assert cells[0].id == "zero0-bf16_upcast-w2-grad_accum_4-frozen"


def test_pairwise_without_its_library_says_how_to_get_it() -> None:
    script = (
        "import sys; sys.modules['covertable'] = None\n"
        "from pytest_distcompat.cell import Matrix\n"
        "from pytest_distcompat.drivers import DRIVERS\n"
        "from pytest_distcompat.profiles import cells\n"
        "try:\n"
        "    cells('pairwise', Matrix(), driver=DRIVERS.get('torch'), names=(('ddp',), ('fp32',)), world_size=2, device='cpu')\n"
        "except ValueError as error:\n"
        "    assert 'pip install' in str(error), error\n"
        "else:\n"
        "    raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_sweep_of_a_driver_without_several_models_has_cells() -> None:
    class Own(Driver):
        name = "own"
        options = ("set",)
        sources = (Source("Linear", "torch.nn.Linear", ("ddp",)), Source("SGD", "torch.optim.SGD", ("ddp",)))

    cells = ids(of("sweep", Own))
    assert "ddp-fp32-w2-set_Linear.bias=false" in cells
    assert "ddp-fp32-w2-set_SGD.maximize=true" in cells
    for cell in cells:
        assert "model" not in cell


@pytest.mark.parametrize(
    ("driver", "setting"),
    [
        ("torch", "fully_shard.reshard_after_forward=null"),
        ("trainer", "TrainingArguments.logging_nan_inf_filter=true"),
        ("trainer", "TrainingArguments.dataloader_pin_memory=true"),
    ],
)
def test_the_sweep_tries_defaults_of_arguments_that_a_driver_always_gives(driver: str, setting: str) -> None:
    settings = {cell.set for cell in of("sweep", DRIVERS.get(driver))}
    assert (setting,) in settings


def test_a_built_in_suite_has_its_slice_of_the_sweep_with_what_one_training_shows() -> None:
    for kind in (suite.TestTorch, suite.TestAccelerate, suite.TestTrainer, suite.TestDeepSpeed):
        driver = DRIVERS.get(kind.driver)
        cells = [cell for cell in of("default", driver, kind.matrix) if cell.set]
        assert tuple(ids(cells)) == SLICE.get(kind.driver, ())
        for cell in cells:
            assert driver.unsupported_reason(cell, "cpu") is None
    with_setting = Cell.parse(SLICE["deepspeed"][0])
    without_setting = Cell("zero2", "fp32")
    checks = {with_setting: ["gradients", "resume"], without_setting: ["resume"]}
    assert list(left_out("default", checks)) == [(with_setting, "resume")]

"""The profiles have the cell in which the built-in suite sees each bug. That it is seen there, ``test_mutants`` shows."""

from __future__ import annotations

import functools
import importlib.util
from importlib.machinery import ModuleSpec

import pytest
from mutants import profiled
from mutants.mutation import Sighting
from mutants.sightings import SIGHTINGS

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.drivers import find_driver
from pytest_distcompat.ext.upstream.zoo import ZOO_CHECKS
from pytest_distcompat.precisions import PRECISIONS

#: Seen only where Transformer Engine is, which nobody has on a CPU.
WITH_TRANSFORMER_ENGINE = "acc-3361-fp8-ds"
#: Tied weights saved by ``save_pretrained``, and embeddings that files have in more than ten parts.
IN_ZOO = ("tr-29903-state-dict", "tr-numbered-parts")
IN_ANY = [
    pytest.param(sighting, id=name)
    for name, sightings in SIGHTINGS.items()
    for sighting in sightings
    if name not in {WITH_TRANSFORMER_ENGINE, *IN_ZOO}
]


#: Each is asked for many times.
cells, left_out = functools.cache(profiled.cells), functools.cache(profiled.left_out)


@pytest.mark.parametrize("profile", ["default", pytest.param("pairwise", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("sighting", IN_ANY)
def test_the_profile_has_the_cell_that_finds_the_bug(sighting: Sighting, profile: str) -> None:
    cell = Cell.parse(sighting.cell)
    # Those of the built-in driver that it derives from: one computation for all.
    driver = find_driver(sighting.driver).name
    assert cell in cells(profile, driver, "cpu")
    assert (cell, sighting.check) not in left_out(profile, driver)
    assert not CHECKS.get(sighting.check).not_applicable(cell, find_driver(sighting.driver))


@pytest.mark.parametrize("name", IN_ZOO)
def test_the_zoo_has_the_cell_of_an_architecture(name: str) -> None:
    (sighting,) = SIGHTINGS[name]
    assert Cell.parse(sighting.cell) in cells("zoo", sighting.driver, "cpu")
    assert sighting.check in ZOO_CHECKS


@pytest.mark.parametrize("profile", [pytest.param("pairwise", marks=pytest.mark.nightly), "full"])
def test_a_machine_with_transformer_engine_has_its_cell_too(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec

    def find_faked(name: str, package: str | None = None) -> ModuleSpec | None:
        faked = ModuleSpec(name, None, origin="there") if name == "transformer_engine" else None
        return faked or find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_faked)
    (sighting,) = SIGHTINGS[WITH_TRANSFORMER_ENGINE]
    wanted = Cell.parse(sighting.cell)
    # An array may have it with another option beside it.
    assert any(
        (cell.strategy, cell.precision) == (wanted.strategy, wanted.precision)
        and set(wanted.options) <= set(cell.options)
        for cell in cells(profile, sighting.driver, "cuda")
    )


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ((), "fp8 needs Transformer Engine, which is not installed"),
        (("transformer_engine", "transformer_engine_torch"), "Transformer Engine needs a GPU"),
        # Without its kernels, as the stand-in here.
        (("transformer_engine",), None),
    ],
)
def test_transformer_engine_without_a_gpu(
    modules: tuple[str, ...], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: ModuleSpec(name, None, origin="there") if name in modules else None
    )
    cell = Cell.of("ddp", "fp8", fp8_backend="te")
    assert PRECISIONS.get("fp8").unsupported_reason(cell, "cpu") == reason

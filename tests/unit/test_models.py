"""Choice of the tiny model that the built-in drivers train."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pytest_distcompat import models
from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.drivers import DRIVERS, _releases, preload_of
from pytest_distcompat.world import World


@pytest.fixture(autouse=True)
def _uncached_default_model() -> Iterator[None]:
    models.default_model.cache_clear()
    yield
    models.default_model.cache_clear()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2"])
def test_without_transformers_the_default_model_is_one_without_it(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "version_of", lambda package: None)
    monkeypatch.setattr(_releases, "installed", lambda package: package != "transformers")
    cell, driver = Cell(strategy, "fp32"), DRIVERS.get("torch")
    assert driver.unsupported_reason(cell) is None
    assert driver(cell, World(0, 2, 0, "cpu")).blocks == ("Block",)
    assert not [name for name in preload_of(driver, [cell]) if name.startswith("transformers")]
    assert CHECKS.get("parity").not_applicable(cell, driver) is None
    tied = Cell.of(strategy, "fp32", model="llama_tied")
    assert driver.unsupported_reason(tied) == "transformers is not installed", "it was asked for by name"


def test_with_transformers_it_is_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "version_of", lambda package: "5.0.0")
    assert models.model_of(Cell("ddp", "fp32")).name == "llama"
    assert models.model_of(Cell.of("ddp", "fp32", model="mlp")).name == "mlp"

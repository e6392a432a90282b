"""The class an adopter inherits, and the built-in suite: ``pytest --pyargs pytest_distcompat.suite``."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from pytest_distcompat.cell import Matrix
from pytest_distcompat.expect import Expectation


class CompatSuite:
    """Inherit it, give it three things; every check runs in every cell, one pytest item each::

        class TestMyTrainer(CompatSuite):
            driver = "my_trainer.testing:Driver"
            matrix = Matrix(strategies=("ddp", "fsdp2"), precisions=("bf16_mixed",))
            expect = (fails("names", strategy="fsdp2", reason="org/repo#1"),)

    Items read ``TestMyTrainer::test[fsdp2-bf16_mixed-w2:names]``. Nothing is to be overridden, so that an upgrade brings
    new checks; overriding ``test`` is an error at collection, and so is an expectation that covers no cell.
    """

    #: ``module:attribute`` of a pytest_distcompat.Driver, or the name of a built-in one.
    driver: ClassVar[str] = ""
    #: The cells that are claimed to work.
    matrix: ClassVar[Matrix] = Matrix()
    #: Exceptions: ``fails(...)`` and ``refuses(...)``.
    expect: ClassVar[tuple[Expectation, ...]] = ()

    def test(self, distcompat_case: Callable[[], None]) -> None:
        """One check in one cell."""
        distcompat_case()


#: The other models of the built-in drivers, in one precision (names and sharding do not depend on it), and the other form of
#: FSDP's state dict.
def _beside(*strategies: str) -> tuple[Matrix, ...]:
    models = Matrix(strategies, ("bf16_mixed",), options=({"model": "llama_tied"}, {"model": "plain"}))
    return models, Matrix(("fsdp1", "fsdp2"), ("fp32",), options=({"state_dict": "full"},))


class TestTorch(CompatSuite):
    """Plain torch, by its own documented API."""

    driver = "torch"
    matrix = Matrix(("ddp", "fsdp1", "fsdp2"), extra=_beside("ddp", "fsdp1", "fsdp2"))


class TestAccelerate(CompatSuite):
    """accelerate, all six strategies."""

    driver = "accelerate"
    matrix = Matrix(
        ("ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"),
        extra=_beside("ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"),
    )

"""The class an adopter inherits, and the built-in suite: ``pytest --pyargs pytest_distcompat.suite``."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from pytest_distcompat.cell import Cell, Matrix
from pytest_distcompat.expect import Expectation, fails


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


#: The other models of the built-in drivers, in one precision: names and sharding do not depend on it.
_MODELS = tuple(
    Cell.of(strategy, "bf16_mixed", 2, model=model)
    for strategy in ("ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3")
    for model in ("llama_tied", "plain")
)
_FULL = tuple(Cell.of(strategy, "fp32", 2, state_dict="full") for strategy in ("fsdp1", "fsdp2"))

_NO_UPCAST = r"bfloat16 masters; expected float32"


class TestTorch(CompatSuite):
    """Plain torch, by its own documented API."""

    driver = "torch"
    matrix = Matrix(
        strategies=("ddp", "fsdp1", "fsdp2"),
        extra=tuple(cell for cell in (*_MODELS, *_FULL) if not cell.strategy.startswith("zero")),
    )
    expect = (
        fails(
            "dtypes",
            strategy=("ddp", "fsdp1", "fsdp2"),
            precision="bf16_mixed",
            match=_NO_UPCAST,
            reason=(
                "torch shards parameters in the dtype they come in and never upcasts: "
                "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
            ),
        ),
    )


class TestAccelerate(CompatSuite):
    """accelerate, all six strategies."""

    driver = "accelerate"
    matrix = Matrix(extra=(*_MODELS, *_FULL))
    expect = (
        fails(
            "dtypes",
            strategy="ddp",
            precision="bf16_mixed",
            match=_NO_UPCAST,
            reason=(
                "accelerate upcasts for FSDP (https://github.com/huggingface/accelerate/pull/2674), not for DDP: "
                "the same model gets float32 masters under FSDP and ZeRO and bfloat16 ones under DDP"
            ),
        ),
        fails(
            "resume",
            strategy="fsdp1",
            state_dict="sharded",
            match=r"the optimizer's state is empty after the load",
            reason=(
                "load_fsdp_optimizer fills the state dict of a fresh FSDP1 optimizer, which is empty; "
                "mended for FSDP2 only: https://github.com/huggingface/accelerate/pull/3904"
            ),
        ),
    )

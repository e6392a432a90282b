"""``CompatSuite``, the class that an adopter inherits.

A test module of the adopter has a subclass of it. At collection ``plugin.suite`` recognises such
classes and makes one pytest item for each check in each cell: a *cell* is one point of the matrix,
such as ``fsdp2-bf16_upcast-w2``, a *check* one claim about it, such as ``names``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from pytest_distcompat.cell import Matrix
from pytest_distcompat.expect import Expectation


class CompatSuite:
    """Suite of compatibility tests: one pytest item for each check in each cell.

    A check runs in the cells where it can say something new.

    Inherit it and set its three attributes::

        class TestMyTrainer(CompatSuite):
            driver = "my_trainer.testing:Driver"
            matrix = Matrix(strategies=("ddp", "fsdp2"), precisions=("bf16_upcast",))
            expect = (fails("names", strategy="fsdp2", reason="org/repo#1"),)

    Items read ``TestMyTrainer::test[fsdp2-bf16_upcast-w2:names]``. Override nothing else, so that
    an upgrade brings new checks. To override ``test`` is an error at collection, and so is an
    expectation that covers no cell.
    """

    #: ``module:attribute`` of a pytest_distcompat.Driver, or the name of a built-in one.
    driver: ClassVar[str] = ""
    #: The cells that are expected to work.
    matrix: ClassVar[Matrix] = Matrix()
    #: Exceptions to that: ``fails(...)`` and ``refuses(...)``.
    expect: ClassVar[tuple[Expectation, ...]] = ()

    def test(self, distcompat_case: Callable[[], None]) -> None:
        """Run one check in one cell."""
        # The fixture of the plugin is the case of this item: it runs the check, and raises.
        distcompat_case()

"""Order in which FSDP2's units are gathered early."""

from __future__ import annotations

from pytest_distcompat.strategies.fsdp2 import Prefetch


class Unit:
    """Records what it is to gather early."""

    def set_modules_to_forward_prefetch(self, modules: list[Unit]) -> None:
        self.forward = modules

    def set_modules_to_backward_prefetch(self, modules: list[Unit]) -> None:
        self.backward = modules


def test_each_block_gathers_the_next_ones_of_its_pass() -> None:
    blocks = first, second, third = Unit(), Unit(), Unit()
    Prefetch(forward=2, backward=1).apply([*blocks])
    assert [unit.forward for unit in blocks] == [[second, third], [third], []]
    assert [unit.backward for unit in blocks] == [[], [first], [second]]

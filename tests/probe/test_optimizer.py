"""Is an optimizer of any kind read, and a scheduler of any maker?"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_distcompat.probe import read_optimizer
from pytest_distcompat.probe.optimizer import read_scheduler
from pytest_distcompat.probe.tensors import digest


def test_what_is_no_optimizer_is_told() -> None:
    model = torch.nn.Linear(2, 2)
    two = [torch.optim.SGD([model.weight]), torch.optim.AdamW([model.bias])]
    with pytest.raises(
        TypeError, match=r"^list has no param_groups: self\.optimizer of the driver is to be .*; of several, one$"
    ):
        read_optimizer(model, two)


class Own:
    """A schedule that somebody wrote himself."""

    def __init__(self, last_epoch: int) -> None:
        self.last_epoch = last_epoch


class NotYet(Own):
    """DeepSpeed's OneCycle does not tell before its first step."""

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def get_last_lr(self) -> list[float]:
        raise AssertionError("need to call step() first")


@pytest.mark.parametrize("kind", [Own, NotYet])
def test_a_scheduler_that_does_not_tell_its_learning_rate(kind: type[Own]) -> None:
    assert read_scheduler(kind(3)) == read_scheduler(kind(3)) != read_scheduler(kind(4))
    assert read_scheduler(kind(3)).startswith("last_epoch=3 ")


def test_state_in_eight_bits() -> None:
    of_8_bits = pytest.importorskip("torchao.optim.subclass_8bit").OptimState8bit
    states = [of_8_bits.zeros((64, 64), signed=True, block_size=256) for _ in range(2)]
    same, other = map(digest, states)
    assert same == other
    states[1].codes[0] = 3
    assert digest(states[1]) != same

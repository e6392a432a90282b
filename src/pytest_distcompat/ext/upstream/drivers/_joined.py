"""Several optimizers as one object, for libraries that take one only.

Option ``optimizer`` at ``muon`` of a cell trains with two optimizers: Muon for matrices and AdamW
for the rest. accelerate cannot save two, and Trainer takes one class. So their drivers, by which
they are tested, pass ``Joined``: one optimizer with the param groups and the state of both.

It is a module of its own because it imports torch, which pytest's process does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Joined(torch.optim.Optimizer):
    """Optimizer with the groups and the state of several, which step together."""

    def __init__(
        self, params: Iterable[Any], make: Callable[[Any], list[torch.optim.Optimizer]]
    ) -> None:
        """Make the optimizers by ``make(params)``.

        Args:
            params: Parameters or param groups.
            make: Returns the optimizers, each with some of them.
        """
        self.parts = make(list(params))
        groups = []
        for part in self.parts:
            groups += part.param_groups
        super().__init__(groups, {})
        self._share()

    def _share(self) -> None:
        """Give the optimizers the groups and the state of this object.

        Called again after a load, which replaces both in this object alone. The first groups are
        those of the first optimizer.
        """
        first = 0
        for part in self.parts:
            count = len(part.param_groups)
            part.param_groups = self.param_groups[first : first + count]
            part.state = self.state
            first += count

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take groups and state from a checkpoint."""
        super().__setstate__(state)
        self._share()

    def step(self, closure: Any = None) -> Any:
        """Step each of the optimizers."""
        loss = closure() if closure else None
        for part in self.parts:
            part.step()
        return loss

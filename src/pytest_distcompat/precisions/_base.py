"""What a precision is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Precision:
    """Dtypes by torch's names: what the user loads in, what the matrix products run in, what the optimizer works in.

    ``load`` is the dtype of the model as the trainer gets it; ``compute`` that of forward and backward; ``master`` that
    of the values the optimizer updates and of its state. A precision is mixed where compute and master differ; then
    the strategy says what it stores and reduces in.
    """

    name: str
    load: str
    compute: str
    master: str
    meaning: str
    order: int = 0

    @property
    def mixed(self) -> bool:
        """Whether the optimizer works in another dtype than the matrix products."""
        return self.compute != self.master

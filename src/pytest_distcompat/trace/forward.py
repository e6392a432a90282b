"""Records of a step's forward and backward pass: collectives, dropouts, weights of tokens.

``probe.observe.Observer`` records them while a trainer runs a step: collectives by a dispatch mode,
the rest by hooks on the model's modules and tensors. Examples: two ranks must drop different
activations, and each token that the loss counts must weigh the same on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The entry of ``Snapshot.recomputed`` for blocks that are recomputed re-entrantly without an input
#: that requires a gradient.
WITHOUT_GRADIENT = "without gradient"


@dataclass(frozen=True)
class CollectiveInfo:
    """The collectives of one kind inside a step: same operation, dtype and process group."""

    #: The operation's name in torch's dispatcher, without underscores at its ends: ``allreduce``.
    op: str
    #: The dtype of the tensors that are sent.
    dtype: str
    #: How many such tensors there were.
    calls: int
    #: The number of elements of the largest.
    numel: int
    #: The number of elements of all together.
    total: int = 0
    #: The ranks of the process group, in their order in the group; empty if it is unknown.
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class RowWeight:
    """How many tokens of one row of a batch are trained on, and what each of them weighs."""

    tokens: int
    #: The factor of one such token's cross-entropy in the loss that this rank differentiates: 0.25
    #: for the mean over 4 tokens.
    weight: float


@dataclass(frozen=True)
class TokenWeights:
    """Weights of the rows of one micro-batch; a row without tokens to train on is left out."""

    rows: tuple[RowWeight, ...]
    #: Whether the weights could be read. They cannot of a loss that is no cross-entropy, or that
    #: weighs the tokens of one row differently. Then there are no ``rows``.
    known: bool = False

    @property
    def tokens(self) -> int:
        """Return how many tokens are trained on."""
        return sum(row.tokens for row in self.rows)


@dataclass(frozen=True)
class DropoutInfo:
    """One forward pass of a module that drops activations."""

    #: The name of the module.
    name: str
    #: A digest (a hash, as text) of its input.
    input: str
    #: A digest of where it dropped elements.
    zeros: str

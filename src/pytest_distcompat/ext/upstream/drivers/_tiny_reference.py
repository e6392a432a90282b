"""The reference of the built-in drivers: the same training in one process, in float32.

The checks ``parity``, ``clipping`` and ``gradients`` compare the losses and gradient norms of the
ranks with this reference. A run of its own makes it, with one process: for the cell
``fsdp2-fp32-w2-model_mlp``, one configuration under test, it has the cell
``ddp-fp32-w1-model_mlp``. Its worker builds the model with ``build_model`` and calls ``reference``
for each step; ``build`` and ``step`` are not called. ``reference`` trains the model on the batches
of all ranks in turn. It uses no strategy and no library's loop.

The loss of a step is a weighted mean over the micro-batches of all ranks. A trainer's weights
follow from what counts alike in it (``mean``): each micro-batch, each token, or each rank. Batches
differ in their number of tokens, so that a trainer that averages in another way gets another loss.
``averages`` then says which mean would give it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pytest_distcompat.ext.upstream.drivers._tiny_training import TinyTraining, listed

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from pytest_distcompat.models import Batch


class TinyReference(TinyTraining):
    """Driver that can repeat its training in one process.

    ``tiny`` is the cell's model with its batches and its loss. ``accumulate`` is how many
    micro-batches each rank has in a full step, and ``micros(number)`` has the indices in the epoch
    of a step's micro-batches.

    Drivers override what differs in their library: ``reference_loss``, ``averaged_over``,
    ``ranks_added_up``, ``early_schedule_steps``.
    """

    #: An average of the weights; None without one.
    averaged_model: Any = None

    def _joined(self, index: int, ranks: int) -> Batch:
        """Return the rows of all ranks' micro-batches with that index as one batch."""
        import torch

        batches = [self.batch_of(index, rank) for rank in range(ranks)]
        joined = {}
        for name in batches[0]:
            joined[name] = torch.cat([batch[name] for batch in batches])
        return joined

    def loss(self, model: Module, number: int, rank: int) -> torch.Tensor:
        """Return the loss on a rank's micro-batch.

        ``number`` counts micro-batches from the beginning of the training; ``epoch`` is how many an
        epoch has. Walks, which call the live trainer in random order, train by this method.
        """
        return self.tiny.loss(model, self.batch_of(number % self.epoch, rank))

    def reference(self, model: Module, number: int, ranks: int) -> float:
        """Take one step on the batches of all ranks in turn, in float32, and return the loss.

        Args:
            model: The unwrapped model, in float32.
            number: The number of the step, from 0.
            ranks: How many data parallel ranks the compared run has.
        """
        # At the first step: no ``build`` has made it.
        if self.optimizer is None:
            self._build_reference(model)
        for optimizer in listed(self.optimizer):
            optimizer.zero_grad()
        batches = self._reference_batches(number, ranks)
        tokens = [self.tiny.count(batch) for batch in batches]
        shares = self._shares(tokens, ranks)
        losses = []
        total = 0.0
        for batch, (count, divisor) in zip(batches, shares, strict=True):
            loss = self.reference_loss(model, batch)
            # Multiplied, then divided, as trainers do that average over tokens: 30 / 42 is no
            # number of float32, and Adam makes much of what is rounded in a gradient near zero.
            share_of_loss = loss * count / divisor
            (share_of_loss * self.ranks_added_up(ranks)).backward()  # type: ignore[no-untyped-call]
            losses.append(float(loss.detach()))
            total += losses[-1] * count / divisor
        # ``one_batch``: the rows of all ranks are joined, and have no losses of ranks to average.
        if not self.tiny.one_batch:
            self.averages = _averages(losses, tokens, ranks, self.accumulate)
        self._clip_and_step(model, number)
        return total

    def _clip_and_step(self, model: Module, number: int) -> None:
        """Clip the gradients, note their norm, and step the optimizers and schedulers."""
        from torch.nn.utils import clip_grad_norm_

        # Without a largest norm nothing is clipped, and the norm is only measured.
        settings: dict[str, Any] = {"max_norm": self.max_norm or math.inf}
        settings = self.cell.with_settings("clip_grad_norm_", settings)
        self.grad_norm = float(clip_grad_norm_(model.parameters(), **settings))
        self._update_reference(model, number)

    def _build_reference(self, model: Module) -> None:
        """Make what ``build`` makes: optimizer, scheduler, and an average in a cell with one."""
        self.optimizer = self.make_optimizer(model)
        self.scheduler = self.make_scheduler(self.optimizer)
        if self.cell.option("ema"):
            self.averaged_model = self.make_average(model)

    def _update_reference(self, model: Module, number: int) -> None:
        """Step optimizer and scheduler of the reference, and update its average."""
        for scheduler in listed(self.scheduler):
            for _ in range(self.early_schedule_steps(number)):
                scheduler.step()
        for optimizer in listed(self.optimizer):
            optimizer.step()
        for scheduler in listed(self.scheduler):
            scheduler.step()
        if self.averaged_model is not None:
            self.update_average(model)

    def make_average(self, model: Module) -> Any:
        """Return an average of the weights, for a driver with option ``ema``."""
        raise NotImplementedError

    def update_average(self, model: Module) -> None:
        """Move ``averaged_model`` towards the weights of a model."""
        raise NotImplementedError

    def ranks_added_up(self, ranks: int) -> int:
        """Return the factor on the reference's gradients: 1 if the trainer averages over ranks.

        It is the number of ranks if the trainer sums gradients. DeepSpeed's JSON may say that.
        """
        reduction = self.setting_or_default("mean", "ds_config.gradient_allreduce_op")
        return ranks if reduction == "sum" else 1

    def early_schedule_steps(self, number: int) -> int:  # noqa: ARG002 - for those who override it
        """Return how often the reference steps its scheduler before the optimizer steps."""
        return 0

    def reference_loss(self, model: Module, batch: Batch) -> torch.Tensor:
        """Return the loss of one micro-batch in the reference, the mean over its tokens."""
        return self.tiny.loss(model, batch)

    @property
    def averaged_over(self) -> str:
        """Return what has equal weight in the reference: ``micro_batch``, ``token`` or ``rank``.

        It is the driver's ``mean``, if no setting of the cell says otherwise.
        """
        return self.mean

    def _shares(self, tokens: Sequence[int], ranks: int) -> list[tuple[int, int]]:
        """Return the share of each micro-batch in the loss of a step: (count, divisor).

        Two ranks with one micro-batch each, of 30 and 10 tokens: (1, 2) for each if micro-batches
        count alike, (30, 40) and (10, 40) if tokens do.

        Args:
            tokens: The number of tokens of each micro-batch, those of rank 0 first.
            ranks: The number of ranks.
        """
        if self.averaged_over == "token":
            return [(count, sum(tokens)) for count in tokens]
        if self.averaged_over == "rank":
            # Each token counts alike within a rank, and each rank alike.
            micros = len(tokens) // ranks
            shares = []
            for number, count in enumerate(tokens):
                # The index of the rank's first micro-batch.
                first = number // micros * micros
                tokens_of_rank = tokens[first : first + micros]
                shares.append((count, sum(tokens_of_rank) * ranks))
            return shares
        # A batch that has the rows of all ranks counts as one micro-batch of each.
        stands_for = ranks if self.tiny.one_batch else 1
        # The last step of an epoch has fewer micro-batches, and is divided by the full count too,
        # as in trainers that average micro-batches.
        return [(stands_for, self.accumulate * ranks)] * len(tokens)

    def _reference_batches(self, number: int, ranks: int) -> list[Batch]:
        """Return the micro-batches of a step, those of rank 0 first.

        For some models (``one_batch``: synchronised batch normalisation) the rows of all ranks are
        joined to one micro-batch instead.
        """
        indices = self.micros(number)
        if self.tiny.one_batch:
            return [self._joined(index, ranks) for index in indices]
        batches = []
        for rank in range(ranks):
            batches += [self.batch_of(index, rank) for index in indices]
        return batches


def _averages(
    losses: list[float], tokens: list[int], ranks: int, accumulate: int
) -> dict[str, float]:
    """Return the means that a trainer may take of losses, by what has equal weight in them.

    A finding about a wrong loss names the mean that it is equal to: "each token", for example.
    "missing" are the micro-batches that the short last step of an epoch lacks.

    Args:
        losses: The loss of each micro-batch, those of rank 0 first.
        tokens: The number of tokens of each.
        ranks: The number of ranks.
        accumulate: How many micro-batches a rank has in a full step.
    """
    micros = len(losses) // ranks
    rank_means = []
    for rank in range(ranks):
        own = slice(micros * rank, micros * (rank + 1))
        rank_means.append(_weighted_mean(losses[own], tokens[own]))
    micro_means = []
    for micro in range(micros):
        # The micro-batches with this number: one of each rank.
        of_all_ranks = slice(micro, None, micros)
        micro_means.append(_weighted_mean(losses[of_all_ranks], tokens[of_all_ranks]))
    return {
        "each token": _weighted_mean(losses, tokens),
        "each rank": sum(rank_means) / ranks,
        "each micro-batch": sum(losses) / len(losses),
        "each micro-batch, also those that are missing,": sum(losses) / (accumulate * ranks),
        "each micro-batch of all ranks together": sum(micro_means) / micros,
    }


def _weighted_mean(values: list[float], weights: list[int]) -> float:
    """Return the mean of values; 0 if all weights are."""
    products = [value * weight for value, weight in zip(values, weights, strict=True)]
    return sum(products) / max(1, sum(weights))

"""Inputs of an architecture by rule.

An argument's name says what it holds, the task what is learned, the config how large it is.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_distcompat.models import prompt_length

if TYPE_CHECKING:
    import torch

    from pytest_distcompat.models import Batch

#: Sizes of a batch: tokens that exist, tokens in a row, answers to choose from, classes, rows.
VOCABULARY, TOKENS, CHOICES, CLASSES, ROWS = 128, 16, 3, 5, 2
#: Samples of a row of sound, and frames of its spectrogram.
SAMPLES, FRAMES = 8000, 64
#: Tasks with a label for each token, and with one for each row. Outputs of other tasks learn fixed
#: targets.
LABELS_OF_TOKENS = r".*_lm|speech_seq_2_seq|image_text_to_text|token_classification"
OTHER_LABELS = r"ctc|(document_)?question_answering"
LABELS_OF_ROWS = (
    r"(sequence|image|video|audio)_classification|multiple_choice|next_sentence_prediction"
)


def batch_of(kind: type[Any], config: Any, task: str, step: int, rank: int) -> Batch:
    """Return two rows for a model class.

    How many tokens are trained on differs between ranks and between batches.

    Args:
        kind: The model class; its ``forward`` says which inputs it takes.
        config: Its config, which says how large they are.
        task: The task of transformers that the class is for, such as ``causal_lm``.
        step: Number of the training step.
        rank: Number of the rank; step and rank together are the seed.
    """
    inputs = _Inputs(config.to_dict(), task, seed=1000 * step + rank)
    arguments = inspect.signature(kind.forward).parameters
    # Causal language models of image and text learn from text alone.
    accepted = {"input_ids"} if task == "causal_lm" else set(arguments)
    batch = {}
    for name, make in inputs.makers().items():
        if name in accepted:
            batch[name] = make()
    if task == "ctc":
        batch["labels"] = inputs.integers(1, 30, 3)
    elif re.fullmatch(LABELS_OF_ROWS, task):
        batch["labels"] = inputs.labels_of_rows()
    elif re.fullmatch(LABELS_OF_TOKENS, task):
        prompt = prompt_length(step, rank)
        batch["labels"] = inputs.labels_of_tokens(batch.get("input_ids"), prompt)
    elif "decoder_input_ids" in arguments:
        batch["decoder_input_ids"] = inputs.tokens(TOKENS)
    return batch


class _Inputs:
    """Draws inputs of a model: the same numbers for the same seed in every process."""

    def __init__(self, fields: Mapping[str, Any], task: str, seed: int) -> None:
        import torch

        self.fields = fields
        self.task = task
        self.generator = torch.Generator().manual_seed(seed)
        side = self.size("image_size", 32)
        self.image = (self.size("num_channels", 3), side, side)
        self.images: tuple[int, ...] = ()
        if task.startswith("video"):
            self.images = (self.size("num_frames", 4),)
        elif task.endswith("matching"):
            self.images = (2,)
        self.vocabulary = min(VOCABULARY, self.size("vocab_size", VOCABULARY))
        self.mel_bins = self.size("num_mel_bins", self.size("feature_size", 16))
        self.spectrogram_frames = 0
        if self.size("num_mel_bins"):
            # With both of them a row of sound is a spectrogram.
            self.spectrogram_frames = self.size("max_length")
        self.channels = self.size("num_input_channels")

    def makers(self) -> dict[str, Callable[[], torch.Tensor]]:
        """Return what makes each argument of a forward, in the order in which they are drawn."""
        return {
            "input_ids": self.input_ids,
            "pixel_values": lambda: self.numbers(*self.images, *self.image),
            "input_values": self.input_values,
            "input_features": lambda: self.numbers(FRAMES, self.mel_bins),
            # From left, top to right, bottom.
            "bbox": lambda: self.integers(0, 64, TOKENS, 4).sort().values,
            "past_values": self.past_values,
            "start_positions": lambda: self.integers(0, TOKENS),
            "end_positions": lambda: self.integers(0, TOKENS),
        }

    def input_ids(self) -> torch.Tensor:
        """Return (rows, tokens), or (rows, choices, tokens) where an answer is chosen."""
        if self.task == "multiple_choice":
            return self.tokens(CHOICES, TOKENS)
        return self.tokens(TOKENS)

    def input_values(self) -> torch.Tensor:
        """Return sound: (rows, frames, mel bins) of a spectrogram, or (rows, samples)."""
        if self.spectrogram_frames:
            return self.numbers(self.spectrogram_frames, self.mel_bins)
        return self.numbers(SAMPLES)

    def past_values(self) -> torch.Tensor:
        """Return a series in time: (rows, steps), with several channels (rows, steps, channels)."""
        steps = self.size("context_length", 64)
        if self.channels:
            return self.numbers(steps, self.channels)
        return self.numbers(steps)

    def labels_of_rows(self) -> torch.Tensor:
        """Return a class for each row."""
        classes_of_task = {"multiple_choice": CHOICES, "next_sentence_prediction": 2}
        classes = classes_of_task.get(self.task, CLASSES)
        return self.integers(0, classes)

    def labels_of_tokens(self, input_ids: torch.Tensor | None, prompt: int) -> torch.Tensor:
        """Return a label for each token, -100 for those of the prompt: they are not trained on."""
        labels = self.tokens(TOKENS) if input_ids is None else input_ids.clone()
        if self.task == "token_classification":
            labels = labels % CLASSES
        labels[:, :prompt] = -100
        return labels

    def size(self, name: str, default: int = 0) -> int:
        """Return a size of the config, the first of a list; the default where it has none."""
        value = _field(self.fields, name)
        if value is None:
            return int(default)
        if isinstance(value, (list, tuple)):
            value = value[0]
        return int(value)

    def numbers(self, *shape: int) -> torch.Tensor:
        """Return normally distributed numbers of a shape, for each row."""
        import torch

        return torch.randn(ROWS, *shape, generator=self.generator)

    def integers(self, start: int, stop: int, *shape: int) -> torch.Tensor:
        """Return integers of a range, of a shape for each row."""
        import torch

        return torch.randint(start, stop, (ROWS, *shape), generator=self.generator)

    def tokens(self, *shape: int) -> torch.Tensor:
        """Return tokens of a shape, for each row.

        Not the first four of a vocabulary, which often have a meaning of their own.
        """
        return self.integers(4, self.vocabulary, *shape)


def _field(fields: Mapping[str, Any], name: str) -> Any:
    """Return the field of a config or of the first config in it that has one; None without."""
    value = fields.get(name)
    if value is not None:
        return value
    for part in fields.values():
        if isinstance(part, Mapping):
            value = _field(part, name)
            if value is not None:
                return value
    return None


def tensors(outputs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of numbers in the outputs of a model, but not its loss."""
    if isinstance(outputs, Mapping):
        for name, value in outputs.items():
            if name != "loss":
                yield from tensors(value)
    elif isinstance(outputs, (list, tuple)):
        for value in outputs:
            yield from tensors(value)
    elif hasattr(outputs, "is_floating_point") and outputs.is_floating_point() and outputs.dim():
        yield outputs


def loss_to_targets(outputs: Any) -> torch.Tensor:
    """Return the loss of the outputs to fixed targets.

    The outputs are bounded, since some are masked with infinite ones. The targets go beyond these
    bounds: a loss that nears 0 would show rounding only.
    """
    import torch

    losses = []
    for output in tensors(outputs):
        if not output.requires_grad:
            continue
        bounded = output.float().tanh()
        # The same targets for each row.
        row = bounded[0]
        targets = torch.linspace(-4, 4, row.numel(), device=row.device)
        differences = bounded - targets.view_as(row)
        losses.append(differences.square().mean())
    return torch.stack(losses).sum()

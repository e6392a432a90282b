"""Batches for any architecture of transformers, drawn by rules.

``_architectures.py`` makes tiny models of transformers' classes; on each rank it calls
``batch_of(kind, config, task, step, rank)`` for a batch of two rows, such as
``{"input_ids": (2, 16), "labels": (2, 16)}`` for a causal language model. An argument's name says
what it holds (``pixel_values``: an image), the task what is learned (``token_classification``: a
label for each token), the config how large it is (``image_size``).

The same step and rank give the same batch in every process, so that the reference, one process, can
train on the batches of all ranks. A model that returns no loss for its task learns fixed targets:
``loss_to_targets``.
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
#: Samples of a row of sound as a wave, and frames of one as a spectrogram.
SAMPLES, FRAMES = 8000, 64
# Patterns of the tasks with labels, as transformers names tasks in its auto classes. Outputs of
# other tasks learn fixed targets.

#: Tasks with a label for each token.
LABELS_OF_TOKENS = r".*_lm|speech_seq_2_seq|image_text_to_text|token_classification"
#: Tasks with labels of another kind: a text for a row of sound, the place of an answer.
OTHER_LABELS = r"ctc|(document_)?question_answering"
#: Tasks with a label for each row.
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
    # In a fixed order: all draw from one generator.
    for name, make in inputs.makers().items():
        if name in accepted:
            batch[name] = make()
    if task == "ctc":
        # A text of three letters for each row of sound.
        batch["labels"] = inputs.integers(1, 30, 3)
    elif re.fullmatch(LABELS_OF_ROWS, task):
        batch["labels"] = inputs.labels_of_rows()
    elif re.fullmatch(LABELS_OF_TOKENS, task):
        prompt = prompt_length(step, rank)
        batch["labels"] = inputs.labels_of_tokens(batch.get("input_ids"), prompt)
    elif "decoder_input_ids" in arguments:
        # Without labels the decoder's input is not made of them.
        batch["decoder_input_ids"] = inputs.tokens(TOKENS)
    return batch


class _Inputs:
    """Draws inputs of a model: the same numbers for the same seed in every process.

    Attributes:
        fields: The config as a dictionary.
        task: The task, such as ``causal_lm``.
        generator: The source of all numbers.
        image: Shape of an image: (channels, height, width).
        images: How many images a row has, in front of that shape: (frames,) of a video, (2,) of a
            pair to match, () for one.
        vocabulary: How many tokens there are.
        mel_bins: Numbers in a frame of a spectrogram.
        spectrogram_frames: Frames of a spectrogram; 0 if sound is a wave.
        channels: Series in a row of a time series; 0 for one without a dimension for it.
    """

    def __init__(self, fields: Mapping[str, Any], task: str, seed: int) -> None:
        import torch

        self.fields = fields
        self.task = task
        self.generator = torch.Generator().manual_seed(seed)
        # The methods below read ``fields`` and ``generator``.
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
        """Return argument of a forward -> the function that draws it, in the order of drawing."""
        return {
            "input_ids": self.input_ids,
            "pixel_values": lambda: self.numbers(*self.images, *self.image),
            "input_values": self.input_values,
            "input_features": lambda: self.numbers(FRAMES, self.mel_bins),
            # Boxes in a page: sorted numbers are left, top, right, bottom.
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
    """Return the field of a config, or of the first config within it that has one; else None."""
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
    """Yield the tensors of floating-point numbers in a model's outputs, but not its loss.

    Outputs may be nested mappings, lists and tuples. A tensor without a dimension is left out.
    """
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
    """Return the mean square of the differences between outputs and fixed targets, summed.

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

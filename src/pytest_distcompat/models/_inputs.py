"""Inputs of an architecture by rule: an argument's name says what it holds, the task what is learned, the config how large."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pytest_distcompat.models._base import Batch

VOCABULARY, TOKENS, CHOICES, CLASSES, ROWS = 128, 16, 3, 5, 2
#: Tasks with a label for each token, and with one for each row. Outputs of other tasks learn fixed targets.
LABELS_OF_TOKENS = r".*_lm|speech_seq_2_seq|image_text_to_text|token_classification"
OTHER_LABELS = r"ctc|(document_)?question_answering"
LABELS_OF_ROWS = r"(sequence|image|video|audio)_classification|multiple_choice|next_sentence_prediction"


def batch_of(kind: type[Any], config: Any, task: str, step: int, rank: int) -> Batch:
    """Return two rows for a model class; how many tokens are trained on differs between ranks and between batches."""
    import torch

    generator = torch.Generator().manual_seed(1000 * step + rank)
    fields, arguments = config.to_dict(), inspect.signature(kind.forward).parameters

    def size(name: str, default: int = 0) -> int:
        value = _field(fields, name)
        return int(value[0] if isinstance(value, (list, tuple)) else default if value is None else value)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(ROWS, *shape, generator=generator)

    def drawn(start: int, stop: int, *shape: int) -> torch.Tensor:
        return torch.randint(start, stop, (ROWS, *shape), generator=generator)

    several = (size("num_frames", 4),) if task.startswith("video") else (2,) if task.endswith("matching") else ()
    image = (size("num_channels", 3), *(size("image_size", 32),) * 2)
    words, mels = min(VOCABULARY, size("vocab_size", VOCABULARY)), size("num_mel_bins", size("feature_size", 16))
    spectrogram = size("num_mel_bins") and size("max_length")
    series = (size("num_input_channels"),) if size("num_input_channels") else ()
    makers: dict[str, Callable[[], torch.Tensor]] = {
        "input_ids": lambda: drawn(4, words, *(CHOICES,) * (task == "multiple_choice"), TOKENS),
        "pixel_values": lambda: numbers(*several, *image),
        "input_values": lambda: numbers(size("max_length"), mels) if spectrogram else numbers(8000),
        "input_features": lambda: numbers(64, mels),
        # From left, top to right, bottom.
        "bbox": lambda: drawn(0, 64, TOKENS, 4).sort().values,
        "past_values": lambda: numbers(size("context_length", 64), *series),
        "start_positions": lambda: drawn(0, TOKENS),
        "end_positions": lambda: drawn(0, TOKENS),
    }
    # Causal language models of image and text learn from text alone.
    given = makers.keys() & ({"input_ids"} if task == "causal_lm" else arguments.keys())
    found = {name: make() for name, make in makers.items() if name in given}
    if task == "ctc":
        found["labels"] = drawn(1, 30, 3)
    elif re.fullmatch(LABELS_OF_ROWS, task):
        found["labels"] = drawn(0, {"multiple_choice": CHOICES, "next_sentence_prediction": 2}.get(task, CLASSES))
    elif re.fullmatch(LABELS_OF_TOKENS, task):
        labels = found["input_ids"].clone() if "input_ids" in found else drawn(4, words, TOKENS)
        labels = labels % CLASSES if task == "token_classification" else labels
        labels[:, : (0, 13, 6, 10, 3)[(step + 2 * rank) % 5]] = -100
        found["labels"] = labels
    elif "decoder_input_ids" in arguments:
        found["decoder_input_ids"] = drawn(4, words, TOKENS)
    return found


def _field(fields: Mapping[str, Any], name: str) -> Any:
    """Return the field of a config or of the first config in it that has one; None without."""
    inner = (_field(value, name) for value in fields.values() if isinstance(value, Mapping))
    own = fields.get(name)
    return own if own is not None else next((value for value in inner if value is not None), None)


def tensors(outputs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of numbers in the outputs of a model, but not its loss."""
    if isinstance(outputs, Mapping):
        yield from tensors([value for name, value in outputs.items() if name != "loss"])
    elif isinstance(outputs, (list, tuple)):
        for value in outputs:
            yield from tensors(value)
    elif (
        outputs is not None and hasattr(outputs, "is_floating_point") and outputs.is_floating_point() and outputs.dim()
    ):
        yield outputs


def loss_to_targets(outputs: Any) -> torch.Tensor:
    """Return the loss of the outputs to fixed targets.

    The outputs are bounded, since some are masked with infinite ones. The targets go beyond these bounds: a loss that nears 0
    would show rounding only.
    """
    import torch

    found = [one.float().tanh() for one in tensors(outputs) if one.requires_grad]
    fixed = (torch.linspace(-4, 4, one[0].numel(), device=one.device).view_as(one[0]) for one in found)
    return torch.stack([(one - to).square().mean() for one, to in zip(found, fixed, strict=True)]).sum()

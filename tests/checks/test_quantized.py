"""Checks of optimizer state in 8 bits, on hand-made traces."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.checks.traces import Sound, Story

CELL = "fsdp2-fp32-w2-model_wide-optimizer_adam8bit"


def quantized(sound: Sound, dtype: str, nbytes: int, numel: int = 4096) -> Story:
    story = sound(CELL)
    for key in ("exp_avg", "exp_avg_sq"):
        large = {"dtype": dtype, "numel": numel, "nbytes": nbytes}
        story = story.state(key, large, only="outlet.weight", action="step", nth=2)
    return story


def test_large_state_in_8_bits_and_small_state_in_float32(sound: Sound) -> None:
    story = quantized(sound, "uint8", 4096 + 64 + 1024)
    assert story.findings("dtypes") == []


@pytest.mark.parametrize(("dtype", "numel", "where"), [("float32", 4096, ""), ("uint8", 4097, "small ")])
def test_state_in_the_other_dtype(sound: Sound, dtype: str, numel: int, where: str) -> None:
    story = quantized(sound, "uint8", 5184).state(
        "exp_avg", {"dtype": dtype, "numel": numel}, only="outlet.weight", action="step", nth=2, rank=1
    )
    held_dtypes, expected = ("float32 and uint8", "float32") if where else ("float32", "uint8")
    assert story.findings("dtypes") == [f"rank 1: {where}exp_avg is kept in {held_dtypes}; expected {expected}"]


def test_a_cell_in_which_nothing_is_large_enough(sound: Sound) -> None:
    assert sound(CELL).findings("dtypes") == [
        "rank 0: no state is large enough to be quantized",
        "rank 1: no state is large enough to be quantized",
    ]


def test_bytes_beside_the_codes(sound: Sound) -> None:
    story = quantized(sound, "uint8", 4096 * 5)
    message = "8192 elements of quantized state take 40960 bytes; expected less than 2 each"
    assert findings_on_quantized(story) == [f"rank 0: {message}", f"rank 1: {message}"]
    smaller = quantized(sound, "uint8", 5184)
    assert findings_on_quantized(smaller) == []


def findings_on_quantized(story: Story) -> list[str]:
    return [text for text in story.findings("memory") if "quantized" in text]

"""Case E: what float32 masters of a bfloat16 model cost in memory, over 2, 4 and 8 ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.cost import tensor_bytes
from pytest_distcompat.drivers import find_driver
from pytest_distcompat.engine import local_runner
from pytest_distcompat.scenario import Run, Scenario
from pytest_distcompat.trace import RunTrace

pytestmark = [pytest.mark.spawn, pytest.mark.nightly]

SHORT = Scenario("short", (Run("train", ("build_model", "build", "step", "step", "step")),))
RANKS = (2, 4, 8)


def gathered(run: RunTrace) -> int:
    """Return the elements of the largest unit, which each rank gathers in bfloat16 with or without the upcast."""
    assert run.unwrapped is not None
    layers = [info for info in run.unwrapped.parameters if info.name.startswith("model.layers.0.")]
    others = [info for info in run.unwrapped.parameters if "layers." not in info.name]
    return max(sum(math.prod(info.shape) for info in unit) for unit in (layers, others))


def test_up_to_twice_over_few_ranks_and_less_over_many(tmp_path: Path) -> None:
    """https://huggingface.co/blog/deepspeed-to-fsdp-and-back: parameters, gradients and two moments, of 4 bytes or of 2."""
    cells = {
        (name, ranks): Cell.parse(f"fsdp2-{name}-w{ranks}") for name in ("bf16_upcast", "bf16_pure") for ranks in RANKS
    }
    with local_runner(find_driver("accelerate"), [*cells.values()], device="cpu", store=tmp_path) as runner:
        runs = {key: runner.trace("accelerate", cell, SHORT).run() for key, cell in cells.items()}
    ratios = []
    for ranks in RANKS:
        peaks = []
        for name, width in (("bf16_upcast", 16), ("bf16_pure", 8)):
            run = runs[name, ranks]
            assert run.end is None
            assert run.unwrapped is not None
            size, bytes_by_rank = sum(math.prod(info.shape) for info in run.unwrapped.parameters), tensor_bytes(run)
            # On all ranks together nothing is padded: FSDP2's shards are uneven.
            assert sum(map(sum, bytes_by_rank.values())) == width * size
            largest = max(map(sum, zip(*bytes_by_rank.values(), strict=True)))
            assert largest == pytest.approx(width * size / ranks, rel=0.05)
            peaks.append(largest + 2 * gathered(run))
        ratios.append(peaks[0] / peaks[1])
    assert 2 > ratios[0] > ratios[1] > ratios[2] > 1

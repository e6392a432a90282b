"""Arguments of torch's own calls as settings: which there are, and that the reference follows those of clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.ext.upstream.drivers.torch import TorchDriver
from pytest_distcompat.ext.upstream.sweep.rules import settings_of
from pytest_distcompat.scenario import FOLLOWED

if TYPE_CHECKING:
    from pytest_distcompat.ext.upstream.sweep.rules import Setting

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def settings() -> dict[str, Setting]:
    """The settings of the torch driver, by name."""
    return {setting.name: setting for setting in settings_of(TorchDriver.sources)}


def test_arguments_of_torchs_calls_are_swept(settings: dict[str, Setting]) -> None:
    assert settings["clip_grad_norm_.norm_type"].values == ("1.0", "3.0", "Infinity")
    assert settings["checkpoint.preserve_rng_state"].values == ("false",)
    assert settings["DefaultSavePlanner.dedup_save_to_lowest_rank"].values == ("true",)
    assert "resume" in settings["FileSystemWriter.single_file_per_rank"].checks
    assert settings["StateDictOptions.broadcast_from_rank0"].options["state_dict"] == "full"
    assert settings["fully_shard.shard_placement_fn"].state == "hinted"


def test_the_reference_follows_how_gradients_are_clipped() -> None:
    assert "clip_grad_norm_" in FOLLOWED


def test_a_parameter_is_sharded_on_its_last_dimension() -> None:
    import torch
    from torch.distributed.tensor import Shard

    from pytest_distcompat.strategies.fsdp2 import on_last_dimension

    assert on_last_dimension(torch.nn.Parameter(torch.zeros(3, 8))) == Shard(1)
    assert on_last_dimension(torch.nn.Parameter(torch.zeros(3, 7))) is None
    assert on_last_dimension(torch.nn.Parameter(torch.zeros(8))) is None

"""Scripts on ranks that share a GPU; the GPUs are made up."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pytest_distcompat.ext.scripts import launch
from pytest_distcompat.ext.scripts.launching import Host
from pytest_distcompat.launch import nccl
from pytest_distcompat.lease import Inventory, Pool

from .conftest import PROGRAMS


@pytest.mark.spawn
@pytest.mark.parametrize(
    ("gpus", "runs_share", "variable", "devices"),
    [
        (("GPU-a",), False, "1", ["0", "0"]),
        (("GPU-a", "GPU-b"), False, None, ["0", "1"]),
        (("GPU-a", "GPU-b"), True, None, ["0", "1"]),
    ],
    ids=["shared", "one each", "one each beside other runs"],
)
def test_ranks_of_a_script_that_share_a_gpu_find_it(
    *,
    gpus: tuple[str, ...],
    runs_share: bool,
    variable: str | None,
    devices: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With LOCAL_RANK of torchrun rank 1 would use a second GPU, and NCCL would refuse it on the first."""
    monkeypatch.setattr(nccl, "environment_of_shared_ranks", lambda: {"NCCL_MULTI_RANK_GPU_ENABLE": "1"})
    pool = Pool(tmp_path / "leases", Inventory("gpu", gpus, 2, runs_share), memory=lambda ids: {})
    host = Host("cuda", 2, pool, timeout=60.0, directory=tmp_path / "runs")
    launch(PROGRAMS / "prints_device.py", tmp_path, watch_steps=0, host=host)
    ranks = [json.loads((tmp_path / rank).read_text(encoding="utf-8")) for rank in ("0", "1")]
    assert [rank["LOCAL_RANK"] for rank in ranks] == devices
    assert {rank["CUDA_VISIBLE_DEVICES"] for rank in ranks} == {",".join(gpus)}
    assert {rank["NCCL_MULTI_RANK_GPU_ENABLE"] for rank in ranks} == {variable}
    assert [rank["divides"] for rank in ranks] == [int(len(gpus) == 1 or runs_share)] * 2
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in os.environ

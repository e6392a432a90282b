"""How a GPU multiplies, as the flags of torch say it; they can be read without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_distcompat.probe.snapshot import read_products


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Flags in place of those of ``torch.backends``, which a test would leave changed."""
    flags = SimpleNamespace(cuda=SimpleNamespace(), cudnn=SimpleNamespace())
    monkeypatch.setattr(torch, "backends", flags)
    return flags


def test_without_a_gpu_nothing_is_said() -> None:
    assert read_products("cpu") == {}


def test_the_flags_of_the_installed_torch_are_read() -> None:
    assert read_products("cuda:0")["matmul"] in {"ieee", "tf32"}


@pytest.mark.parametrize(("flag", "expected"), [("none", "ieee"), ("ieee", "ieee"), ("tf32", "tf32")])
def test_precisions_have_names(backends: Any, flag: str, expected: str) -> None:
    backends.cuda.matmul = SimpleNamespace(fp32_precision=flag)
    backends.cudnn.conv = SimpleNamespace(fp32_precision="tf32")
    assert read_products("cuda:0") == {"matmul": expected, "conv": "tf32"}


@pytest.mark.parametrize(("flag", "expected"), [(False, "ieee"), (True, "tf32")])
def test_in_older_releases_they_have_none(backends: Any, flag: bool, expected: str) -> None:
    backends.cuda.matmul = SimpleNamespace(allow_tf32=flag)
    backends.cudnn.allow_tf32 = True
    assert read_products("cuda:1") == {"matmul": expected, "conv": "tf32"}


def test_autocast_that_is_on_between_steps(backends: Any) -> None:
    backends.cuda.matmul = SimpleNamespace(fp32_precision="ieee")
    backends.cudnn.conv = SimpleNamespace(fp32_precision="ieee")
    torch.set_autocast_enabled("cuda", True)
    try:
        assert read_products("cuda:0")["autocast"] == "float16"
    finally:
        torch.set_autocast_enabled("cuda", False)

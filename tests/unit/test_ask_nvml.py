"""Libraries that query the GPU at import give a fork server no CUDA context."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from pytest_distcompat import clock
from pytest_distcompat.launch import preload

torch = pytest.importorskip("torch")
triton = pytest.importorskip("torch.utils._triton")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of compute capability 9.0 that may not be touched, and Triton's package."""

    def touch(*_: object) -> None:
        raise AssertionError("this initialises CUDA")

    def has_triton() -> bool:
        # A torch for the CPU does not get as far, and the answer may be in its cache.
        torch.cuda.current_device()
        return True

    assert callable(triton.has_triton)
    monkeypatch.setattr(triton, "has_triton", has_triton)
    monkeypatch.setattr(triton, "has_triton_package", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", touch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", torch.cuda.get_device_capability)
    monkeypatch.setattr(preload, "compute_capability", lambda: (9, 0))


def test_nvml_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    preload.ask_nvml_instead_of_cuda()
    assert torch.cuda.get_device_capability() == (9, 0)
    assert triton.has_triton() is True
    monkeypatch.setattr(preload, "compute_capability", lambda: (6, 1))
    assert triton.has_triton() is False
    monkeypatch.setattr(preload, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(triton, "has_triton_package", lambda: False)
    assert triton.has_triton() is False


@pytest.mark.parametrize("question", ["a GPU that NVML does not know", "another GPU"])
def test_torch_answers_the_rest(question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if question != "another GPU":
        monkeypatch.setattr(preload, "compute_capability", lambda: None)
    preload.ask_nvml_instead_of_cuda()
    with pytest.raises(AssertionError, match="initialises CUDA"):
        torch.cuda.get_device_capability(*([1] if question == "another GPU" else []))


def test_torch_answers_once_cuda_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(preload, "compute_capability", lambda: (6, 0))
    preload.ask_nvml_instead_of_cuda()
    assert triton.has_triton() is True


@pytest.mark.parametrize(("device", "calls"), [("cuda", [(9, 0), True]), ("cpu", [])])
def test_fork_servers_for_gpus_ask_nvml(
    device: str, calls: list[Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asks_at_import.py").write_text(
        "import torch\nfrom torch.utils._triton import has_triton\nfound = [torch.cuda.get_device_capability(), has_triton()]\n"
    )
    # Nothing else is imported here, and this process's objects are not frozen.
    monkeypatch.setattr(preload, "MODULES_OF_EVERY_RANK", ())
    monkeypatch.setattr(preload, "settle", lambda device: None)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    warmth = {"path": list(sys.path), "modules": ["asks_at_import"], "device": device}
    try:
        preload.import_libraries(warmth, dump_at=clock.now() + 600)
        assert ("asks_at_import" in sys.modules) is bool(calls)
        if calls:
            assert sys.modules["asks_at_import"].found == calls
    finally:
        sys.modules.pop("asks_at_import", None)

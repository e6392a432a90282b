"""Libraries that query the GPU at import give a fork server neither a CUDA context nor the thread of NVML."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat import clock, devices
from pytest_distcompat.devices import GpuFacts
from pytest_distcompat.launch import preload, without_cuda
from pytest_distcompat.launch.launcher_process import LauncherProcess
from pytest_distcompat.launch.request import Warmth

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
    monkeypatch.setattr(torch.cuda, "device_count", touch)
    monkeypatch.setattr(torch.cuda, "is_available", touch)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(devices, "_preset", None)
    monkeypatch.setattr(devices, "_preset_process", 0)


class ClosedNvml(types.ModuleType):
    """NVML as a fork server may not open it: ``opened`` has the processes that did."""

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.opened = list[int]()
        self.nvmlInit: Any = lambda: self.opened.append(os.getpid())
        self.nvmlShutdown: Any = self.opened.pop
        self.nvmlDeviceGetCount: Any = lambda: 2 if self.opened else pytest.fail("NVML is not initialised")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> ClosedNvml:
    made = ClosedNvml()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


#: Notes each process that opens it.
ON_THE_PATH = """
import os
class NVMLError(Exception): pass
def nvmlInit():
    with open(os.environ["NVML_OPENED"], "a") as file:
        file.write(f"{os.getpid()}\\n")
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(index): return ("GPU-a", "GPU-b")[index]
def nvmlDeviceGetHandleByUUID(uuid): return uuid
def nvmlDeviceGetUUID(handle): return handle
def nvmlDeviceGetMigMode(handle): raise NVMLError
def nvmlDeviceGetCudaComputeCapability(handle): return [9, 0]
def nvmlDeviceGetComputeRunningProcesses(handle): return []
class Memory: used = 0
def nvmlDeviceGetMemoryInfo(handle): return Memory
"""


@pytest.mark.spawn
def test_libraries_open_no_nvml_in_a_launcher_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pynvml.py").write_text(ON_THE_PATH)
    (tmp_path / "asks.py").write_text(
        "from torch.utils._triton import has_triton\nimport pathlib, pynvml, torch\nimport deepspeed\n"
        "assert deepspeed.accelerator.get_accelerator()._name == 'cuda'\n"
        f"pathlib.Path({str(tmp_path / 'answer')!r}).write_text(str(torch.cuda.get_device_capability()))\n"
    )
    opened = tmp_path / "opened"
    monkeypatch.setenv("NVML_OPENED", str(opened))
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    process = LauncherProcess(Warmth(modules=("torchao", "peft", "asks"), path=(str(tmp_path),)), "cuda")
    try:
        assert process.get_warm() == ""
        log = "".join(file.read_text() for file in process.directory.glob("*log*"))
    finally:
        process.close()
        sys.modules.pop("pynvml", None)
    assert (tmp_path / "answer").exists(), log
    assert (tmp_path / "answer").read_text() == "(9, 0)"
    assert set(opened.read_text().split()) == {str(os.getpid())}


@pytest.mark.spawn
def test_no_fork_server_opens_nvml_for_the_tests_that_it_collects(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytest's own options ask for the number of GPUs, in the fork servers too, where the default world size needs it."""
    opened = pytester.path / "opened"
    monkeypatch.setenv("NVML_OPENED", str(opened))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PYTHONPATH", f"{pytester.path}:{os.environ.get('PYTHONPATH', '')}")
    (pytester.path / "pynvml.py").write_text(ON_THE_PATH)
    pytester.makepyfile(
        test_marked="""
        import os
        import pytest

        @pytest.mark.distcompat(world_size=1)
        def test_parent():
            raise AssertionError(f"rank of {os.getppid()}")
        """
    )
    result = pytester.runpytest_subprocess("--distcompat-gpus=2", "--distcompat-ranks-per-gpu=1")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*rank of *"])
    assert len(set(opened.read_text().split())) == 1


def test_a_process_goes_by_what_it_was_told_and_those_forked_from_it_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "visible_ids", lambda: ["GPU-a"])
    devices.set_gpu_facts(GpuFacts(2, (9, 0)))
    assert devices.visible_gpus() == 2
    assert devices.compute_capability() == (9, 0)
    monkeypatch.setattr(devices, "_preset_process", os.getpid() + 1)
    assert devices.visible_gpus() == 1


HOPPER = GpuFacts(2, (9, 0))


def test_what_the_parent_knows_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    without_cuda.answer_without_cuda(HOPPER)
    assert torch.cuda.get_device_capability() == torch.cuda.get_device_capability(device=None) == (9, 0)
    assert torch.cuda.device_count() == 2
    assert torch.cuda.is_available() is True
    assert triton.has_triton() is True
    monkeypatch.setattr(triton, "has_triton_package", lambda: False)
    assert triton.has_triton() is False


def test_an_old_gpu_has_no_triton() -> None:
    without_cuda.answer_without_cuda(GpuFacts(1, (6, 1)))
    assert triton.has_triton() is False


@pytest.mark.parametrize("question", ["a GPU that NVML does not know", "another GPU"])
def test_torch_answers_the_rest(question: str) -> None:
    without_cuda.answer_without_cuda(HOPPER if question == "another GPU" else GpuFacts(1, None))
    with pytest.raises(AssertionError, match="initialises CUDA"):
        torch.cuda.get_device_capability(*([1] if question == "another GPU" else []))


def test_torch_answers_once_cuda_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    without_cuda.answer_without_cuda(GpuFacts(1, (6, 0)))
    assert triton.has_triton() is True


def test_torch_answers_in_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    without_cuda.answer_without_cuda(HOPPER)
    monkeypatch.setattr(devices, "_preset_process", os.getpid() + 1)
    for question in (torch.cuda.device_count, torch.cuda.is_available, torch.cuda.get_device_capability):
        with pytest.raises(AssertionError, match="initialises CUDA"):
            question()


def test_nvml_is_opened_when_a_device_is_asked_for(nvml: ClosedNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.set_gpu_facts(HOPPER)
    without_cuda.postpone_nvml()
    nvml.nvmlInit()
    nvml.nvmlInit()
    nvml.nvmlShutdown()
    assert not nvml.opened
    # In a rank.
    monkeypatch.setattr(devices, "_preset_process", 0)
    assert nvml.nvmlDeviceGetCount() == 2
    assert len(nvml.opened) == 1
    nvml.nvmlInit()
    assert len(nvml.opened) == 2


@pytest.mark.parametrize(("device", "expected"), [("cuda", [(9, 0), True, 2, True]), ("cpu", [])])
def test_a_fork_server_opens_no_nvml(
    device: str, expected: list[Any], tmp_path: Any, nvml: ClosedNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asks_at_import.py").write_text(
        "import pynvml, torch\nfrom torch.utils._triton import has_triton\npynvml.nvmlInit()\n"
        "found = [torch.cuda.get_device_capability(), has_triton(), torch.cuda.device_count(), torch.cuda.is_available()]\n"
    )
    # Nothing else is imported here, and this process's objects are not frozen.
    monkeypatch.setattr(preload, "MODULES_OF_EVERY_RANK", ())
    monkeypatch.setattr(preload, "settle", lambda device: None)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    warmth: dict[str, Any] = {"path": list(sys.path), "modules": ["asks_at_import"], "device": device}
    warmth |= {"gpus": {"count": 2, "capability": [9, 0]}, "nccl": []}
    try:
        preload.import_libraries(warmth, dump_at=clock.now() + 600)
        assert ("asks_at_import" in sys.modules) is bool(expected)
        if expected:
            assert sys.modules["asks_at_import"].found == expected
            assert not nvml.opened
    finally:
        sys.modules.pop("asks_at_import", None)

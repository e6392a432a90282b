"""How many GPUs: what is asked for and is not there is an error; what a cell needs and is not there is shown."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat import devices
from pytest_distcompat.lease import Inventory, Pool, gpus

if TYPE_CHECKING:
    from tests.plugin.conftest import FakeRanks

UUIDS = ["GPU-aaaa0000-1", "GPU-bbbb1111-2", "GPU-cccc2222-3"]
MARKED = "import pytest\n@pytest.mark.distcompat{}\ndef test(): pass"


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_uuids", lambda: UUIDS)


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        ("0", 1),
        ("0,1", 2),
        (" 2 , 0 ", 2),
        ("", 0),
        ("-1", 0),
        ("0,-1,1", 1),  # CUDA stops at the first that names nothing
        ("0,3,1", 1),
        ("none", 0),
        ("GPU-aaaa0000-1,GPU-cccc2222-3", 2),
        ("GPU-bbbb", 1),
        ("GPU-dddd,0", 0),
        ("0,GPU-bbbb", 2),
        ("0,0", 0),  # named twice: CUDA shows none
        ("0,GPU-aaaa", 0),
        ("MIG-1f2e3d4c", 1),
        ("MIG-GPU-aaaa0000-1/3/0,MIG-GPU-aaaa0000-1/4/0", 2),
    ],
)
def test_visible_devices_are_counted_as_cuda_counts_them(wanted: str, count: int) -> None:
    assert len(devices.names_visible(wanted, UUIDS)) == count


GPU_A, GPU_B, GPU_C = UUIDS
INSTANCES = [
    devices.MigInstance(GPU_B, "MIG-5b0a", f"MIG-{GPU_B}/3/0"),
    devices.MigInstance(GPU_B, "MIG-5c1b", f"MIG-{GPU_B}/4/0"),
]


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (None, [GPU_A, "MIG-5b0a", GPU_C]),  # of a GPU in MIG mode CUDA shows the first instance
        ("1", ["MIG-5b0a"]),
        ("GPU-bbbb,0", ["MIG-5b0a", GPU_A]),
        ("MIG-5c1b", ["MIG-5c1b"]),
        ("MIG-5c", ["MIG-5c1b"]),
        (f"MIG-{GPU_B}/4/0,MIG-{GPU_B}/3/0", ["MIG-5c1b", "MIG-5b0a"]),
        (f"MIG-{GPU_B}/3/0,MIG-5b0a", []),  # one instance by both of its names
        ("1,MIG-5b0a", []),
        ("MIG-ffff", ["MIG-ffff"]),
        ("GPU-,0", []),  # begins the name of each, and so names none
        ("2,GPU-", [GPU_C]),
    ],
)
def test_however_a_device_is_named_it_has_one_id(wanted: str | None, names: list[str]) -> None:
    assert devices.names_visible(wanted, UUIDS, INSTANCES) == names


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (None, [GPU_A, GPU_C]),
        ("0,2", [GPU_A, GPU_C]),
        ("2", [GPU_C]),
        ("0,1,2", [GPU_A]),
        ("1", []),
        ("GPU-c", [GPU_C]),
    ],
)
def test_a_lost_gpu_keeps_its_place_and_has_no_name(wanted: str | None, names: list[str]) -> None:
    assert devices.names_visible(wanted, [GPU_A, "", GPU_C]) == names


class MadeUpNvml(types.ModuleType):
    """Two GPUs, the second in MIG mode with room for three instances, the second of which was destroyed."""

    class NVMLError(Exception):
        """Error that pynvml raises."""

    shut_down = 0

    def nvmlInit(self) -> None:  # noqa: N802 - its name
        pass

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.shut_down += 1

    def __init__(self) -> None:
        super().__init__("pynvml")
        used = {GPU_A: 100, GPU_B: 200, "MIG-5b0a": 30, "MIG-5c1b": 40}
        self.nvmlDeviceGetCount = lambda: 2
        self.nvmlDeviceGetHandleByIndex = UUIDS.__getitem__
        self.nvmlDeviceGetUUID = lambda handle: handle.encode()  # as old versions of pynvml do
        self.nvmlDeviceGetMigMode = lambda handle: self.known({GPU_B: [1, 1]}, handle)
        self.nvmlDeviceGetMaxMigDeviceCount = lambda handle: 3
        self.nvmlDeviceGetMigDeviceHandleByIndex = lambda handle, index: self.known(
            {0: "MIG-5b0a", 2: "MIG-5c1b"}, index
        )
        self.nvmlDeviceGetGpuInstanceId = {"MIG-5b0a": 3, "MIG-5c1b": 4}.__getitem__
        self.nvmlDeviceGetComputeInstanceId = lambda handle: 0
        self.nvmlDeviceGetHandleByUUID = lambda uuid: self.known({name: name for name in used}, uuid)
        self.nvmlDeviceGetCudaComputeCapability = lambda handle: self.known({GPU_A: [9, 0]}, handle)
        self.processes = dict[str, list[Any]]()
        self.nvmlDeviceGetComputeRunningProcesses = lambda handle: self.known(self.processes, handle)
        self.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(used=used[handle])

    def known(self, table: dict[Any, Any], key: Any) -> Any:
        """A value, or NVML's error where there is none."""
        if key not in table:
            raise self.NVMLError
        return table[key]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> MadeUpNvml:
    made = MadeUpNvml()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


def test_mig_instances_are_listed_with_both_names(nvml: MadeUpNvml) -> None:
    assert devices._query_each_gpu("nvmlDeviceGetUUID") == [GPU_A, GPU_B]
    assert devices.mig_instances() == INSTANCES
    assert nvml.shut_down == 2


@pytest.mark.parametrize("question", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID"])
def test_a_lost_gpu_does_not_hide_the_others(question: str, nvml: MadeUpNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = getattr(nvml, question)

    def lost(of: object) -> object:
        if of in {0, GPU_A}:
            raise nvml.NVMLError("GPU is lost")
        return ask(of)

    monkeypatch.setattr(nvml, question, lost)
    monkeypatch.setattr(nvml, "nvmlDeviceGetName", lambda handle: f"named {handle}", raising=False)
    assert devices._query_each_gpu("nvmlDeviceGetUUID") == ["", GPU_B]
    assert devices.mig_instances() == INSTANCES
    named = GPU_B if question.endswith("Index") else GPU_A
    assert devices.gpu_name() == f"named {named}"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, one in MIG mode with two instances, and another GPU."""
    monkeypatch.setattr(devices, "gpu_uuids", lambda: UUIDS)
    monkeypatch.setattr(devices, "mig_instances", lambda: INSTANCES)


def seen_by_rank(environment: dict[str, str]) -> list[str]:
    """Return what CUDA shows a rank that has these variables."""
    assert environment["HIP_VISIBLE_DEVICES"] == environment["CUDA_VISIBLE_DEVICES"]
    return devices.names_visible(environment["CUDA_VISIBLE_DEVICES"], UUIDS, INSTANCES)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("wanted", "given"),
    [
        ("0,2", "0,2"),
        ("2,0", "2,0"),
        ("GPU-cccc,GPU-aaaa", "2,0"),
        ("1", "MIG-5b0a"),
        (f"MIG-{GPU_B}/4/0", "MIG-5c1b"),
        ("2,MIG-5c1b", f"{GPU_C},MIG-5c1b"),  # torch counts no mixture of numbers and UUIDs
        ("MIG-ffff", "MIG-ffff"),
        (None, f"{GPU_A},MIG-5b0a,{GPU_C}"),
    ],
)
def test_ranks_see_what_was_leased_by_number(wanted: str | None, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    if wanted is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
    inventory = gpus()
    environment = inventory.environment(inventory.ids)
    assert environment["CUDA_VISIBLE_DEVICES"] == given
    assert seen_by_rank(environment) == list(inventory.ids)
    # A number is right only in the order of NVML; without one, the user's own order does no harm.
    by_number = given.replace(",", "").isdigit()
    assert environment.get("CUDA_DEVICE_ORDER") == ("PCI_BUS_ID" if by_number else None)


@pytest.mark.usefixtures("machine")
def test_a_lost_gpu_moves_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_uuids", lambda: ["", *UUIDS[1:]])
    assert gpus().environment([GPU_C])["CUDA_VISIBLE_DEVICES"] == "2"
    assert gpus().environment(["GPU-made-up"])["CUDA_VISIBLE_DEVICES"] == "GPU-made-up"


def test_used_memory_is_read_for_devices_that_nvml_knows(nvml: MadeUpNvml) -> None:
    assert devices.used_memory([GPU_A, "MIG-5c1b", "GPU-made-up"]) == {GPU_A: 100, "MIG-5c1b": 40}
    assert nvml.shut_down == 2


def uses(pid: int, size: int | None) -> types.SimpleNamespace:
    return types.SimpleNamespace(pid=pid, usedGpuMemory=size)


def test_memory_of_other_processes_is_not_counted(nvml: MadeUpNvml) -> None:
    """As of a notebook, or of another session whose leases lie elsewhere; a process of ours and memory of none are."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        notebook = uses(os.getppid(), 60)
        nvml.processes[GPU_A] = [notebook, uses(child.pid, 25), uses(os.getpid(), 5)]
        assert devices.used_memory([GPU_A]) == {GPU_A: 40}
        nvml.processes[GPU_A] = [notebook]
        assert devices.used_memory([GPU_A]) == {GPU_A: 40}
    finally:
        child.communicate()


def test_where_it_is_unknown_what_others_use_nothing_is_a_leak(nvml: MadeUpNvml) -> None:
    nvml.processes = {GPU_A: [uses(os.getppid(), None)], GPU_B: [uses(os.getpid(), None)]}
    assert devices.used_memory([GPU_A, GPU_B]) == {GPU_B: 200}


@pytest.mark.parametrize(("size", "leaks"), [(90 << 20, 0), (0, 1), (None, 0)])
def test_a_neighbour_is_no_leak(
    size: int | None, leaks: int, nvml: MadeUpNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Pool(tmp_path / "leases", Inventory("gpu", (GPU_A,)), free_timeout=0).lease(1, who="test") as lease:
        nvml.processes[GPU_A] = [uses(os.getppid(), size)]
        monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", lambda _: types.SimpleNamespace(used=100 + (90 << 20)))
    assert len(lease.leak) == leaks


@pytest.mark.parametrize(
    ("neighbour", "used"),
    [
        pytest.param([90 << 20], 90 << 20, id="a neighbour"),
        pytest.param([], 90 << 20, id="one that NVML does not list"),
        pytest.param([None], 90 << 20, id="one of whose memory NVML is silent"),
        pytest.param([90 << 20], 0, id="one that ends between two questions"),
    ],
)
@pytest.mark.parametrize("left", [0, 70 << 20])
def test_a_run_that_shares_a_gpu_leaks_what_its_own_processes_keep(
    *,
    left: int,
    neighbour: list[int | None],
    used: int,
    nvml: MadeUpNvml,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neighbours come and go all the time, so that the memory of the whole GPU says nothing."""
    inventory = Inventory("gpu", (GPU_A,), 2, runs_share=True)
    nvml.processes[GPU_A] = []
    with Pool(tmp_path / "leases", inventory, free_timeout=0).lease(1, who="test") as lease:
        nvml.processes[GPU_A] = [uses(os.getppid(), size) for size in neighbour]
        if left:
            nvml.processes[GPU_A].append(uses(os.getpid(), left))
        monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", lambda _: types.SimpleNamespace(used=100 + used + left))
    assert [leak.bytes for leak in lease.leak] == [left] * bool(left)


@pytest.mark.parametrize(("visible", "capability"), [(None, (9, 0)), ("0", (9, 0)), ("1", None), ("", None)])
def test_the_compute_capability_is_that_of_the_first_visible_gpu(
    visible: str | None, capability: tuple[int, int] | None, nvml: MadeUpNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "gpu_uuids", lambda: [GPU_A, GPU_B])
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.compute_capability() == capability


def test_without_a_driver_there_is_nothing(nvml: MadeUpNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise nvml.NVMLError

    monkeypatch.setattr(nvml, "nvmlInit", no_driver)
    assert not devices._query_each_gpu("nvmlDeviceGetUUID")
    assert not devices.mig_instances()
    assert devices.used_memory([GPU_A]) == {}
    assert devices.compute_capability() is None
    assert devices.gpu_name() == ""
    assert not nvml.shut_down


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize(
    ("visible", "args", "header"),
    [
        (None, [], "distcompat: 3 GPUs, nccl, world size 3 (default)*"),
        ("0,1", [], "distcompat: 2 GPUs, nccl, world size 2 (default)*"),
        ("", [], "distcompat: CPU, gloo, world size 2 (default)*"),
        ("-1", ["--distcompat-gpus=auto"], "distcompat: CPU, gloo, world size 2 (default)*"),
        (None, ["--distcompat-gpus=2"], "distcompat: 2 GPUs, nccl, world size 2 (default)*"),
        ("GPU-bbbb", ["--distcompat-gpus=1"], "distcompat: 1 GPUs, nccl, world size 1 (default)*"),
        (None, ["--distcompat-gpus=0"], "distcompat: CPU, gloo, world size 2 (default)*"),
        (None, ["--distcompat-world-size=2"], "distcompat: 3 GPUs, nccl, world size 2 (option)*"),
        (None, ["--distcompat-gpus=0", "--distcompat-world-size=8"], "distcompat: CPU, gloo, world size 8 (option)*"),
    ],
)
def test_visible_gpus_are_used(
    visible: str | None, args: list[str], header: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    pytester.makepyfile(MARKED.format(""))
    result = pytester.runpytest_inprocess("--collect-only", *args)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines([header])


@pytest.mark.parametrize(
    ("visible", "args", "message"),
    [
        ("0,1", ["--distcompat-gpus=3"], "--distcompat-gpus 3 (option): 2 visible (CUDA_VISIBLE_DEVICES=0,1)*"),
        (None, ["--distcompat-gpus=4"], "--distcompat-gpus 4 (option): 3 visible (CUDA_VISIBLE_DEVICES=unset)*"),
        ("", ["--distcompat-gpus=1"], "--distcompat-gpus 1 (option): 0 visible (CUDA_VISIBLE_DEVICES=)*"),
        ("0,0", ["--distcompat-gpus=1"], "--distcompat-gpus 1 (option): 0 visible*"),
        (None, ["--distcompat-world-size=4"], "--distcompat-world-size 4 (option): 4 ranks need 4 GPUs, 3 to use*"),
        (
            None,
            ["--distcompat-gpus=2", "--distcompat-world-size=3"],
            "--distcompat-world-size 3 (option): 3 ranks need 3 GPUs*",
        ),
    ],
)
@pytest.mark.usefixtures("three_gpus")
def test_missing_gpus_are_a_usage_error_and_no_skip(
    visible: str | None, args: list[str], message: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    pytester.makepyfile("def test(): pass")  # not even a test of ours: the demand alone is the error
    result = pytester.runpytest_inprocess(*args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {message}"])


def test_a_demand_from_the_ini_file_is_as_strict(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\ndistcompat_gpus = 1")
    result = pytester.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --distcompat-gpus 1 (ini): 0 visible*"])


@pytest.mark.usefixtures("three_gpus")
def test_a_marked_test_that_needs_more_gpus_is_skipped_with_its_reason(
    pytester: pytest.Pytester, ranks: FakeRanks
) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.distcompat(world_size=2)
        def test_fits(): pass

        @pytest.mark.distcompat(world_size=4)
        def test_too_large(): pass

        @pytest.mark.distcompat(world_size=4, strategies=["ddp"])
        def test_cell_too_large(cell): pass
        """
    )
    result = pytester.runpytest_inprocess("-rs")
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(["SKIPPED [[]2[]] *: 4 ranks need 4 GPUs, 3 to use"])
    assert [request.world_size for request in ranks.requests] == [2]
    assert ranks.requests[0].payload["device"] == "cuda"


@pytest.mark.usefixtures("three_gpus")
def test_a_cell_that_needs_more_gpus_is_shown_as_not_run(pytester: pytest.Pytester, ranks: FakeRanks) -> None:
    pytester.makepyfile(
        """
        from pytest_distcompat import CompatSuite, Matrix

        class TestX(CompatSuite):
            driver = "torch"
            matrix = Matrix(strategies=("ddp",), precisions=("fp32",), world_sizes=(4,))
        """
    )
    result = pytester.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert not ranks.requests
    result.stdout.fnmatch_lines(["*ddp-fp32-w4  -  *", "*not run: 4 ranks need 4 GPUs, 3 to use [[]ddp-fp32-w4[]]"])

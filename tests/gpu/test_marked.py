"""Marked tests on a real GPU: who talks through what, and what is left when they are over."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.gpu.conftest import ONE_RANK

from pytest_distcompat import clock
from pytest_distcompat.devices import used_memory
from pytest_distcompat.lease.pool import FREE_TIMEOUT_S, TOLERANCE

if TYPE_CHECKING:
    from tests.gpu.conftest import SharedBackend

pytestmark = pytest.mark.gpu


def run_without_warnings(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """Run pytest; a warning of ours would mean that no rank was forked from the fork server."""
    result = pytester.runpytest_subprocess(*arguments)
    result.stdout.no_fnmatch_line("*DistcompatWarning*")
    return result


NCCL = """
import os
from pathlib import Path
import pytest

def has_cuda(pid):
    # The device that CUDA opens, and NVML does not.
    links = (os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink())
    return "/dev/nvidia-uvm" in links

@pytest.mark.distcompat(world_size=1)
def test_reduce(process_group, device):
    import torch
    from torch import distributed
    assert str(device) == "cuda:0"
    assert distributed.get_backend() == "nccl"
    assert torch.cuda.device_count() == 1
    total = torch.ones(4, device=device)
    distributed.all_reduce(total)
    assert total.tolist() == [1.0] * 4

@pytest.mark.distcompat(world_size=1)
def test_parent(process_group, device):
    import torch
    torch.ones(4, device=device).sum().item()
    if not has_cuda(os.getpid()):
        pytest.skip("this system does not show which devices a process has open")
    assert not has_cuda(os.getppid())
"""

SHARED = """
import os
import pytest

@pytest.mark.distcompat(world_size=2)
def test_two(process_group, world, device, rank):
    import torch
    from torch import distributed
    assert world.shared and str(device) == "cuda:0" and os.environ["LOCAL_RANK"] == "0"
    assert distributed.get_backend() == "BACKEND_HERE"
    total = torch.full((4,), float(rank + 1), device=device)
    distributed.all_reduce(total)
    assert total.device == device and total.tolist() == [3.0] * 4
    distributed.broadcast(total.fill_(rank), src=1)
    assert total.tolist() == [1.0] * 4

@pytest.mark.distcompat(world_size=4)
def test_four(process_group, device, rank):
    import torch
    from torch.nn.parallel import DistributedDataParallel
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1, bias=False).to(device), device_ids=[device.index])
    model(torch.full((1, 8), float(rank), device=device)).sum().backward()
    (weight,) = model.parameters()
    assert weight.grad.tolist() == [[1.5] * 8]

@pytest.mark.distcompat(world_size=1)
def test_one(process_group, world):
    from torch import distributed
    assert not world.shared and distributed.get_backend() == "nccl"
"""

WORLD_SIZE = """
import pytest

@pytest.mark.distcompat
def test_sum(process_group, world, device):
    import torch
    from torch import distributed
    assert distributed.get_backend() == "nccl"
    total = torch.ones(4, device=device)
    distributed.all_reduce(total)
    assert total.tolist() == [float(world.size)] * 4
"""

HELD = """
import os
import signal
import time
import pytest

def hold(device):
    import torch
    held = torch.ones(1 << 30, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    return held

@pytest.mark.distcompat(world_size=1)
def test_killed(process_group, device):
    held = hold(device)
    os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.distcompat(world_size=1, timeout=30)
def test_hung(process_group, device):
    held = hold(device)
    time.sleep(3600)

@pytest.mark.distcompat(world_size=1)
def test_raised(process_group, device):
    held = hold(device)
    assert not held.any()

@pytest.mark.distcompat(world_size=1)
def test_too_much(process_group, device):
    import torch
    torch.empty(1 << 44, dtype=torch.uint8, device=device)

@pytest.mark.distcompat(world_size=1)
def test_broken_kernel(process_group, device):
    import torch
    torch.zeros(4, device=device)[torch.tensor([9], device=device)]
    torch.cuda.synchronize()

@pytest.mark.distcompat(world_size=1)
def test_well(process_group, device):
    assert hold(device).all()
"""

#: Five tests that hold 2 GiB for a moment, and meet those of another session there.
BESIDE = """
import time
import pytest

@pytest.mark.parametrize("number", range(5))
@pytest.mark.distcompat(world_size=1)
def test_hold(process_group, device, number):
    import torch
    held = torch.ones(2 << 30, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    time.sleep(1)
"""

#: Two ranks of one GPU: the first takes more than its half.
GREEDY = """
import pytest

@pytest.mark.distcompat(world_size=2)
def test_greedy(process_group, device, rank):
    import torch
    from torch import distributed
    total = torch.cuda.get_device_properties(device).total_memory
    if rank == 0:
        held = torch.empty(total * 6 // 10, dtype=torch.uint8, device=device)
    distributed.barrier()

@pytest.mark.distcompat(world_size=2)
def test_modest(process_group, device):
    import torch
    total = torch.cuda.get_device_properties(device).total_memory
    held = torch.empty(total * 4 // 10, dtype=torch.uint8, device=device)
"""


@pytest.mark.parametrize("launcher", ["warm", "torchrun"])
def test_one_rank_talks_through_nccl(launcher: str, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(NCCL)
    result = run_without_warnings(pytester, *ONE_RANK, f"--distcompat-launcher={launcher}", "-k", "reduce")
    result.assert_outcomes(passed=1, deselected=1)
    result.stdout.fnmatch_lines(["distcompat: 1 GPUs, nccl, world size 1 *"])


def test_the_fork_server_does_not_initialise_cuda(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(NCCL)
    result = run_without_warnings(pytester, *ONE_RANK, "-rs")
    outcomes = result.parseoutcomes()
    assert outcomes["passed"] + outcomes.get("skipped", 0) == 2
    assert "failed" not in outcomes


def test_ranks_share_a_gpu(pytester: pytest.Pytester, shared_backend: SharedBackend) -> None:
    pytester.makepyfile(SHARED.replace("BACKEND_HERE", shared_backend.name))
    result = run_without_warnings(pytester, "--distcompat-gpus=1", "--distcompat-ranks-per-gpu=4")
    result.assert_outcomes(passed=3)
    shared = f"({shared_backend.header} where up to 4 ranks share a GPU)"
    result.stdout.fnmatch_lines([f"distcompat: 1 GPUs, nccl {shared}, *"])


def test_two_ranks_are_the_default_where_nccl_takes_them(
    pytester: pytest.Pytester, shared_backend: SharedBackend
) -> None:
    pytester.makepyfile(WORLD_SIZE)
    result = run_without_warnings(pytester, "--distcompat-gpus=1")
    result.assert_outcomes(passed=1)
    size = 2 if shared_backend.name == "nccl" else 1
    result.stdout.fnmatch_lines([f"distcompat: 1 GPUs, nccl*, world size {size} *"])


def test_ranks_do_not_share_a_gpu_where_it_is_turned_off(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SHARED)
    result = run_without_warnings(pytester, *ONE_RANK, "-rs")
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(["SKIPPED * 2 ranks need 2 GPUs, 1 to use"])


def test_memory_is_freed_however_a_test_ends(pytester: pytest.Pytester, gpu: str) -> None:
    before = used_memory([gpu])
    pytester.makepyfile(HELD)
    result = run_without_warnings(pytester, *ONE_RANK)
    result.assert_outcomes(passed=1, failed=5)
    # The causes are their own, and none of them left anything.
    result.stdout.fnmatch_lines(["*was killed by SIGKILL*"])
    result.stdout.fnmatch_lines(["*time limit of 30 s*"])
    result.stdout.fnmatch_lines(["*OutOfMemoryError*"])
    result.stdout.no_fnmatch_line("*MiB stayed in use*")
    assert clock.wait_until(lambda: used_memory([gpu])[gpu] - before[gpu] <= TOLERANCE, FREE_TIMEOUT_S)


def test_a_lease_shows_ranks_that_gpu_and_no_other(pytester: pytest.Pytester, gpu: str) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.distcompat(world_size=1)
        def test_which(device):
            import torch
            name = str(torch.cuda.get_device_properties(device).uuid)
            assert f"GPU-{name}" == "GPU_HERE"
        """.replace("GPU_HERE", gpu)
    )
    result = run_without_warnings(pytester, *ONE_RANK)
    result.assert_outcomes(passed=1)


def test_concurrent_workers_do_not_share_the_gpu(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other's lease: what a test marks as its own nobody else has marked."""
    pytester.makepyfile(
        """
        import os
        import time
        from pathlib import Path
        import pytest

        @pytest.mark.parametrize("number", range(6))
        @pytest.mark.distcompat(world_size=1)
        def test_alone(process_group, device, number):
            mark = Path(os.environ["MEETING"])
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
            time.sleep(0.2)
            mark.unlink()
        """
    )
    monkeypatch.setenv("MEETING", str(pytester.path / "meeting"))
    pytest.importorskip("xdist")
    result = run_without_warnings(pytester, *ONE_RANK, "-n", "3")
    result.assert_outcomes(passed=6)


def test_two_sessions_on_one_gpu_give_no_leak(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their leases lie in different directories, as those of two users do, so that neither waits for the other."""
    pytester.makepyfile(BESIDE)
    with contextlib.ExitStack() as directories:
        sessions = []
        for name in ("one", "other"):
            # That of a socket below it may have no more than 107 characters.
            monkeypatch.setenv("TMPDIR", directories.enter_context(tempfile.TemporaryDirectory(prefix=f"{name}-")))
            arguments = (sys.executable, "-m", "pytest", f"--basetemp={tmp_path / name}", *ONE_RANK)
            # pytester's own way gives standard input a pipe, and closes it.
            session = subprocess.Popen(
                arguments,
                cwd=pytester.path,
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            sessions.append(session)
        for session in sessions:
            output, _ = session.communicate(timeout=120)
            assert session.returncode == 0, output
            assert "5 passed" in output
            assert "stayed in use" not in output


def test_a_rank_may_take_its_part_of_a_shared_gpu_and_no_more(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(GREEDY)
    result = run_without_warnings(pytester, "--distcompat-gpus=1", "--distcompat-ranks-per-gpu=2")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*rank 0 *OutOfMemoryError*"])

"""``distcompat doctor``: what it finds wrong with made-up machines, and what it says of this one."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat.checks import CHECKS
from pytest_distcompat.cli import capabilities, dependencies, doctor, machine, main
from pytest_distcompat.cli.capabilities import capability
from pytest_distcompat.cli.machine import Machine
from pytest_distcompat.driver import Driver
from pytest_distcompat.drivers import find_driver
from pytest_distcompat.installed import GET_TORCH
from pytest_distcompat.known import shipped
from pytest_distcompat.launch import nccl

TORCH = {"cuda": "12.8", "hip": "", "gpus": ["NVIDIA H200"] * 2, "nccl": "2.27.5", "has_nccl": True, "gloo": True}
CPU_TORCH = {"cuda": "", "hip": "", "gpus": [], "nccl": "", "has_nccl": False, "gloo": True}
GPUS = ("GPU-a", "GPU-b")
#: Nothing is wrong with it.
GOOD = Machine({}, TORCH, GPUS, GPUS, cores=8, shm=1 << 30, tmp=1 << 40, hostname="here")


def reported(described: Machine) -> list[str]:
    return [f"{finding.level}: {finding.text}" for finding in machine.findings(described)]


@pytest.mark.parametrize(
    ("hosts", "named"),
    [
        ("127.0.0.1 localhost\n::1 ip6-localhost localhost # IPv6\n", True),
        ("127.0.0.1 localhost\n", False),
        ("# ::1 localhost\n::1 other\n", False),
        ("", False),
    ],
)
def test_whether_the_loopback_has_a_name(hosts: str, named: bool) -> None:
    assert machine.names_loopback(hosts) is named


def test_a_good_machine_has_no_problem() -> None:
    assert reported(GOOD) == []
    assert reported(dataclasses.replace(GOOD, torch=CPU_TORCH, gpus=(), visible=())) == []


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        (None, None),
        (
            nccl.Library(Path("/lib/libnccl.so.2"), (2, 29, 7)),
            "NCCL 2.29.7 (/lib/libnccl.so.2), which takes one rank a GPU.",
        ),
        (
            nccl.Library(Path("/lib/libnccl.so.2"), (2, 30, 7)),
            "NCCL 2.30.7 (/lib/libnccl.so.2), which takes several ranks of",
        ),
    ],
)
def test_the_nccl_that_ranks_load_is_named(library: nccl.Library | None, expected: str | None) -> None:
    machine_with_library = dataclasses.replace(GOOD, nccl=library)
    lines = [line for line in doctor._devices(machine_with_library) if line.startswith("ranks load")]
    if expected is None:
        assert lines == []
        return
    (line,) = lines
    assert line.startswith(f"ranks load {expected}")
    assert ("pip install" in line) == ("one rank" in line)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"torch": {"error": "ImportError: libcudart.so"}},
            "problem: torch cannot be imported: ImportError: libcudart.so",
        ),
        (
            {"torch": CPU_TORCH},
            "problem: 2 GPUs are here, and this torch is built for the CPU only: install one for CUDA",
        ),
        ({"torch": {**TORCH, "gpus": []}}, "problem: torch cannot use the GPUs (torch.cuda.is_available() is False)"),
        ({"torch": {**TORCH, "gpus": ["NVIDIA H200"]}}, "warning: 2 GPUs are visible, and torch sees 1"),
        ({"torch": {**TORCH, "has_nccl": False}}, "problem: this torch has no NCCL"),
        ({"torch": {**TORCH, "gloo": False}}, "problem: this torch has no gloo"),
        (
            {"environ": {"CUDA_VISIBLE_DEVICES": ""}, "visible": (), "torch": {**TORCH, "gpus": []}},
            "warning: CUDA_VISIBLE_DEVICES is empty: none of 2 GPUs is used",
        ),
        (
            {"environ": {"CUDA_VISIBLE_DEVICES": "0,7"}, "visible": ("GPU-a",), "torch": {**TORCH, "gpus": ["x"]}},
            "problem: CUDA_VISIBLE_DEVICES=0,7 names what is not here, or one GPU twice: CUDA shows 1 of 2 GPUs",
        ),
        ({"environ": {"OMP_NUM_THREADS": "8"}}, "warning: OMP_NUM_THREADS=8: each rank starts so many threads"),
        ({"environ": {"RANK": "0", "MASTER_PORT": "1"}}, "warning: RANK, MASTER_PORT: set as for a rank"),
        ({"environ": {"ACCELERATE_USE_FSDP": "true"}}, "warning: ACCELERATE_USE_FSDP=true: accelerate obeys"),
        ({"environ": {"HF_HUB_OFFLINE": "1"}}, "note: HF_HUB_OFFLINE: nothing is downloaded"),
        ({"shm": 64 << 20}, "warning: /dev/shm has 64 MiB free"),
        ({"shm": None}, "warning: /dev/shm is not there"),
        ({"tmp": 1 << 20}, "has 1 MiB free; checkpoints are kept there"),
        ({"resolves": False}, "warning: the name of this machine, here, does not resolve"),
        (
            {"loopback": False},
            "warning: /etc/hosts does not name ::1: torch's store asks a name server who 127.0.0.1 is",
        ),
        ({"compiler": False}, "warning: there is no C++ compiler"),
    ],
)
def test_problems_of_a_machine_are_reported(change: dict[str, Any], expected: str) -> None:
    lines = reported(dataclasses.replace(GOOD, **change))
    assert len(lines) == 1, lines
    assert expected in lines[0]


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Installed packages that a test may change; the metadata stays this environment's."""
    versions = {"torch": "2.13.0+cpu", "accelerate": "1.15.0", "pytest-distcompat": "0.1.0"}
    wants = {
        "pytest-distcompat": ['torch>=2.6; extra == "torch"', 'accelerate>=1.6; extra == "accelerate"'],
        "accelerate": ["torch>=2.0", "numpy<1", 'torch==9; extra == "dev"', 'torch<1; python_version < "3"'],
    }
    monkeypatch.setattr("importlib.metadata.requires", wants.get)
    monkeypatch.setattr(dependencies, "installed", lambda: versions)
    return versions


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"torch": "2.5.1"}, ["problem: torch 2.5.1 is older than what pytest-distcompat was tried with: torch>=2.6"]),
        (
            {"torch": "1.13.0"},
            [
                "problem: torch 1.13.0 is older than what pytest-distcompat was tried with: torch>=2.6",
                "problem: accelerate 1.15.0 requires torch>=2.0, and torch 1.13.0 is installed",
            ],
        ),
        ({"accelerate": "1.5.2"}, ["problem: accelerate 1.5.2 cannot run FSDP2 on CPU ranks; 1.6 or newer is needed"]),
        (
            {"accelerate": "2.0"},
            [
                "warning: accelerate 2.0: running FSDP and DeepSpeed on CPU was tested below 2 only; believe the check 'active'"
            ],
        ),
    ],
)
def test_contradicting_packages_are_a_problem(
    packages: dict[str, str], change: dict[str, str], expected: list[str]
) -> None:
    packages.update(change)
    findings = [f"{finding.level}: {finding.text}" for finding in dependencies.package_findings()]
    assert findings == expected


def test_without_torch(packages: dict[str, str]) -> None:
    del packages["torch"]
    (finding,) = dependencies.package_findings()
    assert finding.text == f"torch is not installed: {GET_TORCH}"
    missing = {"error": "ModuleNotFoundError: No module named 'torch'"}
    assert reported(dataclasses.replace(GOOD, torch=missing)) == [], "once is enough"


def rows_by_name(lines: list[str]) -> dict[str, list[str]]:
    """Return the columns of each row of a table by its first."""
    rows = {}
    for line in lines:
        name, *columns = line.split()
        rows[name] = columns
    return rows


def test_cells_that_can_run_and_reasons_of_the_others() -> None:
    capabilities = capability("deepspeed", find_driver("deepspeed"), "cpu", 2, shipped())
    lines = list(capabilities.lines(whole=False))
    assert lines[0] == f"deepspeed: {capabilities.able} of the {len(capabilities.reasons)} cells of the full profile"
    table = rows_by_name(lines[2:9])
    assert table["ddp"] == ["-"] * 5
    # Refused by DeepSpeed itself, as the known issues say.
    assert table["zero0"][:3] == ["yes", "yes", "known"]
    assert table["zero1"][:3] == ["yes", "yes", "yes"]
    # An issue of unusual parameters may fail any check there, in cells with such a model.
    assert table["zero3"][:3] == ["yes", "yes", "yes"]
    assert len(lines) == 9
    all_lines = list(capabilities.lines(whole=True))
    reason = "not: native DeepSpeed is driven for ZeRO; ddp is a strategy of torch [ddp-fp32-w2, ...]"
    assert any(line.endswith(reason) for line in all_lines)
    # By axis of the mesh: AutoTP, Ulysses and experts in two precisions, under the stages that they are promised for.
    names, tp, cp, ep, pp, tp_cp, tp_ep, tp_pp, cp_ep = (line.split() for line in all_lines[9:18])
    assert names[-4:] == ["zero0", "zero1", "zero2", "zero3"]
    # Beside two of them recomputation and accumulation too, or accumulation alone, are tried, and a model that draws.
    assert tp[0] == "tp"
    assert tp[-4:] == ["8", "8", "8", "-"]
    assert cp[0] == "cp"
    assert cp[-4:] == ["3", "3", "3", "3"]
    assert ep[0] == "ep"
    assert ep[-4:] == ["6", "6", "6", "-"]
    # Pipelines are for the stages that leave gradients whole.
    assert pp[0] == "pp"
    assert pp[-2:] == ["-", "-"]
    assert tp_cp[:3] == ["tp", "x", "cp"]
    assert tp_ep[:3] == ["tp", "x", "ep"]
    assert tp_pp[:3] == ["tp", "x", "pp"]
    assert cp_ep[:3] == ["cp", "x", "ep"]
    unable = 0
    for line in all_lines:
        if " not: " in line:
            number, *_ = line.split()
            unable += int(number)
    assert unable == len(capabilities.reasons) - capabilities.able
    # By check, in how many of these cells; a reason where in none.
    # After the axes of a mesh, and each two of them.
    (header,) = [place for place, line in enumerate(all_lines) if "checks with a verdict" in line]
    assert all_lines[header].split() == ["checks", "with", "a", "verdict", "tp", "cp", "ep", "pp"]
    checks = rows_by_name(all_lines[header + 1 : header + 1 + len(CHECKS.names())])
    assert checks["active"] == ["24", "12", "18", "14"]
    assert checks["throughput"] == ["-"] * 4
    assert "    no verdict: no limit was given: --distcompat-throughput [throughput under tp, ...]" in all_lines


class Able(Driver):
    """Whose cells a GPU makes possible."""

    name = "able"

    @classmethod
    def unsupported_reason(cls, cell: Any, device: str = "cpu") -> str:
        return "needs a GPU" if device == "cpu" else ""


def test_cells_that_can_run_depend_on_the_device() -> None:
    on_cpu = capability("able", Able, "cpu", 2)
    on_gpu = capability("able", Able, "cuda", 2)
    assert on_cpu.able == 0
    assert on_gpu.able == 35


def test_a_machine_on_which_no_cell_can_run_has_a_problem() -> None:
    def problems(*devices: str) -> list[str]:
        capabilities = [capability("able", Able, device, 2) for device in devices]
        findings = doctor._findings(GOOD, 0, capabilities)
        return [finding.text for finding in findings if finding.level == "problem" and "cell" in finding.text]

    assert problems("cpu") == ["no cell can run here, so a suite fails: needs a GPU"]
    assert problems("cpu", "cuda") == []


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A good machine and good packages."""
    monkeypatch.setattr(machine, "this_machine", lambda: GOOD)
    monkeypatch.setattr(dependencies, "package_findings", lambda: iter(()))
    monkeypatch.setattr(machine, "torch_infos", lambda: TORCH)


@pytest.mark.parametrize(
    ("arguments", "change", "code"),
    [
        ([], {}, 0),
        (["--gpus", "2"], {}, 0),
        (["--gpus", "4"], {}, 1),
        (["--gpus", "-1"], {}, 2),
        ([], {"shm": 0}, 0),
        (["--strict"], {"shm": 0}, 1),
        (["--strict"], {"environ": {"HF_HUB_OFFLINE": "1"}}, 0),
        ([], {"unreachable": "no loopback interface"}, 1),
    ],
)
@pytest.mark.usefixtures("quiet")
def test_the_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    change: dict[str, Any],
    code: int,
) -> None:
    monkeypatch.setattr(machine, "this_machine", lambda: dataclasses.replace(GOOD, **change))
    assert main(["doctor", "--driver", "torch", *arguments]) == code
    if code < 2:
        last = capsys.readouterr().out.splitlines()[-1]
        verdict = "FAIL" if code else "ok"
        assert last.startswith(f"verdict: {verdict}: ")


def test_torch_is_imported_while_the_cells_are_examined(quiet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()
    examine = capabilities.capability

    def examined(*arguments: Any, **named: Any) -> Any:
        begun.set()
        return examine(*arguments, **named)

    def asked() -> dict[str, Any]:
        return TORCH if begun.wait(20) else {"error": "the cells were not examined meanwhile"}

    monkeypatch.setattr(capabilities, "capability", examined)
    monkeypatch.setattr(machine, "torch_infos", asked)
    assert main(["doctor", "--driver", "torch"]) == 0


def test_a_name_server_that_does_not_answer_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(machine, "RESOLVE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: answered.wait(20))
    began = time.monotonic()
    assert not machine._resolves("here")
    assert time.monotonic() - began < 10
    answered.set()
    assert machine._resolves("here")


def test_the_text_of_doctor(quiet: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    secret = {"SECRET": "hunter2", "RANK": "0"}
    monkeypatch.setattr(machine, "this_machine", lambda: dataclasses.replace(GOOD, environ=secret))
    assert main(["doctor", "--driver", "torch", "--driver", "deepspeed", "--gpus", "3"]) == 1
    out = capsys.readouterr().out
    for line in (
        "  8 CPU cores; 2 GPUs, 2 visible",
        "  torch is built for CUDA 12.8; it can use 2 GPUs (NVIDIA H200)",
        "  ranks talk through gloo on the CPU; for GPUs there is NCCL 2.27.5",
        "cells that can be run here, those without options one by one (2 ranks, cuda); --all gives the reasons of the others",
        "problem: 3 GPUs are wanted, 2 of 2 are visible",
    ):
        assert line in out.splitlines()
    assert out.splitlines()[-1] == "verdict: FAIL: 1 problem, 1 warning, 0 notes"
    assert "torch-no-upcast" not in out
    assert main(["doctor", "--driver", "torch", "--all", "--strict"]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "verdict: FAIL: 0 problems, 1 warning, 0 notes, --strict"
    assert "torch-no-upcast (torch): " in out
    assert "hunter2" not in out


def test_issues_of_the_users_own_file_are_shown(
    quiet: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.toml"
    own.write_text(
        'version = 1\n[[issue]]\nid = "mine"\nlink = "org/repo#1"\nreason = "it is odd"\nmatch = "odd"\n'
        'check = "names"\ndrivers = ["torch"]\npackages = ["pytest"]\n',
        encoding="utf-8",
    )
    assert main(["doctor", "--driver", "torch", "--all", "--known", str(own)]) == 0
    assert "  mine (torch): it is odd (org/repo#1)" in capsys.readouterr().out.splitlines()


def test_this_machine_as_a_command_that_imports_no_pytest() -> None:
    script = (
        "import sys\nfrom pytest_distcompat.cli import main\ncode = main(['doctor'])\n"
        "heavy = {'pytest', '_pytest', 'torch'} & set(sys.modules)\nassert not heavy, heavy\nsys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert any(line.startswith("  ranks talk through gloo on the CPU") for line in lines), done.stderr
    assert ", torch 2." in lines[1]
    shown = []
    for line in lines:
        if "cells of the full profile" in line:
            driver, _, _ = line.partition(":")
            shown.append(driver.strip())
    assert shown == ["torch", "accelerate", "deepspeed", "trainer"]
    has_problem = any(line.startswith("problem: ") for line in lines)
    assert done.returncode == has_problem
    assert lines[-1].startswith("verdict: ")


def test_a_torch_that_cannot_be_imported_is_a_problem_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12 is missing')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert machine.torch_infos() == {"error": "ImportError: libcudart.so.12 is missing"}

"""Several ranks on one GPU, where the user asks for it and nowhere else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.drivers import DRIVERS
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.launch import nccl
from pytest_distcompat.launch.forensics.ending import Ending
from pytest_distcompat.launch.launcher import Launcher
from pytest_distcompat.launch.request import Request
from pytest_distcompat.lease import Inventory, Pool, read_timeline
from pytest_distcompat.leased import LeasedLauncher
from pytest_distcompat.places import device_of
from pytest_distcompat.plugin.suite import why_not
from pytest_distcompat.plugin.suite.shared_gpu import why_not_through_gloo
from pytest_distcompat.world import World

if TYPE_CHECKING:
    from tests.lease.conftest import RunOnGpus

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")

MARKED = """
import pytest

@pytest.mark.parametrize("size", [pytest.param(n, marks=pytest.mark.distcompat(world_size=n)) for n in (1, 2, 5, 6, 7)])
def test(size): pass
"""
SUITE = """
from pytest_distcompat import CompatSuite, Matrix

class TestX(CompatSuite):
    driver = "torch"
    matrix = Matrix(strategies=("ddp",), precisions=("fp32",), world_sizes=(4,))
"""


def rank(number: int, size: int, visible: str | None, monkeypatch: pytest.MonkeyPatch, device: str = "cuda") -> World:
    for name, value in (("RANK", number), ("LOCAL_RANK", number), ("WORLD_SIZE", size)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return World.from_environment(device)


@pytest.mark.parametrize("visible", [None, "GPU-a,GPU-b,GPU-c", "GPU-a,GPU-b,GPU-c,GPU-d"])
def test_a_rank_with_a_gpu_of_its_own_has_nccl(visible: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    world = rank(2, 3, visible, monkeypatch)
    assert (world.device, world.local_rank, world.shared, world.backend) == ("cuda:2", 2, False, "nccl")
    assert os.environ["LOCAL_RANK"] == "2"


@pytest.mark.parametrize(("number", "own"), [(0, 0), (1, 1), (2, 0), (3, 1), (4, 0)])
def test_ranks_that_share_take_turns_and_have_gloo(number: int, own: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = rank(number, 5, "GPU-a,GPU-b", monkeypatch)
    assert world.rank == number
    assert world.size == 5
    assert world.local_rank == own
    assert world.device == f"cuda:{own}"
    assert (world.shared, world.backend) == (True, "gloo")
    # What trainers take for the number of their GPU.
    assert os.environ["LOCAL_RANK"] == str(own)
    assert World.from_environment("cuda") == world


def test_ranks_that_share_have_an_nccl_that_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    world = rank(4, 5, "GPU-a,GPU-b", monkeypatch)
    assert (world.device, world.shared, world.backend, world.ranks_each) == ("cuda:0", True, "nccl", 3)


@pytest.mark.parametrize(("visible", "fractions"), [("0,1", [(1 / 3, 1)]), ("0,1,2,3,4", [])])
def test_ranks_that_share_divide_the_memory(
    visible: str, fractions: list[tuple[float, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to: list[tuple[float, int]] = []
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", lambda *given: set_to.append(given))
    rank(3, 5, visible, monkeypatch).divide_memory()
    assert set_to == fractions


@pytest.fixture
def nccl_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Preload a stand-in of NCCL that tells this code of its version."""

    def make(code: int) -> None:
        source, path = tmp_path / "nccl.c", tmp_path / "libnccl.so.2"
        source.write_text(f"int ncclGetVersion(int *version) {{ *version = {code}; return 0; }}\n", encoding="utf-8")
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(path), str(source)], check=True)
        monkeypatch.setenv("LD_PRELOAD", str(path))
        nccl._answers.clear()

    return make


@needs_gcc
def test_a_library_that_is_known_is_not_loaded_again(
    nccl_of: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl_of(23007)
    known = nccl.library()
    assert known is not None
    answers = nccl.answers()
    nccl._answers.clear()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it was loaded again"))
    nccl.set_libraries(answers)
    assert nccl.library() == known


@needs_gcc
@pytest.mark.parametrize(("code", "version", "shares"), [(22907, (2, 29, 7), False), (23007, (2, 30, 7), True)])
def test_the_library_is_asked_for_its_version(
    code: int, version: tuple[int, int, int], shares: bool, nccl_of: Callable[[int], None]
) -> None:
    nccl_of(code)
    library = nccl.library()
    assert library is not None
    assert library.version == version
    assert library.shares_gpus == shares
    environment = nccl.environment_of_shared_ranks()
    if shares:
        assert environment == {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    else:
        assert environment == {}


def test_what_is_no_library_has_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libnccl.so.2").write_text("no library", encoding="utf-8")
    monkeypatch.setattr(nccl, "library_path", lambda: tmp_path / "libnccl.so.2")
    nccl._answers.clear()
    assert nccl.library() is None
    assert nccl.environment_of_shared_ranks() == {}


@pytest.mark.parametrize(("size", "shares"), [(1, False), (2, False), (3, True)])
def test_only_ranks_that_share_get_the_variable(
    size: int, shares: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With it NCCL would take two ranks on one GPU where a mistake put them there."""
    monkeypatch.setattr(nccl, "environment_of_shared_ranks", lambda: {"NCCL_MULTI_RANK_GPU_ENABLE": "1"})
    requests: list[Request] = []

    class Records(Launcher):
        def run(self, request: Request) -> Ending:
            requests.append(request)
            return Ending((), {})

    pool = Pool(tmp_path / "leases", Inventory("gpu", ("GPU-a", "GPU-b"), ranks_each=2), memory=lambda ids: {})
    LeasedLauncher(Records(), lambda: pool, lambda text: None).run(Request("a:b", {}, size, str(tmp_path)))
    assert ("NCCL_MULTI_RANK_GPU_ENABLE" in requests[0].set) == shares
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in os.environ


def test_oversubscription_has_no_effect_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    world = rank(3, 4, "", monkeypatch, "cpu")
    assert (world.device, world.local_rank, world.shared, world.backend) == ("cpu", 3, False, "gloo")


def test_a_lease_for_more_ranks_than_gpus_is_of_all_gpus() -> None:
    inventory = Inventory("gpu", ("GPU-a", "GPU-b"), ranks_each=3)
    assert [inventory.needed(ranks) for ranks in range(1, 7)] == [1, 2, 2, 2, 2, 2]
    with pytest.raises(UsageProblem, match="7 ranks need 3 GPUs; there are 2: GPU-a, GPU-b"):
        inventory.needed(7)


def test_without_the_option_too_many_ranks_are_skipped(pytester: pytest.Pytester, run_on_gpus: RunOnGpus) -> None:
    pytester.makepyfile(test_it=MARKED)
    result = run_on_gpus("--distcompat-gpus=2", "-rs")
    result.assert_outcomes(passed=2, skipped=3)
    result.stdout.fnmatch_lines(["distcompat: 2 GPUs, nccl, world size 2 *", "SKIPPED * 5 ranks need 5 GPUs, 2 to use"])


@pytest.mark.parametrize("how", ["option", "alias", "ini"])
def test_with_oversubscribe_too_many_ranks_run_and_the_header_says_so(
    how: str, pytester: pytest.Pytester, run_on_gpus: RunOnGpus
) -> None:
    pytester.makepyfile(test_it=MARKED)
    if how == "ini":
        pytester.makeini("[pytest]\ndistcompat_oversubscribe = 3")
    flag = "--distcompat-oversubscribe=3" if how == "alias" else "--distcompat-ranks-per-gpu=3"
    more = [] if how == "ini" else [flag]
    source = "ini" if how == "ini" else "option"
    result = run_on_gpus("--distcompat-gpus=2", "-rs", *more)
    result.assert_outcomes(passed=4, skipped=1)
    result.stdout.fnmatch_lines(
        [
            f"distcompat: *ranks_per_gpu 3 (from {source})*",
            "distcompat: 2 GPUs, nccl (gloo where up to 3 ranks share a GPU), world size 2 *",
            "SKIPPED * 7 ranks need 3 GPUs, 2 to use, 3 ranks on each at most",
        ]
    )
    spans = read_timeline(pytester.path / "base" / "distcompat")
    gpus = []
    for span in spans:
        devices = {device_of(name) for name in span.ids}
        gpus.append((span.who[-3:], len(devices)))
    assert gpus == [("[1]", 1), ("[2]", 2), ("[5]", 2), ("[6]", 2)]
    # Places of both GPUs: three of each for five ranks.
    assert [len(span.ids) for span in spans] == [1, 2, 6, 6]


@needs_gcc
@pytest.mark.parametrize(
    ("code", "more", "header"),
    [
        (
            23007,
            [],
            "distcompat: 1 GPUs, nccl (NCCL 2.30.7 where up to 2 ranks share a GPU), world size 2 (default), *",
        ),
        (23007, ["--distcompat-ranks-per-gpu=1"], "distcompat: 1 GPUs, nccl, world size 1 (default), *"),
        (22907, [], "distcompat: 1 GPUs, nccl, world size 1 (default), *"),
    ],
)
def test_one_gpu_is_enough_for_two_ranks(
    *,
    code: int,
    more: list[str],
    header: str,
    nccl_of: Callable[[int], None],
    pytester: pytest.Pytester,
    run_on_gpus: RunOnGpus,
) -> None:
    nccl_of(code)
    pytester.makepyfile(test_it="import pytest\n@pytest.mark.distcompat\ndef test(): pass")
    result = run_on_gpus("--distcompat-gpus=1", *more)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([header])


@pytest.mark.parametrize(
    ("cell", "expected", "checks"),
    [
        ("ddp-fp32-w2", None, set()),
        ("zero3-fp32-w2", None, set()),
        ("fsdp2-fp32-w2", None, {"export", "observers"}),
        ("fsdp1-fp32-w2", None, {"export", "observers"}),
        ("fsdp2-fp32-w2-state_dict_full", "gloo cannot gather whole tensors for a full state dict on a GPU", None),
        ("fsdp2-fp32-w2-cp_2", "gloo cannot gather activations on a GPU", None),
        ("fsdp2-fp32-w4-tp_2", "gloo cannot gather activations on a GPU", None),
        ("fsdp2-fp32-w2-pp_2", "gloo cannot send activations from stage to stage on a GPU", None),
    ],
)
def test_what_gloo_cannot_do_on_a_gpu_is_not_run(cell: str, expected: str | None, checks: set[str] | None) -> None:
    """104 of 387 verdicts ended with SIGSEGV."""
    asked = Cell.parse(cell)
    reason = why_not_through_gloo(asked)
    assert (reason or "").partition(". ")[0] == (expected or "")
    if reason:
        assert "pip install --upgrade 'pytest-distcompat[one-gpu]'" in reason
    if checks is not None:
        blank_checks = {name for name in CHECKS.names() if why_not_through_gloo(asked, name)}
        assert blank_checks == checks


@pytest.mark.parametrize(("visible", "refuses"), [("GPU-a", False), ("MIG-5c1b", True)])
def test_cells_of_deepspeed_are_not_supported_on_mig(
    visible: str, refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each failed with invalid literal for int()."""
    session: Any = SimpleNamespace(
        substitute=None, device="cuda", uses_mig=visible.startswith("MIG-"), shares_through_gloo=lambda size: False
    )
    driver = DRIVERS.get("deepspeed")
    reason = why_not.why_not_supported(driver, Cell.parse("zero2-fp32-w1"), session)
    assert (reason == why_not.NO_MIG) == refuses
    assert why_not.why_not_supported(DRIVERS.get("torch"), Cell.parse("ddp-fp32-w1"), session) is None


SUITE_WITH_CP = """
from pytest_distcompat import CompatSuite, Matrix

class TestX(CompatSuite):
    driver = "torch"
    matrix = Matrix(("fsdp2",), ("fp32",), world_sizes=(2,), options=({}, {"cp": 2}))
"""


@needs_gcc
@pytest.mark.parametrize("code", [22907, 23007])
def test_what_gloo_does_not_support_has_the_reason_and_the_cure(
    code: int, nccl_of: Callable[[int], None], pytester: pytest.Pytester, run_on_gpus: RunOnGpus
) -> None:
    nccl_of(code)
    pytester.makepyfile(test_it=SUITE_WITH_CP)
    result = run_on_gpus("--distcompat-gpus=1", "--distcompat-ranks-per-gpu=2", "--collect-only", "-q")
    items = [line for line in result.outlines if "::" in line]
    text = "\n".join(items)
    is_new = code == 23007
    assert "w2:parity]" in text
    assert ("w2:export]" in text) == is_new
    assert ("w2:observers]" in text) == is_new
    with_cp = [line for line in items if "cp_2" in line]
    if code == 22907:
        assert len(with_cp) == 1
    else:
        assert len(with_cp) > 1


def test_a_default_world_size_above_the_gpus_is_a_usage_error(
    pytester: pytest.Pytester, run_on_gpus: RunOnGpus
) -> None:
    pytester.makepyfile(test_it="import pytest\n@pytest.mark.distcompat\ndef test(): pass")
    options = ("--distcompat-gpus=2", "--distcompat-world-size=4")
    result = run_on_gpus(*options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --distcompat-world-size 4 (option): 4 ranks need 4 GPUs, 2 to use"])
    run_on_gpus(*options, "--distcompat-ranks-per-gpu=2").assert_outcomes(passed=1)


def test_a_suite_oversubscribes_too_and_the_report_says_so(pytester: pytest.Pytester, run_on_gpus: RunOnGpus) -> None:
    pytester.makepyfile(test_it=SUITE)
    options = ("--distcompat-gpus=2", "-k", "active", "--distcompat-report=report.json")

    def report() -> tuple[str, dict[str, str]]:
        data = json.loads(Path(pytester.path / "report.json").read_text(encoding="utf-8"))
        return data["results"][0]["status"], data["session"]["settings"]["ranks_per_gpu"]

    run_on_gpus(*options)
    assert report() == ("skipped", {"value": "1", "from": "default"})
    run_on_gpus(*options, "--distcompat-ranks-per-gpu=2")
    # The stand-in's ranks did nothing, but they were started.
    assert report() == ("failed", {"value": "2", "from": "option"})

"""The runner of stages on a machine with a GPU, on stages that need none; what is installed there; the summary."""

from __future__ import annotations

import importlib
import json
import re
import signal
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat.launch import nccl

HERE = Path(__file__).parents[1] / "gpu"

#: Writes its result; the second argument says how it ends.
COMMAND = """
import json, os, pathlib, sys, time
result, ending = pathlib.Path(sys.argv[1]), sys.argv[2]
with open("ran", "a") as ran:
    ran.write(result.name + "\\n")
if ending == "hangs":
    child = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path("child").write_text(str(child))
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        result.write_text(json.dumps({"interrupted": True}))
        raise
if ending != "writes nothing":
    result.write_text(json.dumps({"name": result.name}))
sys.exit({"fails": 1, "nothing left": 5}.get(ending, 0))
"""


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, which the scripts import from their own directory."""
    monkeypatch.syspath_prepend(str(HERE))
    yield importlib.import_module("stages")
    for name in ("stages", "proof", "install"):
        sys.modules.pop(name, None)


def stage(stages: Any, name: str, ending: str = "passes", **fields: Any) -> Any:
    def command(_work: Path, result: Path) -> list[str]:
        return [sys.executable, "-c", COMMAND, str(result), ending]

    return stages.Stage(name, command, **{"seconds": 0.0, **fields})


def run(stages: Any, tmp_path: Path, *chosen: Any, seconds: float = 300.0, session_seconds: float = 300.0) -> Any:
    """A call, in a working directory of its own, as on a machine that is new each time."""
    earlier = list(tmp_path.glob("work-*"))
    work = tmp_path / f"work-{len(earlier)}"
    deadline = time.monotonic() + seconds
    runner = stages.Runner(chosen, tmp_path / "output", work, deadline, session_seconds)
    runner.run()
    return runner


def statuses(runner: Any) -> dict[str, str]:
    return {name: outcome.status for name, outcome in runner.outcomes.items()}


def test_stages_run_once_whatever_becomes_of_them(stages: Any, tmp_path: Path) -> None:
    chosen = [
        stage(stages, "good"),
        stage(stages, "bad", "fails"),
        stage(stages, "silent", "writes nothing"),
    ]
    first = run(stages, tmp_path, *chosen)
    assert statuses(first) == {"good": "passed", "bad": "failed", "silent": "failed"}
    assert first.outcomes["good"].result == {"name": "good.0.json"}
    assert "it wrote no silent.0.json" in first.outcomes["silent"].tail
    again = run(stages, tmp_path, *chosen)
    assert statuses(again) == statuses(first)
    # Its own directory has what the first call archived, and nobody ran.
    assert (tmp_path / "work-1" / "ran").read_text().split() == ["good.0.json", "bad.0.json", "silent.0.json"]
    assert json.loads((tmp_path / "output" / "results.json").read_text())["done"]


def test_nothing_left_after_an_interruption_is_no_failure(stages: Any, tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    (output / "results.json").write_text('{"stages": {"rest": {"status": "running"}}}')
    runner = run(stages, tmp_path, stage(stages, "rest", "nothing left", nothing_left=5, resumes=True))
    assert statuses(runner) == {"rest": "passed"}


def test_a_stage_that_chose_nothing_has_proved_nothing(stages: Any, tmp_path: Path) -> None:
    runner = run(stages, tmp_path, stage(stages, "empty", "nothing left", nothing_left=5, resumes=True))
    assert statuses(runner) == {"empty": "failed"}


@pytest.mark.nightly
def test_a_stage_that_the_time_limit_cuts_off_runs_again_once(
    stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "GRACE", 3.0)
    chosen = [stage(stages, "long", "hangs"), stage(stages, "next", seconds=100.0)]
    first = run(stages, tmp_path, *chosen, seconds=6.0)
    assert statuses(first) == {"long": "cut off"}
    # It was interrupted as by Ctrl-C, and what it had started is gone.
    assert first.outcomes["long"].result == {"interrupted": True}
    child = (tmp_path / "work-0" / "child").read_text()
    process = Path("/proc", child)
    assert not process.exists() or "zombie" in (process / "status").read_text()
    second = run(stages, tmp_path, *chosen, seconds=6.0)
    assert statuses(second) == {"long": "too long"}
    third = run(stages, tmp_path, *chosen)
    assert statuses(third) == {"long": "too long", "next": "passed"}
    with tarfile.open(tmp_path / "output" / "logs.tar.gz") as archive:
        assert {"long.0.log", "long.1.log", "next.0.log"} <= set(archive.getnames())


@pytest.mark.nightly
def test_a_stage_is_interrupted_from_the_background_too(
    stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "GRACE", 3.0)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        runner = run(stages, tmp_path, stage(stages, "long", "hangs"), seconds=6.0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert runner.outcomes["long"].result == {"interrupted": True}


def test_a_stage_that_had_most_of_a_call_is_too_long_at_once(
    stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "GRACE", 2.0)
    runner = run(stages, tmp_path, stage(stages, "long", "hangs"), seconds=5.0, session_seconds=3.5)
    assert statuses(runner) == {"long": "too long"}


def test_a_stage_that_hangs_is_ended_and_the_next_one_runs(stages: Any, tmp_path: Path) -> None:
    chosen = [stage(stages, "hung", "hangs", limit=2.0), stage(stages, "next")]
    assert statuses(run(stages, tmp_path, *chosen)) == {"hung": "timed out", "next": "passed"}


def test_a_stage_that_was_running_when_the_machine_stopped_is_interrupted(stages: Any, tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    (output / "results.json").write_text('{"stages": {"one": {"status": "running"}}}')
    (output / "logs.tar.gz").write_bytes(b"half an arch")
    runner = run(stages, tmp_path, stage(stages, "one"))
    assert statuses(runner) == {"one": "passed"}
    assert runner.outcomes["one"].cut_off == 1


def test_remaining_time_goes_to_a_stage_that_fits(stages: Any, tmp_path: Path) -> None:
    chosen = [stage(stages, "long", seconds=200.0), stage(stages, "short", seconds=1.0)]
    runner = run(stages, tmp_path, *chosen, seconds=100.0)
    assert statuses(runner) == {"short": "passed"}
    assert runner.open() == ["long"]
    # With a whole call before it the first stage runs, however long it may take.
    runner = run(stages, tmp_path, *chosen, seconds=100.0, session_seconds=100.0)
    assert statuses(runner)["long"] == "passed"


#: Ends only when the other command has begun too, and says where its temporary files lie.
MEETING = """
import json, pathlib, sys, tempfile, time
result, mine, other = sys.argv[1:]
pathlib.Path(mine).touch()
until = time.monotonic() + 60
while not pathlib.Path(other).exists() and time.monotonic() < until:
    time.sleep(0.02)
met = pathlib.Path(other).exists()
pathlib.Path(result).write_text(json.dumps({"met": met, "temporary": tempfile.gettempdir()}))
"""


def test_stages_beside_one_another_run_at_the_same_time_and_share_no_lease(stages: Any, tmp_path: Path) -> None:
    def meeting(name: str, other: str) -> Any:
        def command(_work: Path, result: Path) -> list[str]:
            return [sys.executable, "-c", MEETING, str(result), name, other]

        return stages.Stage(name, command, 0.0, beside="both")

    chosen = [meeting("one", "two"), meeting("two", "one"), stage(stages, "next")]
    runner = run(stages, tmp_path, *chosen)
    assert statuses(runner) == {"one": "passed", "two": "passed", "next": "passed"}
    first = runner.outcomes["one"].result
    second = runner.outcomes["two"].result
    assert first["met"] is True
    assert second["met"] is True
    assert first["temporary"] != second["temporary"]
    assert not Path(first["temporary"]).exists()
    assert not Path(second["temporary"]).exists()


def test_results_move_to_another_machine(stages: Any, tmp_path: Path) -> None:
    run(stages, tmp_path, stage(stages, "one"))
    back = tmp_path / "output"
    for path in back.iterdir():
        path.chmod(0o444)
    stages.take(back, tmp_path / "new")
    chosen = [stage(stages, "one"), stage(stages, "two")]
    deadline = time.monotonic() + 99
    runner = stages.Runner(chosen, tmp_path / "new", tmp_path / "work", deadline, 99)
    assert runner.open() == ["two"]
    runner.forget(["one"])
    runner.run()
    assert (tmp_path / "work" / "ran").read_text().split() == ["one.0.json", "one.0.json", "two.0.json"]


def wheel(directory: Path, name: str, version: str, *requires: str) -> Path:
    path = directory / f"{name}-{version}-py3-none-any.whl"
    lines = [f"Name: {name}", f"Version: {version}"]
    for requirement in requires:
        lines.append(f"Requires-Dist: {requirement}")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(lines))
    return path


def test_wheels_are_for_what_the_machine_lacks(stages: Any, tmp_path: Path) -> None:
    install = importlib.import_module("install")
    wheels = [
        wheel(tmp_path, "pytest_distcompat", "0.1.0", "pytest>=8", 'peft>=0.13; extra == "lora"'),
        wheel(tmp_path, "pytest", "9.2.0"),
        wheel(tmp_path, "pluggy", "1.7.0"),
        wheel(tmp_path, "DeepSpeed", "0.19.8"),
    ]
    read = [install.read(path) for path in wheels]
    (requirement,) = read[0].requires
    assert str(requirement) == "pytest>=8"

    def needed(**installed: str) -> list[str]:
        return [wheel.name for wheel in install.needed(read, installed)]

    assert needed() == ["pytest-distcompat", "pytest", "pluggy", "deepspeed"]
    assert needed(pytest="7.4.0", pluggy="1.0", deepspeed="0.16") == ["pytest-distcompat", "pytest"]
    assert needed(pytest="8.4.0", pluggy="1.0", **{"pytest-distcompat": "0.1.0"}) == ["pytest-distcompat", "deepspeed"]


def test_the_plan_is_the_same_with_and_without_a_gpu(stages: Any, tmp_path: Path) -> None:
    proof = importlib.import_module("proof")
    on_cpu = proof.stages(tmp_path, cpu=True)
    on_gpu = proof.stages(tmp_path, cpu=False)
    names = [stage.name for stage in on_cpu]
    assert names == [stage.name for stage in on_gpu]
    root = str(HERE.parents[1])
    for stage in (*on_cpu, *on_gpu):
        command = stage.command(tmp_path, tmp_path / f"{stage.name}.0.json")
        for argument in map(str, command[1:]):
            if argument.startswith(root):
                assert Path(argument).exists(), command


def test_verdicts_come_before_figures_and_a_call_has_room_for_them(
    stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = importlib.import_module("proof")
    monkeypatch.setattr(proof.os, "cpu_count", lambda: 16)
    plan = proof.stages(tmp_path, cpu=False)
    kinds = list(dict.fromkeys(map(kind_of, plan)))
    assert kinds == ["facts", "gpu", "smoke", "shared", "groups", "default", "throughput", "convergence"]
    suite = stage_named("gpu-suite", plan)
    assert "-n" in suite.command(tmp_path, tmp_path / "gpu-suite.0.json")
    limit = 9 * 60 - stages.GRACE
    seconds = 0.0
    for kind in kinds[:6]:
        alone = [stage.seconds for stage in plan if kind_of(stage) == kind and not stage.beside]
        beside = [stage.seconds for stage in plan if stage.beside == kind]
        seconds += sum(alone) + max(beside, default=0.0)
    assert seconds <= limit
    seconds_on_cpu = sum(stage.seconds for stage in proof.stages(tmp_path, cpu=True))
    assert seconds_on_cpu <= limit


def kind_of(stage: Any) -> str:
    """Return the first word of a stage's name."""
    kind: str = stage.name.partition("-")[0]
    return kind


def stage_named(name: str, plan: list[Any]) -> Any:
    (stage,) = [stage for stage in plan if stage.name == name]
    return stage


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("smoke", {"--distcompat-world-size=1", "--distcompat-ranks-per-gpu=8", "--distcompat-profile=smoke"}),
        ("shared-trainer", {"--distcompat-world-size=2", "--distcompat-ranks-per-gpu=4", "--distcompat-profile=smoke"}),
        ("default-deepspeed", {"--distcompat-world-size=2", "--distcompat-ranks-per-gpu=4"}),
    ],
)
def test_all_drivers_have_one_rank_then_each_two_that_share_the_gpu(
    name: str, expected: set[str], stages: Any, tmp_path: Path
) -> None:
    proof = importlib.import_module("proof")
    chosen = stage_named(name, proof.stages(tmp_path, cpu=False))
    given = set(chosen.command(tmp_path, tmp_path / f"{name}.0.json"))
    assert expected | {"--distcompat-gpus=1"} <= given
    profile = "--distcompat-profile=smoke"
    assert (profile in given) == (profile in expected)


def test_the_list_has_the_order_and_the_seconds(stages: Any) -> None:
    proof = importlib.import_module("proof")
    plan = [
        stage(stages, "facts", seconds=30.0),
        stage(stages, "smoke-torch", seconds=60.0, beside="smoke"),
        stage(stages, "smoke-trainer", seconds=50.0, beside="smoke"),
    ]
    assert proof.plan(plan, {"facts": stages.Outcome("passed")}) == [
        "facts: about 30 s, passed",
        "smoke-torch: about 60 s, beside others of smoke, not yet",
        "smoke-trainer: about 50 s, beside others of smoke, not yet",
        "3 stages, about 90 s",
    ]


@pytest.mark.parametrize(
    ("version", "name", "header"), [((2, 28, 9), "gloo", "gloo"), ((2, 30, 7), "nccl", "NCCL 2.30.7")]
)
def test_gpu_tests_expect_what_the_library_makes_possible(
    version: tuple[int, int, int], name: str, header: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.gpu import conftest

    monkeypatch.setattr(nccl, "library", lambda: nccl.Library(Path("libnccl.so.2"), version))
    assert conftest.backend_of_shared_ranks() == conftest.SharedBackend(name, header)


def test_gpu_tests_say_how_many_ranks_a_gpu_has() -> None:
    """With an NCCL that shares GPUs one GPU has two ranks by default, so that a test of one has to say so."""
    from tests.gpu.conftest import ONE_RANK

    assert ONE_RANK == ("--distcompat-gpus=1", "--distcompat-ranks-per-gpu=1")
    source = (HERE / "test_marked.py").read_text()
    runs = re.findall(r"run_without_warnings\(pytester, (.*?)\)\n", source, flags=re.DOTALL)
    unsaid = [arguments for arguments in runs if "ONE_RANK" not in arguments and "ranks-per-gpu" not in arguments]
    # The one that is about the default.
    assert unsaid == ['"--distcompat-gpus=1"']


def test_a_resumed_suite_skips_items_with_a_result(stages: Any, tmp_path: Path) -> None:
    proof = importlib.import_module("proof")
    first = "pytest_distcompat/suite.py::TestTorch::test[a]"
    second = "pytest_distcompat/suite.py::TestTorch::test[b]"
    (tmp_path / "smoke-torch.0.json").write_text(json.dumps({"results": [{"nodeid": first}]}))
    (tmp_path / "default-torch.0.json").write_text(json.dumps({"results": [{"nodeid": second}]}))
    make = proof.suite("torch", earlier="smoke default")
    command = make(tmp_path, tmp_path / "default-torch.1.json")
    (file,) = argument_files(command)
    assert file.read_text().splitlines() == [f"--deselect={first}", f"--deselect={second}"]
    make = proof.suite("torch", earlier="shared")
    command = make(tmp_path, tmp_path / "shared-torch.0.json")
    assert argument_files(command) == []


def argument_files(command: list[str]) -> list[Path]:
    """Return the files of further arguments, which pytest is given as ``@file``."""
    return [Path(argument.removeprefix("@")) for argument in command if argument.startswith("@")]


def test_the_summary_has_every_figure(stages: Any, tmp_path: Path) -> None:
    proof = importlib.import_module("proof")
    row = {
        "sequence": 2048,
        "seconds": 2.0,
        "tokens_per_second": 8192.0,
        "mfu": 0.41,
        "mfu_attention": 0.45,
        "peak_bytes": 100 << 30,
    }
    throughput = {
        "back_end": "fsdp2",
        "upcast": True,
        "masters": "float32",
        "moments": "float32",
        "batch": 8,
        "rows": [row, {"sequence": 4096, "out_of_memory": "CUDA out of memory"}],
    }
    curve = {"back_end": "zero3", "upcast": False, "masters": "bfloat16", "losses": [5.0, 4.0]}
    marked = {"count": {"failure": 1}, "findings": {"test_a": "failure: no"}}
    groups = {
        "ranks": 1,
        "seconds": {"ours": [0.1, 0.3, 0.2], "later": []},
        "steps": {"CUDA context": 0.4},
    }
    convergence = {"rate": 1e-4, "curves": [curve, {"name": "ddp", "error": "ended with 1"}]}
    outcomes = {
        "facts": stages.Outcome("failed", tail="no such file"),
        "gpu-marked": stages.Outcome("failed", result=marked),
        "throughput-fsdp2-upcast": stages.Outcome("passed", result=throughput),
        "groups": stages.Outcome("timed out", result=groups),
        "convergence": stages.Outcome("failed", result=convergence),
    }
    suites = {"count": {"failed": 1}, "findings": {"smoke-torch: torch ddp-fp32-w1:names": "failed: rank 0"}}
    text = proof.markdown(outcomes, ["default-torch"], suites)
    for expected in (
        "| fsdp2 | yes | float32, float32 | 8 x 2048 | 2.000 | 8192 | 41.0% | 45.0% | 100.0 |",
        "| 8 x 4096 | out of memory |",
        "| ours | 0.200 |",
        "| step of a rank: CUDA context | 0.400 |",
        "| zero3 | no | bfloat16 | 5.000 | 4.500 |",
        "| ddp | ended with 1 |",
        "| default-torch | not yet |",
        "- `gpu-marked: test_a`",
        "- `smoke-torch: torch ddp-fp32-w1:names`",
        "## Output of facts",
    ):
        assert expected in text, text

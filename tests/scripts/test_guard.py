"""The probe raises, at each of its places in turn: the script never notices, and no check passes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat.cell import Cell
from pytest_distcompat.ext.scripts import ScriptRun
from pytest_distcompat.ext.scripts.environment import ProbeConfig, with_probe
from pytest_distcompat.launch.forensics.conclude import RankProcess, conclude
from pytest_distcompat.launch.rank_log import LogReader
from pytest_distcompat.status import Verdict
from pytest_distcompat.trace import ExtraState

from .conftest import PROGRAMS, Launch

pytestmark = pytest.mark.spawn


def calls(*names: str) -> set[str]:
    """A wrapped call is one place before it and one after it."""
    return {*names, *(f"{name}, after the call" for name in names)}


#: In every training.
ALWAYS = {
    "torch.distributed.init_process_group",
    "before an optimizer's step",
    "before an optimizer's step, its gradients",
    "after an optimizer's step",
    "after an optimizer's step, its state",
    "a forward pre-hook of a model",
    "a forward hook of a layer",
    "an operator",
    "the end of the process",
    *calls("torch.autograd.backward", "Optimizer.__init__"),
}
DDP = calls("DistributedDataParallel.__init__")
#: What a training comes by, besides ``ALWAYS``.
PARTS = {
    "loop": {"the closure of an optimizer's step", *calls("torch.save", "torch.load", "LRScheduler.__init__"), *DDP},
    "checkpoints": calls(
        *(f"torch.distributed.checkpoint.{name}" for name in ("save", "async_save", "load")),
        *(f"torch.distributed.checkpoint.state_dict_saver.{name}" for name in ("save", "async_save")),
        "torch.distributed.checkpoint.state_dict_loader.load",
        *(f"torch.distributed.checkpoint.state_dict.{name}_state_dict" for name in ("get", "set")),
        *(f"torch.distributed.checkpoint.state_dict.{name}_optimizer_state_dict" for name in ("get", "set")),
        *(f"safetensors.torch.{name}" for name in ("save_file", "save_model")),
    ),
    "wrappers": calls(
        "FullyShardedDataParallel.__init__", "torch.distributed.fsdp.fully_shard", "torch.compile", "Module.compile"
    ),
    "accelerate": calls(
        *(f"Accelerator.{name}" for name in ("prepare", "prepare_model", "backward", "save_state", "load_state")),
        *(f"Accelerator.{name}" for name in ("save_model", "get_state_dict", "end_training")),
        *("torch.save", "torch.distributed.destroy_process_group"),
        *("Accelerator.register_for_checkpointing", "AveragedModel.__init__"),
    ),
    "trainer": {
        "TrainerCallback.on_step_begin",
        "TrainerCallback.on_train_end",
        *calls("Trainer.__init__", "Trainer.save_model", "Trainer._save_checkpoint", "PreTrainedModel.save_pretrained"),
    },
    "deepspeed": calls(
        *("DeepSpeedEngine.backward", "DeepSpeedEngine.step", "deepspeed.initialize"),
        *("DeepSpeedEngine.save_checkpoint", "DeepSpeedEngine.load_checkpoint"),
    ),
    "lightning": calls("Trainer.save_checkpoint", "Strategy.load_checkpoint", "DistributedDataParallel.__init__"),
}
#: Lightning's own strategies that run on GPUs only; what is put around their method is that of ``Strategy.load_checkpoint``.
ON_GPUS = calls(*(f"{name}Strategy.load_checkpoint" for name in ("DeepSpeed", "FSDP", "ModelParallel")))
LIBRARIES = {
    "accelerate": "accelerate",
    "trainer": "transformers",
    "deepspeed": "deepspeed",
    "lightning": "pytorch_lightning",
}
#: All that torch, Python and the script itself call of ours: each does nothing but call ``guard`` and the original.
DOORS = {
    "guard.attempt",
    "guard.guarded_call",
    "wrappers.wrapped",
    "observe.wrapped",
    "import_hooks.exec_module",
    "import_hooks.find_spec",
    "observe.__call__",
    "observe.__torch_dispatch__",
    "instrumentation.init_process_group",
    "instrumentation.on_step_begin",
    "instrumentation.on_train_end",
    "hosted_rank.excepthook",
    "hosted_rank.exit_",
    "recorder.hook",
    "sitecustomize.find_spec",
}


def broken(directory: Path, part: str, *places: str) -> dict[str, dict[str, Any]]:
    """By place, of these or of all, what came of a training in which the probe raised there; in "" it did not."""
    ProbeConfig().write(directory)
    environment = with_probe({**os.environ, "GLOO_SOCKET_IFNAME": "lo"}, directory)
    command = [sys.executable, str(PROGRAMS / "faulty_probe.py"), str(directory), part, *places]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert not done.returncode, done.stderr
    content: dict[str, dict[str, Any]] = json.loads((directory / "found.json").read_text(encoding="utf-8"))
    return content


def says(place: str) -> str:
    """How every verdict then begins a line."""
    return f"the probe itself failed, at {place}, and saw no more from then on"


def verdict(directory: str | Path, code: int) -> Verdict:
    """That on a run of one rank, which ended with that code."""
    ending = conclude(LogReader(directory, [0]).read(), {0: RankProcess(code)})
    (judged,) = ScriptRun(ending, Cell("ddp", "fp32", 1), Path(directory), "cpu").verdicts("active")
    return judged


def check_broken(part: str, runs: dict[str, dict[str, Any]]) -> None:
    """The script never noticed, and no check passes."""
    sound = runs.pop("")
    assert sound["code"] == 0
    assert "probe itself failed" not in verdict(sound["directory"], 0).message
    assert {*sound["seen"]} >= {*ALWAYS, *PARTS[part]}
    assert {*sound["outside"]} <= DOORS, "called without the guard around it"
    for place, run in runs.items():
        assert (run["losses"], run["code"]) == (sound["losses"], 0), (
            f"the script noticed that the probe failed at {place}"
        )
        outcome = verdict(run["directory"], 0)
        assert not outcome.ok
        assert says(place) in outcome.message


@pytest.mark.nightly
def test_the_probe_fails_in_a_loop(tmp_path: Path) -> None:
    """In one place of each kind; by night in all of them."""
    places = ("torch.autograd.backward", "an operator")
    hooks = ("before an optimizer's step", "the end of the process")
    runs = broken(tmp_path, "loop", *places, *hooks)
    assert set(runs) == {"", *places, *hooks}
    check_broken("loop", runs)


@pytest.mark.nightly
@pytest.mark.parametrize("part", PARTS)
def test_the_probe_fails_anywhere(part: str, tmp_path: Path) -> None:
    pytest.importorskip(LIBRARIES.get(part, "torch"))
    runs = broken(tmp_path, part)
    assert set(runs) > PARTS[part]
    check_broken(part, runs)


@pytest.mark.nightly
def test_every_call_that_is_wrapped_is_one_of_these(tmp_path: Path) -> None:
    """A point that is added later has a training that comes by it."""
    for library in LIBRARIES.values():
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"needs {library}")
    ProbeConfig().write(tmp_path)
    command = [sys.executable, str(PROGRAMS / "wrapped_calls.py")]
    environment = with_probe({**os.environ, "RANK": "0"}, tmp_path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    wrapped = {line.removeprefix("wrapped: ") for line in done.stdout.splitlines() if line.startswith("wrapped: ")}
    assert wrapped
    assert wrapped <= {*ALWAYS, *ON_GPUS}.union(*PARTS.values())


@pytest.mark.nightly
def test_the_probe_fails_in_a_script_that_fails(tmp_path: Path) -> None:
    """Whatever becomes of the probe, the script ends with its own code, and its run has failed."""
    runs = broken(tmp_path, "fails")
    places = ("", "sys.excepthook", "the end of the process", "torch.distributed.init_process_group")
    assert {name: run["code"] for name, run in runs.items()} == dict.fromkeys(places, 1)
    message = "the run failed: rank 0 raised ValueError: what the script raises itself"
    assert verdict(runs[""]["directory"], 1).message == message
    assert not any(verdict(run["directory"], 1).ok for run in runs.values())


@pytest.mark.parametrize(
    "name",
    [
        "torch",
        "accelerate.accelerator",
        "accelerate.state",
        "deepspeed",
        "transformers.modeling_utils",
        "transformers.trainer",
        "transformers.training_args",
        "pytorch_lightning.trainer",
        "pytorch_lightning.strategies",
    ],
)
def test_a_release_without_the_wrapped_functions(name: str, tmp_path: Path) -> None:
    """A library's module is imported, and has none of the names that are to be wrapped."""
    file = tmp_path.joinpath("libraries", *name.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True)
    file.write_text("here = True\n", encoding="utf-8")
    for above in list(file.parents)[: name.count(".")]:
        (above / "__init__.py").touch()
    ProbeConfig().write(tmp_path)
    environment = {**os.environ, "RANK": "0", "DISTCOMPAT_ON_CPU": "1", "PYTHONPATH": str(tmp_path / "libraries")}
    code = f"import {name} as module; print(module.here)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=with_probe(environment, tmp_path), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    if name.endswith("strategies"):
        return  # what has no load_checkpoint of its own is no strategy
    outcome = verdict(tmp_path, 0)
    assert not outcome.ok
    assert says(f"the import of {name}") in outcome.message


@pytest.mark.nightly
def test_a_probe_that_fails_in_a_process_that_is_no_rank(run: Launch, tmp_path: Path) -> None:
    """The launcher imports torch too."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "from pytest_distcompat.ext.scripts import guard, instrumentation\n"
        "def broken(torch): raise RuntimeError('no such thing any more')\n"
        "if 'RANK' not in os.environ: instrumentation.on_import('torch', broken)\n",
        encoding="utf-8",
    )
    script_run = run("ends.py", "well", environment={"PYTHONPATH": str(tmp_path)})
    assert script_run.failed
    assert "the probe failed in a process of the run" in script_run.text()
    assert "no such thing any more" in script_run.text()


@pytest.mark.nightly
def test_a_disk_on_which_ranks_cannot_write(run: Launch, tmp_path: Path) -> None:
    """The note on the CPU bridge is the first line that a rank prints while its script runs."""
    pytest.importorskip("accelerate")
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "for name in os.listdir('/proc/self/fd') if 'RANK' in os.environ else ():\n"
        "    path = f'/proc/self/fd/{name}'\n"
        "    if os.path.exists(path) and os.readlink(path).endswith('.jsonl'):\n"
        "        os.dup2(os.open('/dev/full', os.O_WRONLY), int(name))\n",
        encoding="utf-8",
    )
    script_run = run("prepared_twice.py", "--steps", "3", strategy="ddp", environment={"PYTHONPATH": str(tmp_path)})
    assert script_run.failed
    assert "the probe failed in a process of the run" in script_run.text()
    assert "No space left on device" in script_run.text()
    assert [script_run.output_of(rank).count("trained to the end") for rank in (0, 1)] == [1, 1]


@pytest.mark.nightly
def test_a_model_that_is_prepared_twice(run: Launch) -> None:
    """More steps than are looked at in full: then hooks are taken off while torch goes through them."""
    pytest.importorskip("accelerate")
    script_run = run("prepared_twice.py", "--steps", "7", strategy="ddp")
    script_run.check("active", "optimizer", "dtypes")
    assert [loss is not None for loss in script_run.losses[0]] == [True] * 7


def test_a_rank_needs_no_package_but_those_of_its_script(tmp_path: Path) -> None:
    """As under ``uv run``, whose environment has the script's packages alone."""
    program = (
        "import sys, pathlib\n"
        "sys.modules.update(dict.fromkeys(['psutil', 'pytest', 'filelock', 'msgspec']))\n"
        "from pytest_distcompat.ext.scripts import instrumentation, hosted_rank, recorder\n"
        "rank = hosted_rank.HostedRank(pathlib.Path(sys.argv[1]), 0)\n"
        "rank.begin()\n"
        "rank.fail(ValueError('mine'))\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    events = LogReader(tmp_path, [0]).read()[0]
    assert [event.name for event in events] == ["start", "error"]


@pytest.mark.parametrize("steps", [0, 5])
def test_an_environment_without_this_package(steps: int, tmp_path: Path) -> None:
    """A Python that has nothing installed, as that of ``uv run`` has only what the script asks for."""
    venv.create(tmp_path / "venv", with_pip=False)
    run = tmp_path / "run"
    run.mkdir()
    ProbeConfig(steps, blocks=("Block",), extra_state={"average": ExtraState(changes=False)}).write(run)
    python = tmp_path / "venv" / "bin" / "python"
    environment = {"RANK": "0", "PATH": os.environ["PATH"]}
    subprocess.run([str(python), "-c", ""], env=with_probe(environment, run), check=True)
    assert not list(run.glob("probe-*.failed"))
    assert [event.name for event in LogReader(run, [0]).read()[0]] == ["start", "done"]

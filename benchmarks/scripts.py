"""The scripts that are installed with accelerate, unmodified, on two CPU ranks: ours beside today's way, in one run.

``python benchmarks/scripts.py [--limit 60] [--only test_ops ...]`` prints a Markdown table, and under it what was said of each
run that failed. Every script runs every way in turn:

- *today*: what accelerate's own tests call, ``execute_subprocess_async`` of ``accelerate launch``, which asserts that the exit
  code is not above 0. On the CPU each process is then alone, so it is run a second time, *for the CPU*
  (``ACCELERATE_USE_CPU``). Both get ``timeout=LIMIT``; what still runs ``GRACE`` seconds later is killed by this benchmark.
- *ours*: ``pytest_distcompat.ext.scripts.launch`` with ``strategy="ddp"`` and ``timeout=LIMIT``.

``test_checkpointing.py`` wants a model and data of the hub, and two more packages: it gets the stand-ins that our tests have.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from machine import PACKAGES, expect, measured_on  # type: ignore[import-not-found] # a script imports from its own directory

from pytest_distcompat.ext.scripts import ScriptRun, launch

OFFLINE = Path(__file__).parents[1] / "tests" / "scripts" / "programs" / "offline"
HOME = "accelerate.test_utils.scripts."
NAMES = (
    "test_ops",
    "test_sync",
    "test_script",
    "external_deps.test_checkpointing",
    "test_distributed_data_loop",
)
#: Seconds by which today's way may be late before this benchmark ends it.
GRACE = 15.0
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(OFFLINE)}

#: What a test of today's is, reduced to its call; seconds are those of the call, its imports are paid once a session.
TODAY = """
import json, sys, time
from accelerate.test_utils import execute_subprocess_async
command, limit, said = json.loads(sys.argv[1]), float(sys.argv[2]), ""
began = time.monotonic()
print(json.dumps({"began": began}), file=sys.stderr, flush=True)
try:
    execute_subprocess_async(command, timeout=limit, quiet=True, echo=False)
except Exception as error:
    said = str(error).strip().splitlines()[0][-60:]
print(json.dumps({"seconds": time.monotonic() - began, "said": said}))
"""


@dataclass
class Told:
    """What one way says of one script: its verdict, after how many seconds, and what else there is to say."""

    verdict: str
    seconds: float
    more: list[str] = field(default_factory=list)


def today(
    module: str, arguments: Sequence[str], limit: float, environment: Mapping[str, str]
) -> Told:
    """accelerate's own way, ended by us where it does not end itself."""
    command = [
        "accelerate",
        "launch",
        "--multi_gpu",
        "--num_processes=2",
        "--num_machines=1",
        "--mixed_precision=no",
    ]
    command += ["--dynamo_backend=no", "--main_process_port=0", "-m", module, *arguments]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    process = subprocess.Popen(
        [sys.executable, "-c", TODAY, json.dumps(command), str(limit)],
        env={**os.environ, **ENVIRONMENT, **environment, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    began = json.loads(next(line for line in process.stderr if line.startswith('{"began"')))[
        "began"
    ]
    try:
        output, _ = process.communicate(timeout=limit + GRACE)
    except subprocess.TimeoutExpired:
        return _ended(process, began, limit)
    found = json.loads(output.splitlines()[-1])
    return Told(f"failed: {found['said']}" if found["said"] else "passed", found["seconds"])


def _ended(process: subprocess.Popen[str], began: float, limit: float) -> Told:
    """Kill it as a CI job does, by its first process and then the launcher; and count who lives on."""
    seconds = time.monotonic() - began
    below = psutil.Process(process.pid).children(recursive=True)
    ranks = [one for one in below if one.environ().get("RANK")]
    for pid in (process.pid, *(one.pid for one in below if one not in ranks)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    time.sleep(2)
    alive = [one for one in ranks if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    for one in (*alive, *below):
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
    row = f"none: {seconds - limit:.0f} s after its time limit it still waited"
    return Told(
        row, seconds, [f"killed with its launcher by SIGKILL, it left {len(alive)} ranks running"]
    )


def ours(module: str, arguments: Sequence[str], limit: float) -> Told:
    """The same module by ``launch``."""
    settings = {
        "launcher": "accelerate",
        "strategy": "ddp",
        "environment": ENVIRONMENT,
        "allow_failure": True,
    }
    began = time.monotonic()
    run = launch("-m", module, *arguments, timeout=limit, world_size=2, **settings)  # type: ignore[arg-type]
    seconds = time.monotonic() - began
    if not run.failed:
        return Told("passed", seconds)
    return Told(f"{run.ending.kind}: {run.ending.headline()}", seconds, lines(run, module))


def lines(run: ScriptRun, module: str) -> list[str]:
    """Where in the script each rank was at the time limit."""
    file = module.rpartition(".")[2] + ".py"
    found = []
    for end in run.ending.ranks:
        at = re.search(rf'File ".*{re.escape(file)}", line (\d+) in (\w+)', end.stack)
        if at:
            found.append(f"rank {end.rank}: {file}:{at[1]}, in {at[2]}")
    return found


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--only", nargs="*", default=NAMES)
    arguments = parser.parse_args()
    expect(parser, arguments.only, NAMES)
    print(f"{measured_on(*PACKAGES)}; time limit {arguments.limit:g} s\n")
    print(
        "| script | today | s | today, for the CPU | s | ours | s |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    more: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        bert = Path(directory, "bert")
        subprocess.run(
            [sys.executable, str(OFFLINE / "make_bert.py"), str(bert)],
            check=True,
            capture_output=True,
            env=os.environ,
        )
        for name in arguments.only:
            row = []
            for number, way in enumerate(("today", "today, for the CPU", "ours")):
                given = (
                    HOME + name,
                    _arguments(name, bert, Path(directory, f"{name}-{number}")),
                    arguments.limit,
                )
                cpu = {"ACCELERATE_USE_CPU": "true"} if number == 1 else {}
                found = ours(*given) if way == "ours" else today(*given, cpu)
                row += [found.verdict.replace("|", "/"), f"{found.seconds:.1f}"]
                more += [f"- `{name}`, {way}: {text}" for text in found.more]
            print(f"| `{name.rpartition('.')[2]}` | {' | '.join(row)} |", flush=True)
    print("\n" + "\n".join(more))


def _arguments(name: str, bert: Path, output: Path) -> list[str]:
    if not name.endswith("test_checkpointing"):
        return []
    output.mkdir()
    return [
        "--model_name_or_path",
        str(bert),
        "--output_dir",
        str(output),
        "--partial_train_epoch",
        "1",
    ]


if __name__ == "__main__":
    main()

"""Where the CPU seconds of a suite's session go: imports, model, wrapping, steps, files, probe, judging and reporting.

``python benchmarks/cpu_seconds.py [--profile smoke] [--workers 2] [--functions 0]`` runs the built-in suite on CPU ranks with a
sampler in each of its processes, and prints a Markdown table. ``--functions 20`` also lists the functions of this package in
which most of a rank's seconds go, with all that they call. What no sample saw is the kernel's: forks, exits, the memory that
processes give back.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from machine import PACKAGES, measured_on  # type: ignore[import-not-found] # a script imports from its own directory

from pytest_distcompat.launch.process import adopt_orphans

RANK = "worker.py:run"
#: What a rank does, by the first pattern that its stack matches.
PHASES = {
    "rank: probe": r"pytest_distcompat/probe/|worker\.py:_(snapshot|attach|called)",
    "rank: records of what it did": r"/(decode|rank_log)\.py|worker\.py:_end;",
    "rank: imports after the fork": r"importlib\._bootstrap>:_find_and_load",
    "rank: process group": r"init_process_group|:new_group|init_distributed|init_device_mesh|destroy_process_group",
    "rank: model": r"worker\.py:_(build_model|reload)",
    "rank: reference in one process": r"worker\.py:_(reference|rounded)",
    "rank: data loaders, metrics": r"worker\.py:_(rows|resumed_rows|moved_rows|metrics)",
    "rank: files": r":_?save\w*|:load\w*|:_load\w*|worker\.py:_(files|export|damage)|checkpoint/",
    "rank: steps": r"/drivers/\w+\.py:step|:_run_epoch|:(forward|backward|evaluate)|worker\.py:_evaluate",
    "rank: wrapping and optimizer": r"worker\.py:_train",
    "rank: the rest": rf"{RANK}",
}
#: What the other processes do.
OTHERS = {
    "fork server: imports": r"launch/(preload|hosting|server|forking)\.py|launcher_process\.py",
    "pytest: judging": r"judge\.py|/checks/",
    "pytest: reports": r"/report/|/reporting/",
    "pytest: collection": r":pytest_collection|:perform_collect",
    "pytest and the rest": r"",
}


def samples(directory: Path) -> Iterator[tuple[float, str]]:
    """Yield seconds of CPU time, and the stack in which they went."""
    for path in directory.glob("*.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        number = sum(found["stacks"].values())
        for stack, times in found["stacks"].items():
            yield found["seconds"] * times / number, stack


def phase(stack: str) -> str:
    rules = PHASES if RANK in stack else OTHERS
    return next(name for name, pattern in rules.items() if re.search(pattern, stack))


def main() -> None:
    """Run the session and print where its seconds went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", default="smoke")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--functions", type=int, default=0)
    options = parser.parse_args()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--pyargs",
        "pytest_distcompat.suite",
        "-p",
        "no:cacheprovider",
        "-q",
    ]
    command += [
        "--distcompat-gpus",
        "0",
        "--distcompat-profile",
        options.profile,
        "-n",
        str(options.workers),
    ]
    adopt_orphans()
    with tempfile.TemporaryDirectory() as name:
        sampler = str(Path(__file__).with_name("cpu_sampler"))
        path = os.pathsep.join(filter(None, (sampler, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "CPU_SAMPLES": name, "PYTHONPATH": path}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        # Launcher processes end after the session that started them.
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
        found = list(samples(Path(name)))
    print(f"{measured_on(*PACKAGES, 'pytest')}\n\n{done.stdout.splitlines()[-1]}\n")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = used.ru_utime + used.ru_stime
    seconds, functions = defaultdict[str, float](float), defaultdict[str, float](float)
    for spent, stack in found:
        seconds[phase(stack)] += spent
        if RANK in stack:
            ours = {
                one.rpartition("pytest_distcompat/")[2]
                for one in stack.split(";")
                if "pytest_distcompat/" in one
            }
            for one in ours:
                functions[one] += spent
    seconds["kernel: forks, exits, memory"] = total - sum(seconds.values())
    print("| of the CPU | seconds | part |\n| --- | --- | --- |")
    for name in (*PHASES, *OTHERS, "kernel: forks, exits, memory"):
        print(f"| {name} | {seconds[name]:.1f} | {seconds[name] / total:.0%} |")
    print(f"| all | {total:.1f} | |")
    for function, spent in sorted(functions.items(), key=lambda one: -one[1])[: options.functions]:
        print(f"{spent:7.2f} {function}")


if __name__ == "__main__":
    main()

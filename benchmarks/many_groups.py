"""What many process groups, one after another, leave in the processes that start them and on the machine: nothing.

``python benchmarks/many_groups.py [--groups 500] [--settled 20] [--reuse]`` runs so many marked tests of 2 gloo ranks in one
pytest and prints a Markdown table: what there was after the first ``settled`` of them, and after all. With ``--reuse`` all run
on the same ranks, which are sampled too. It exits with 1 if anything grew that must not. What grows is told by the trend of
some twenty samples (the median of the slopes between any two of them), so that one allocation between two samples is no growth.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from machine import measured_on  # type: ignore[import-not-found] # a script imports from its own directory

TESTS = """
import os
import pytest
import torch
from torch import distributed

@pytest.mark.distcompat(world_size=2)
# One more than is looked at: ranks that live on leave within the last one.
@pytest.mark.parametrize("number", range({groups} + 1))
def test_group(process_group, number):
    with open("ports.txt", "a") as file:
        file.write(os.environ["MASTER_PORT"] + "\\n")
    total = torch.ones(8)
    distributed.all_reduce(total)
    assert total.tolist() == [2.0] * 8
"""

#: Looks after single tests, when their ranks are gone. In files of its own: temporary ones and the runs' are counted.
SAMPLER = """
import gc
import json
import os
import sys
import time
from pathlib import Path
import psutil

count = 0

def size(process):
    # What it wrote and shares with nobody. Pages of libraries, which the kernel takes and gives back as it likes, are not.
    totals = Path("/proc", str(process.pid), "smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in totals if line.startswith("Private_Dirty:"))

def opened(process):
    # Where each of its descriptors leads; one that is closed meanwhile is none.
    for path in Path("/proc", str(process.pid), "fd").iterdir():
        try:
            yield f"{{process.name()}}: {{os.readlink(path)}}"
        except OSError:
            pass

def sockets(tree):
    # Those that listen, and those that are connected, of these processes; of both ends that are here one is enough.
    found = [one for process in tree for one in process.net_connections("inet")]
    return [sum(one.status == status for one in found) for status in (psutil.CONN_LISTEN, psutil.CONN_ESTABLISHED)]

def waiting():
    # Closed ports of stores that the kernel keeps for a minute; the tests report their numbers.
    ports = {{int(line) for line in Path("ports.txt").read_text().split()}}
    lines = [line.split() for kind in ("tcp", "tcp6") for line in Path("/proc/net", kind).read_text().splitlines()[1:]]
    ends = [{{int(end.rpartition(":")[2], 16) for end in line[1:3]}} for line in lines if line[3] == "06"]
    return sum(bool(both & ports) for both in ends)

def look():
    tree = [psutil.Process(), *psutil.Process().children(recursive=True)]
    tree = [process for process in tree if process.status() != psutil.STATUS_ZOMBIE]
    base = Path("basetemp/distcompat")
    descriptors = sorted(name for process in tree for name in opened(process))
    return descriptors, {{
        "processes": len(tree),
        "threads": sum(process.num_threads() for process in tree),
        "file descriptors": len(descriptors),
        **dict(zip(("listening sockets", "connections"), sockets(tree))),
        "ports of stores in TIME_WAIT": waiting(),
        "objects of pytest": sys.getallocatedblocks(),
        "memory of pytest, KiB": size(tree[0]) // 1024,
        "memory of all, KiB": sum(map(size, tree)) // 1024,
        "files in /dev/shm": len(os.listdir("/dev/shm")),
        "temporary files": sum(len(names) + len(directories) for _, directories, names in os.walk(os.environ["TMPDIR"])),
        "files of runs, kept by pytest": sum(len(names) for _, _, names in os.walk(base)),
        "size of runs, KiB": sum(path.stat().st_size for path in base.rglob("*") if path.is_file()) // 1024,
    }}

def pytest_runtest_logfinish():
    global count
    if "RANK" in os.environ:
        # Ranks load this too.
        return
    count += 1
    if count not in {samples}:
        return
    # The least of some looks: what a thread opens and closes again in between has not grown.
    # What waits for the collector has not grown.
    gc.collect()
    looks = []
    for _ in range(5):
        looks.append(look())
        time.sleep(0.05)
    found = {{name: min(counts[name] for _, counts in looks) for name in looks[0][1]}}
    descriptors = min((names for names, _ in looks), key=len)
    with open("samples.jsonl", "a") as file:
        file.write(json.dumps([count, found, descriptors]) + "\\n")
"""

#: Samples after the first groups: enough for a trend.
SAMPLES = 20

#: What may grow, by how much for each group; anything else may not. A report of each test is pytest's own to keep.
GROWS = {
    # They go after a minute: as many as the groups of a minute need.
    "ports of stores in TIME_WAIT": 4.0,
    # Python's own count: 60 a group in five runs. Pages have a wider limit, for in the same runs they grew by 5 to 19 KiB a
    # group: the allocator takes pages as they come to be free.
    "objects of pytest": 100.0,
    "memory of pytest, KiB": 48.0,
    "memory of all, KiB": 64.0,
    "files of runs, kept by pytest": 20.0,
    "size of runs, KiB": 16.0,
}

#: On ranks that live on, pytest keeps something of each test in each of them, and torch's flight recorder of each collective.
GROWS_ON_SHARED_RANKS = {**GROWS, "memory of all, KiB": 96.0}


#: After so many groups: the counts, and where descriptors led.
Sample = tuple[int, dict[str, Any], list[str]]


def run(groups: int, settled: int, *, reuse: bool) -> list[Sample]:
    """Return the samples from after ``settled`` groups to after all. Raises SystemExit if a test failed."""
    taken = sorted(
        {settled + (groups - settled) * number // SAMPLES for number in range(SAMPLES + 1)}
    )
    with tempfile.TemporaryDirectory(prefix="many-groups-") as directory:
        here = Path(directory)
        (here / "temporary").mkdir()
        (here / "test_groups.py").write_text(TESTS.format(groups=groups), encoding="utf-8")
        (here / "conftest.py").write_text(SAMPLER.format(samples=taken), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--basetemp",
            "basetemp",
        ]
        if reuse:
            command += ["--distcompat-reuse=session", f"--distcompat-reuse-limit={groups + 1}"]
        environment = {**os.environ, "TMPDIR": str(here / "temporary"), "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            command, cwd=here, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{done.stdout[-5000:]}\n{done.stderr[-5000:]}")
        return [
            json.loads(line)
            for line in (here / "samples.jsonl").read_text(encoding="utf-8").splitlines()
        ]


def trend(points: list[tuple[int, float]]) -> float:
    """Return the growth a group: the median of the slopes between any two points (Theil and Sen), which outliers do not move."""
    pairs = itertools.combinations(points, 2)
    return statistics.median(
        (there - here) / (after - before) for (before, here), (after, there) in pairs
    )


def main() -> None:
    """Run, print, and say by the exit code whether anything leaked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=500)
    parser.add_argument("--settled", type=int, default=20)
    parser.add_argument("--reuse", action="store_true", help="all tests on the same ranks")
    given = parser.parse_args()
    if given.groups <= given.settled:
        parser.error("--groups must be more than --settled")
    samples = run(given.groups, given.settled, reuse=given.reuse)
    (_, before, at_first), (_, after, at_last) = samples[0], samples[-1]
    print(f"{measured_on('torch')}\n")
    print(
        f"| | after {given.settled} groups | after {given.groups} | a group |\n| --- | --- | --- | --- |"
    )
    allowed = GROWS_ON_SHARED_RANKS if given.reuse else GROWS
    grew = []
    for name, count in after.items():
        a_group = trend([(number, counts[name]) for number, counts, _ in samples])
        print(f"| {name} | {before[name]} | {count} | {a_group:.2f} |")
        if a_group > allowed.get(name, 0.0):
            grew.append(name)
    if grew:
        new = Counter(at_last) - Counter(at_first)
        print("\ndescriptors that were not there before:", *sorted(new.elements()), sep="\n  ")
        raise SystemExit(f"grew: {', '.join(grew)}")


if __name__ == "__main__":
    main()

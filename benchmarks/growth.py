"""How the plugin's own costs grow: with ranks, with nodes, with items to collect, with verdicts in a report.

``python benchmarks/growth.py ranks`` times a marked test of a collective at 2 to 64 ranks beside torchrun's.
``python benchmarks/growth.py nodes`` does it with 8 ranks on 1 to 8 nodes that are all on this machine.
``python benchmarks/growth.py items`` times ``pytest --co`` of marked tests, with and without the plugin.
``python benchmarks/growth.py reports --report r.json`` repeats the verdicts of a session, and times JSON and page;
with ``--browser``, the path of a Chromium, it opens the page too (needs playwright).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from machine import measured_on  # type: ignore[import-not-found] # a script imports from its own directory

RANKS = (2, 4, 8, 16, 32, 64)
NODES = (1, 2, 4, 8)
#: The ranks that all nodes have together.
ON_NODES = 8
ITEMS = (1000, 5000, 20000)
VERDICTS = (1000, 10000, 100000)
REAL = Path(__file__).parents[1] / "tests" / "report" / "real.json"

TESTS = """
import pytest, torch
from torch import distributed

CASES = [pytest.param(n, m, marks=pytest.mark.distcompat(world_size=n, nodes=m)) for n, m in {shapes} for _ in range(3)]

@pytest.mark.parametrize(("size", "nodes"), CASES)
def test_it(process_group, size, nodes):
    total = torch.ones(8)
    distributed.all_reduce(total)
    assert total.tolist() == [float(size)] * 8
"""
SCRIPT = """
import torch
from torch import distributed
distributed.init_process_group("gloo")
total = torch.ones(8)
distributed.all_reduce(total)
assert total.tolist() == [float(distributed.get_world_size())] * 8
distributed.destroy_process_group()
"""
MANY = """
import pytest

@pytest.mark.distcompat(world_size=2)
@pytest.mark.parametrize("number", range({items}))
def test_it(number): ...
"""
#: Writes the report of the first argument in the format of the second; prints seconds, and in MB the memory that it takes beside
#: the report.
WRITE = """
import gc, sys, time
from pathlib import Path
from pytest_distcompat.report.document import Report
from pytest_distcompat.report.write import write_report

def memory(name):
    return int(Path("/proc/self/status").read_text().partition(name + ":")[2].split()[0]) / 1000

report = Report.read(Path(sys.argv[1]))
gc.collect()
# Sets the peak to what is resident now: https://docs.kernel.org/filesystems/proc.html
Path("/proc/self/clear_refs").write_text("5")
before, began = memory("VmRSS"), time.perf_counter()
write_report(Path(sys.argv[2]), report)
print(time.perf_counter() - began, memory("VmHWM") - before, before)
"""
#: In the page: the seconds of a filter and of the layout after it.
FILTER = """() => {
  const filters = document.getElementById("filters"), began = performance.now();
  filters.text.value = "fsdp2";
  filters.dispatchEvent(new Event("input"));
  document.body.offsetHeight;
  return (performance.now() - began) / 1000;
}"""


def ranks(sizes: tuple[int, ...]) -> None:
    """Print the seconds of a warm test, the fastest of three, and of torchrun, by the number of ranks."""
    beside_torchrun("ranks", [(size, 1) for size in sizes])


def nodes(numbers: tuple[int, ...]) -> None:
    """Print the same for ``ON_NODES`` ranks, by the number of nodes."""
    beside_torchrun("nodes", [(ON_NODES, number) for number in numbers])


def beside_torchrun(name: str, shapes: list[tuple[int, int]]) -> None:
    """Print a row for each number of ranks and of nodes, under the one of that name."""
    print(f"| {name} | marked test, warm | torchrun |")
    print("| --- | --- | --- |")
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "test_it.py").write_text(TESTS.format(shapes=shapes))
        (Path(directory) / "script.py").write_text(SCRIPT)
        command = [
            "-m",
            "pytest",
            "-q",
            "--distcompat-gpus=0",
            "--distcompat-warm-timeout=600",
            "--junitxml",
            "r.xml",
        ]
        subprocess.run(
            [sys.executable, *command], cwd=directory, check=True, stdout=subprocess.DEVNULL
        )
        warm: dict[tuple[int, ...], list[float]] = {}
        for case in ET.parse(Path(directory) / "r.xml").iter("testcase"):
            size, number = map(int, re.findall(r"\d+", case.attrib["name"])[:2])
            warm.setdefault((size, number), []).append(float(case.attrib["time"]))
        for size, number in shapes:
            began = time.perf_counter()
            torchrun(directory, size, number)
            label = size if name == "ranks" else number
            print(
                f"| {label} | {min(warm[size, number]):.2f} | {time.perf_counter() - began:.1f} |",
                flush=True,
            )


def torchrun(directory: str, size: int, number: int) -> None:
    """Run the script by torchrun on so many ranks, once for each node."""
    line = ["-m", "torch.distributed.run", f"--nproc-per-node={size // number}"]
    line += (
        ["--standalone"]
        if number == 1
        else [f"--nnodes={number}", "--rdzv-backend=c10d", "--local-addr=127.0.0.1"]
    )
    line += [f"--rdzv-endpoint=127.0.0.1:{free_port()}"] if number > 1 else []
    started = [
        subprocess.Popen(
            [sys.executable, *line, "script.py"], cwd=directory, stderr=subprocess.DEVNULL
        )
        for _ in range(number)
    ]
    assert [process.wait() for process in started] == [0] * number


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def items(numbers: tuple[int, ...]) -> None:
    """Print the seconds of collecting marked tests with the plugin and without."""
    print("| marked tests | with the plugin | without |")
    print("| --- | --- | --- |")
    for number in numbers:
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "test_it.py").write_text(MANY.format(items=number))
            found = [
                collected(directory),
                collected(directory, "-p", "no:distcompat", "-W", "ignore"),
            ]
        print(f"| {number} | {found[0]:.1f} | {found[1]:.1f} |", flush=True)


def collected(directory: str, *more: str) -> float:
    """Return the seconds of collecting the tests of a directory."""
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "pytest", "--co", "-q", *more],
        cwd=directory,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - began


def reports(source: Path, numbers: tuple[int, ...], browser: str) -> None:
    """Print what writing a report takes, and what a page takes to open and to filter."""
    kinds = "json", "html"
    heads = [f"{kind}, {what}" for kind in kinds for what in ("seconds", "MB", "MB of memory")]
    print(f"| verdicts | {' | '.join(heads)} | the report, MB of memory | opened | filtered |")
    print(f"|{' --- |' * 10}")
    for number in numbers:
        with tempfile.TemporaryDirectory() as directory:
            files = {kind: Path(directory) / f"{kind}.{kind}" for kind in kinds}
            large = Path(directory) / "large.json"
            made = repeated(json.loads(source.read_text(encoding="utf-8")), number)
            large.write_text(json.dumps(made), encoding="utf-8")
            row = [str(len(made["results"]))]
            for file in files.values():
                out = subprocess.run(
                    [sys.executable, "-c", WRITE, str(large), str(file)],
                    check=True,
                    capture_output=True,
                    text=True,
                )
                seconds, memory, whole = map(float, out.stdout.split())
                row += [f"{seconds:.1f}", f"{file.stat().st_size / 1e6:.1f}", f"{memory:.0f}"]
            row.append(f"{whole:.0f}")
            row += (
                [f"{one:.1f}" for one in in_browser(files["html"], browser)]
                if browser
                else ["", ""]
            )
        print(f"| {' | '.join(row)} |", flush=True)


def repeated(report: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the report with its suites repeated, under other names, until it has at least so many verdicts."""
    made: dict[str, Any] = {**report, "results": [], "cells": [], "runs": []}
    for copy in range(-(-number // len(report["results"]))):
        for name in ("results", "cells", "runs"):
            text = json.dumps(report[name]).replace("::Test", f"::Copy{copy}Test")
            made[name] += json.loads(text)
        for one in made["runs"][-len(report["runs"]) :]:
            one["id"] += f"-{copy}"
        for one in made["cells"][-len(report["cells"]) :]:
            one["runs"] = [f"{run}-{copy}" for run in one["runs"]]
    return made


def in_browser(page: Path, browser: str) -> tuple[float, float]:
    """Return the seconds until the page can be used, and those of a filter."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=browser, args=["--no-sandbox"]
        ).new_page()
        opened.set_default_timeout(600_000)
        began = time.perf_counter()
        opened.goto(page.as_uri(), wait_until="commit")
        opened.locator("#shown:not(:empty)").wait_for()
        return time.perf_counter() - began, float(opened.evaluate(FILTER))


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("ranks", "nodes", "items", "reports"))
    parser.add_argument("--report", type=Path, default=REAL, help="a JSON report of a real session")
    parser.add_argument("--browser", default="", help="the path of a Chromium")
    parser.add_argument(
        "--numbers", type=int, nargs="+", default=(), help="ranks, nodes, items or verdicts"
    )
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    print(measured_on("torch", "pytest"))
    numbers = tuple(given.numbers)
    if given.what == "ranks":
        ranks(numbers or RANKS)
    elif given.what == "nodes":
        nodes(numbers or NODES)
    elif given.what == "items":
        items(numbers or ITEMS)
    else:
        reports(given.report, numbers or VERDICTS, given.browser)


if __name__ == "__main__":
    main()

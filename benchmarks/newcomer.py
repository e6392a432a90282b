"""A newcomer's path, timed: from an empty directory to the first matrix; and what the examples weigh and take.

``python benchmarks/newcomer.py [--examples]``, with the package installed in this Python. The first table is two paths: a
directory with nothing in it, and one with a trainer and its driver (examples/my_trainer without its suite). Nothing is
edited in either.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from machine import PACKAGES, measured_on  # type: ignore[import-not-found] # a script imports from its own directory

EXAMPLES = Path(__file__).parents[1] / "examples"
INIT = ("distcompat", "init")
PYTEST = ("pytest", "tests/test_distcompat.py", "--distcompat-gpus", "0", "-q")


def timed(where: Path, line: Sequence[str]) -> tuple[float, str]:
    """Seconds and output of a command that lies beside this Python; ends with the output if the command fails."""
    began = time.perf_counter()
    done = subprocess.run(
        [str(Path(sys.executable).with_name(line[0])), *line[1:]],
        cwd=where,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(line)} in {where}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return time.perf_counter() - began, done.stdout


def walk(where: Path, title: str) -> None:
    """The two commands, and a row for the path."""
    first, _ = timed(where, INIT)
    second, output = timed(where, PYTEST)
    cells = len(set(re.findall(r"^  (\w+-\w+-w\d\S*)  ", output, re.MULTILINE)))
    verdicts, runs = re.search(r"(\d+) verdicts from (\d+)", output).groups()  # type: ignore[union-attr]
    print(
        f"| {title} | 2 | 0 | {first:.1f} | {second:.1f} | {cells} | {verdicts} from {runs} lives |",
        flush=True,
    )


def lines(path: Path) -> int:
    """The lines that somebody wrote: neither empty nor a comment."""
    text = path.read_text(encoding="utf-8")
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") for line in text.splitlines()
    )


def weigh(driver: Path) -> tuple[int, int, int, int]:
    """Lines of the trainer, its driver, its suite and its marked test."""
    files = [path for path in driver.parent.glob("*.py") if path != driver]
    tests = [path for path in files if path.name.startswith("test_")]
    marked = [path for path in tests if path.stem.endswith("_ranks")]
    trainer = [path for path in files if path not in tests]
    suite = [path for path in tests if path not in marked]
    first, second, third, fourth = (
        sum(map(lines, some)) for some in (trainer, [driver], suite, marked)
    )
    return first, second, third, fourth


def examples(directory: Path) -> None:
    """What each example weighs, and how long its tests take, in a directory of its own as an adopter's is."""
    print(
        "\n| example | trainer | driver | suite | marked test | tests take |\n| --- | --- | --- | --- | --- | --- |"
    )
    for driver in sorted(EXAMPLES.glob("*/*_driver.py")):
        where = Path(shutil.copytree(driver.parent, directory / driver.parent.name))
        seconds, _ = timed(
            where, ("pytest", "--distcompat-gpus", "0", "-q", "-p", "no:cacheprovider")
        )
        print(
            f"| {driver.parent.name} | {' | '.join(map(str, weigh(driver)))} | {seconds:.0f} s |",
            flush=True,
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", action="store_true")
    given = parser.parse_args()
    print(f"{measured_on(*PACKAGES)}\n")
    print(
        "| from | commands | edits | init, s | first matrix, s | cells | verdicts |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    with tempfile.TemporaryDirectory() as directory:
        # Nothing here needs the network. Leases of other runs on this machine are not waited for: they lie elsewhere.
        os.environ.update(
            {"HF_HUB_OFFLINE": "1", "RES_OPTIONS": "timeout:1 attempts:1", "TMPDIR": directory}
        )
        empty, own = Path(directory, "empty"), Path(directory, "own")
        empty.mkdir()
        walk(empty, "an empty directory")
        own.mkdir()
        for path in (EXAMPLES / "my_trainer").glob("my_*.py"):
            shutil.copy(path, own)
        walk(own, "a trainer and its driver")
        if given.examples:
            examples(Path(directory))


if __name__ == "__main__":
    main()

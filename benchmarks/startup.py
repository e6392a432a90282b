"""What an ordinary pytest run pays for having the plugin installed.

``python benchmarks/startup.py [--runs 20]`` makes two virtual environments, pytest alone and pytest with this plugin,
and times ``pytest --co`` on an unrelated directory in both by turns. It also says whether torch (put there as a stub
that would tell) was imported.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
import venv
from pathlib import Path

from machine import measured_on  # type: ignore[import-not-found] # a script imports from its own directory

ROOT = Path(__file__).parents[1]

#: A conftest that writes down whether anything imported torch. The stub makes "not imported" mean more than "not installed".
CONFTEST = """
import sys
from pathlib import Path

def pytest_unconfigure():
    heavy = sorted({"torch", "numpy", "psutil", "pynvml", "filelock"} & set(sys.modules))
    Path("imported.txt").write_text(" ".join(heavy))
"""


def make(where: Path, *packages: str) -> Path:
    """A virtual environment with these packages and a stub of torch; its interpreter."""
    venv.create(where, with_pip=True)
    python = where / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    site = subprocess.run(
        [python, "-c", "import site; print(site.getsitepackages()[0])"],
        check=True,
        capture_output=True,
        text=True,
    )
    (Path(site.stdout.strip()) / "torch.py").write_text("")
    return python


def once(python: Path, where: Path) -> float:
    """Seconds of one ``pytest --co``."""
    # Bytecode is cached, as it is for everybody who runs a test suite twice.
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    command = [str(python), "-m", "pytest", "--co", "-q", "-p", "no:cacheprovider"]
    began = time.perf_counter()
    subprocess.run(command, cwd=where, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        tests = base / "unrelated"
        tests.mkdir()
        (tests / "conftest.py").write_text(CONFTEST)
        (tests / "test_it.py").write_text("def test_it():\n    pass\n")
        without = make(base / "without", "pytest")
        with_plugin = make(base / "with", "pytest", str(ROOT))
        seconds: dict[str, list[float]] = {"without": [], "with": []}
        for number in range(runs + 1):
            for name, python in (("without", without), ("with", with_plugin)):
                one = once(python, tests)
                if number:  # the first of each writes bytecode
                    seconds[name].append(one)
        imported = (tests / "imported.txt").read_text() or "none"
    pairs = [b - a for a, b in zip(seconds["without"], seconds["with"], strict=True)]
    print(f"{measured_on('pytest')}; {runs} runs each, by turns\n")
    print("| pytest --co | median ms | min ms |\n| --- | --- | --- |")
    for name, found in seconds.items():
        print(
            f"| {name} the plugin | {1000 * statistics.median(found):.1f} | {1000 * min(found):.1f} |"
        )
    fastest = 1000 * (min(seconds["with"]) - min(seconds["without"]))
    print(
        f"| difference | {1000 * statistics.median(pairs):.1f} (median of pairs) | {fastest:.1f} |"
    )
    print(f"\nheavy modules imported with the plugin: {imported}")


if __name__ == "__main__":
    main()

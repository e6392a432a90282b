"""A script of transformers.Trainer, stopped and resumed under each strategy: does it train as if it had never stopped?

``python benchmarks/scripts_resume.py [--only fsdp2 ...]`` prints a Markdown table: what ``resume_roundtrip`` says of the
unmodified script of our tests (two CPU ranks, float32, five steps, saved after three), after how many seconds. ``full`` and
``sharded`` are FSDP's ``state_dict_type``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from machine import PACKAGES, measured_on  # type: ignore[import-not-found] # a script imports from its own directory

from pytest_distcompat.ext.scripts import resume_roundtrip
from pytest_distcompat.failures import Incompatible, RunFailedError

PROGRAM = Path(__file__).parents[1] / "tests" / "scripts" / "programs" / "trainer_script.py"
CELLS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp1 full": {"strategy": "fsdp1", "options": {"state_dict": "full"}},
    "fsdp1 sharded": {"strategy": "fsdp1"},
    "fsdp2 full": {"strategy": "fsdp2", "options": {"state_dict": "full"}},
    "fsdp2 sharded": {"strategy": "fsdp2"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
}
#: Lines of what was found that a row shows.
SHOWN = 3


def said(settings: dict[str, Any]) -> str:
    """What a test of that strategy would say."""
    try:
        resume_roundtrip(
            PROGRAM,
            ["--output", "{output}", "--steps", "{steps}", "--save-at", "{save_at}"],
            resume=["--resume", "{checkpoint}"],
            save_at=3,
            total=5,
            launcher="accelerate",
            world_size=2,
            environment={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            **settings,
        )
    except (Incompatible, RunFailedError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return "<br>".join((f"**{type(error).__name__}**", *lines[:SHOWN])).replace("|", "/")
    return "passed: the same bit by bit"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=("",))
    only = parser.parse_args().only
    print(f"{measured_on(*PACKAGES)}\n")
    print("| strategy | `resume_roundtrip` of a Trainer script | s |\n| --- | --- | --- |")
    for name, settings in CELLS.items():
        if any(one in name for one in only):
            began = time.monotonic()
            result = said(settings)
            print(f"| {name} | {result} | {time.monotonic() - began:.0f} |", flush=True)


if __name__ == "__main__":
    main()

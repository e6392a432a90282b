"""What the probe costs a script, and that it changes nothing: seconds a step and losses with it and without it.

``python benchmarks/scripts_probe.py [--rounds 3] [--hidden 128] [--only fsdp2 ...]`` prints a Markdown table. The script is
accelerate's loop on a small Llama (``scripts_steps.py``), two CPU ranks, float32. Each round runs every strategy twice,
without the probe and with it, one after the other. The probe looks at the first ``WATCHED`` steps in full, and at losses only
in those that follow: both kinds are compared with the same steps of the runs without it, the first of each left out, by the
median of rank 0 over all rounds.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections import defaultdict
from pathlib import Path

from machine import PACKAGES, expect, measured_on  # type: ignore[import-not-found] # a script imports from its own directory

from pytest_distcompat.ext.scripts import ScriptRun, launch

STRATEGIES = ("ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3")
WATCHED, STEPS = 10, 30
PROGRAM = Path(__file__).with_name("scripts_steps.py")


def run(strategy: str, hidden: int, watch_steps: int) -> ScriptRun:
    """One run; a failed one ends the benchmark."""
    return launch(
        PROGRAM,
        *("--steps", str(STEPS), "--hidden", str(hidden)),
        launcher="accelerate",
        strategy=strategy,
        world_size=2,
        watch_steps=watch_steps,
        environment={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )


def losses(one: ScriptRun) -> list[list[str]]:
    """Bit by bit, as each rank printed them."""
    return [
        re.findall(r"^step \d+ loss (\S+)", one.output_of(rank), re.MULTILINE) for rank in range(2)
    ]


def seconds(one: ScriptRun) -> list[float]:
    """Of each step of rank 0."""
    return [
        float(said)
        for said in re.findall(r"^step .* seconds (\S+)", one.output_of(0), re.MULTILINE)
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--only", nargs="*", default=STRATEGIES)
    arguments = parser.parse_args()
    expect(parser, arguments.only, STRATEGIES)
    kinds = {"watched": slice(1, WATCHED), "later": slice(WATCHED + 1, STEPS)}
    found: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    alike: dict[str, bool] = dict.fromkeys(arguments.only, True)
    for _ in range(arguments.rounds):
        for strategy in arguments.only:
            bare, probed = (run(strategy, arguments.hidden, watch) for watch in (0, WATCHED))
            assert len(losses(bare)[0]) == STEPS, bare.text()
            alike[strategy] &= losses(bare) == losses(probed)
            for kind, which in kinds.items():
                for watch, one in ((0, bare), (WATCHED, probed)):
                    found[strategy, kind, watch] += seconds(one)[which]
    print(f"{measured_on(*PACKAGES)}; hidden size {arguments.hidden}, {arguments.rounds} rounds\n")
    print(
        "| strategy | ms a step without | watched in full: ms | x | later steps: ms without | with | x | losses equal |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for strategy in arguments.only:
        cells = []
        for kind in kinds:
            bare_ms, probed_ms = (
                1000 * statistics.median(found[strategy, kind, watch]) for watch in (0, WATCHED)
            )
            cells += [f"{bare_ms:.1f}", f"{probed_ms:.1f}", f"{probed_ms / bare_ms:.2f}"]
        print(f"| {strategy} | {' | '.join(cells)} | {'bit by bit' if alike[strategy] else 'NO'} |")


if __name__ == "__main__":
    main()

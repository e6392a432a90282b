"""Case E's convergence: one model, one learning rate, every back end, with and without the upcast.

``python benchmarks/convergence.py --json curves.json --svg curves.svg`` trains a small Llama for 500 steps on Python's own
source files, byte by byte, from the same weights and on the same batches under every back end, and prints the loss at some
steps. ``--device cpu --model bytes_tiny --steps 20`` tries it without a GPU.

``--ranks 1 2 4`` trains under the first back end over so many ranks instead, each with its own batches: at the same learning
rate, and at one that grows with the ranks, as the batch of a step does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from back_ends import SHAPES, dtypes, prepare, step  # type: ignore[import-not-found] # a script imports from its own directory
from machine import PACKAGES, measured_on  # type: ignore[import-not-found] # a script imports from its own directory

BACK_ENDS = ("ddp", "fsdp2", "zero2", "zero3")
COLOURS = ("#1f77b4", "#d62728", "#7f7f7f", "#2ca02c")
#: How many steps' losses a point of a curve is the mean of, for a picture that can be read.
WINDOW = 10


def text() -> bytes:
    """Return the standard library's modules, in the order of their names: some megabytes that every machine has."""
    library = Path(sysconfig.get_path("stdlib"))
    return b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train in this process, and return the loss of each step."""
    import torch

    prepared = prepare(
        arguments.back_end,
        SHAPES[arguments.model],
        arguments.device,
        arguments.batch,
        arguments.rate,
        upcast=arguments.upcast,
        recompute=False,
    )
    device = prepared.accelerator.device
    data = torch.frombuffer(bytearray(text()), dtype=torch.uint8).long()
    rank, ranks = prepared.accelerator.process_index, prepared.accelerator.num_processes
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(arguments.steps):
        starts = torch.randint(
            0, len(data) - arguments.sequence, (arguments.batch,), generator=generator
        )
        tokens = torch.stack(
            [data[start : start + arguments.sequence] for start in starts.tolist()]
        ).to(device)
        losses.append(prepared.accelerator.reduce(step(prepared, tokens).float(), "mean"))
    return {
        "back_end": arguments.back_end,
        "upcast": arguments.upcast,
        "ranks": ranks,
        "rate": arguments.rate,
        "parameters": prepared.parameters,
        "losses": [float(loss) for loss in losses],
        **dtypes(prepared),
    }


@dataclass(frozen=True)
class Plan:
    """One curve. ``dashed`` is the other of two that have a colour."""

    name: str
    colour: str
    dashed: bool
    back_end: str
    upcast: bool
    ranks: int
    rate: float

    def command(self, path: Path, arguments: argparse.Namespace) -> list[str]:
        """Return the command that trains it, and writes its losses to ``path``."""
        start = [sys.executable]
        if self.ranks > 1:
            start += [
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={self.ranks}",
            ]
        found = [
            *start,
            __file__,
            "--back-end",
            self.back_end,
            "--json",
            str(path),
            f"--rate={self.rate}",
        ]
        found.append("--upcast" if self.upcast else "--no-upcast")
        return [
            *found,
            *(
                f"--{name}={getattr(arguments, name)}"
                for name in ("model", "device", "batch", "sequence", "steps")
            ),
        ]


def plans(arguments: argparse.Namespace) -> list[Plan]:
    """Return the curves that are asked for."""
    back_ends, rate = arguments.back_ends, arguments.rate
    if not arguments.ranks:
        return [
            Plan(
                f"{back_end}, {'upcast' if upcast else 'no upcast'}",
                colour,
                not upcast,
                back_end,
                upcast,
                1,
                rate,
            )
            for back_end, colour in zip(back_ends, COLOURS, strict=False)
            for upcast in (True, False)
        ]
    return [
        Plan(
            f"{ranks} ranks, {name}" if ranks > 1 else "1 rank",
            colour,
            grows,
            back_ends[0],
            True,
            ranks,
            rate * times,
        )
        for ranks, colour in zip(arguments.ranks, COLOURS, strict=False)
        for grows, times, name in ((False, 1, f"{rate:g}"), (True, ranks, f"{ranks} x {rate:g}"))
        if not grows or ranks > 1
    ]


def all_of_them(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Train each curve in processes of its own, ``--jobs`` at a time: what counts is the loss, not the time."""
    waiting = plans(arguments)
    curves = []
    with tempfile.TemporaryDirectory() as directory:
        running: list[tuple[subprocess.Popen[bytes], Path, Plan]] = []
        while waiting or running:
            while waiting and len(running) < arguments.jobs:
                plan = waiting.pop(0)
                path = Path(directory) / f"{len(waiting)}.json"
                running.append((subprocess.Popen(plan.command(path, arguments)), path, plan))
            process, path, plan = running.pop(0)
            curve = {"name": plan.name, "colour": plan.colour, "dashed": plan.dashed}
            if process.wait() or not path.exists():
                # The curves of the others are worth having.
                curves.append({**curve, "error": f"ended with {process.returncode}"})
                continue
            curves.append({**curve, **json.loads(path.read_text(encoding="utf-8"))})
    return curves


def smoothed(losses: list[float]) -> list[float]:
    """Return the means of consecutive steps."""
    return [
        statistics.mean(losses[start : start + WINDOW]) for start in range(0, len(losses), WINDOW)
    ]


def table(curves: list[dict[str, Any]]) -> list[str]:
    """Rows in Markdown: the mean loss of the first and last steps, and how far it is from the first curve on the way."""
    lines = [
        f"| | masters | moments | loss, first {WINDOW} | halfway | last {WINDOW} | most above the first row |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    reference: list[float] = []
    for curve in curves:
        if "error" in curve:
            lines.append(f"| {curve['name']} | {curve['error']} | | | | | |")
            continue
        means = smoothed(curve["losses"])
        reference = reference or means
        above = max(mean - other for mean, other in zip(means, reference, strict=True))
        figures = (means[0], means[len(means) // 2], means[-1], above)
        words = (curve["name"], curve["masters"], curve["moments"])
        lines.append(f"| {' | '.join((*words, *(f'{figure:.3f}' for figure in figures)))} |")
    return lines


def picture(curves: list[dict[str, Any]], title: str, width: int = 760, height: int = 420) -> str:
    """Return the curves as SVG: full lines with the upcast or at the same rate, dashed ones without it or at another."""
    drawn = [(curve, smoothed(curve["losses"])) for curve in curves if "losses" in curve]
    steps = max((len(curve["losses"]) for curve, _ in drawn), default=1)
    highest = max((max(means) for _, means in drawn), default=1.0)
    lowest = min((min(means) for _, means in drawn), default=0.0)
    left, right, top, bottom = 56, 150, 34, 40
    across, down = width - left - right, height - top - bottom

    def x(number: float) -> float:
        return left + across * number / steps

    def y(loss: float) -> float:
        return top + down * (highest - loss) / ((highest - lowest) or 1.0)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for part in range(6):
        loss, number = lowest + (highest - lowest) * part / 5, steps * part / 5
        parts += [
            f'<line x1="{left}" y1="{y(loss):.1f}" x2="{left + across}" y2="{y(loss):.1f}" stroke="#ddd"/>',
            f'<text x="{left - 6}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:.2f}</text>',
            f'<text x="{x(number):.1f}" y="{top + down + 18}" text-anchor="middle">{number:.0f}</text>',
        ]
    parts.append(f'<text x="{left + across / 2}" y="{height - 6}" text-anchor="middle">step</text>')
    for row, (curve, means) in enumerate(drawn):
        style = f'stroke="{curve["colour"]}" stroke-width="1.6" fill="none"'
        style += ' stroke-dasharray="5 4"' if curve["dashed"] else ""
        points = " ".join(
            f"{x((nth + 0.5) * WINDOW):.1f},{y(mean):.1f}" for nth, mean in enumerate(means)
        )
        line = top + 14 + 18 * row
        parts += [
            f'<polyline points="{points}" {style}/>',
            f'<line x1="{left + across + 10}" y1="{line}" x2="{left + across + 34}" y2="{line}" {style}/>',
            f'<text x="{left + across + 40}" y="{line + 4}">{curve["name"]}</text>',
        ]
    return "\n".join((*parts, "</svg>\n"))


def main() -> None:
    """Train under all back ends, or under one in this process, and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--back-ends", nargs="+", choices=BACK_ENDS, default=list(BACK_ENDS))
    parser.add_argument("--model", choices=SHAPES, default="bytes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--jobs", type=int, default=1, help="how many back ends at a time")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    parser.add_argument(
        "--ranks",
        nargs="+",
        type=int,
        default=(),
        help="numbers of ranks to compare, at two rates each",
    )
    parser.add_argument(
        "--back-end", choices=BACK_ENDS, help="train under this one, in this process"
    )
    parser.add_argument("--upcast", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    if arguments.back_end:
        found = train(arguments)
        if os.environ["RANK"] == "0":
            arguments.json.write_text(json.dumps(found), encoding="utf-8")
        # Whatever a library does at its end may hang; nothing is left to do.
        sys.stdout.flush()
        os._exit(0)
    curves = all_of_them(arguments)
    title = f"Loss at learning rate {arguments.rate:g}, loaded in bfloat16"
    if arguments.json:
        found = {
            "rate": arguments.rate,
            "steps": arguments.steps,
            "model": arguments.model,
            "curves": curves,
        }
        arguments.json.write_text(json.dumps(found), encoding="utf-8")
    if arguments.svg:
        arguments.svg.write_text(picture(curves, title), encoding="utf-8")
    print(f"{measured_on(*PACKAGES)}, learning rate {arguments.rate:g}, {arguments.steps} steps\n")
    print("\n".join(table(curves)))
    if any("error" in curve for curve in curves):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

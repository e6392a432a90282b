"""Case E's convergence: one model, one learning rate, every back end, with and without the upcast.

``python benchmarks/convergence.py --json curves.json --svg curves.svg`` trains a small Llama for 500 steps on Python's own
source files, byte by byte, from the same weights and on the same batches under every back end, and prints the loss at some
steps. ``--device cpu --model bytes_tiny --steps 20`` tries it without a GPU.
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
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from back_ends import SHAPES, dtypes, prepare, step  # type: ignore[import-not-found] # a script imports from its own directory
from machine import PACKAGES, measured_on  # type: ignore[import-not-found] # a script imports from its own directory

BACK_ENDS = ("ddp", "fsdp2", "zero2", "zero3")
COLOURS = {"ddp": "#1f77b4", "fsdp2": "#d62728", "zero2": "#7f7f7f", "zero3": "#2ca02c"}
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
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(arguments.steps):
        starts = torch.randint(0, len(data) - arguments.sequence, (arguments.batch,), generator=generator)
        tokens = torch.stack([data[start : start + arguments.sequence] for start in starts.tolist()]).to(device)
        losses.append(step(prepared, tokens))
    return {
        "back_end": arguments.back_end,
        "upcast": arguments.upcast,
        "parameters": prepared.parameters,
        "losses": [float(loss) for loss in losses],
        **dtypes(prepared),
    }


def all_of_them(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Train under every back end, each in a process of its own, ``--jobs`` at a time: what counts is the loss, not the time."""
    waiting = [(back_end, upcast) for back_end in arguments.back_ends for upcast in (True, False)]
    curves = []
    with tempfile.TemporaryDirectory() as directory:
        running: list[tuple[subprocess.Popen[bytes], Path, str]] = []
        while waiting or running:
            while waiting and len(running) < arguments.jobs:
                back_end, upcast = waiting.pop(0)
                path = Path(directory) / f"{back_end}-{upcast}.json"
                command = [sys.executable, __file__, "--back-end", back_end, "--json", str(path)]
                command.append("--upcast" if upcast else "--no-upcast")
                names = ("model", "device", "batch", "sequence", "steps", "rate")
                command += [f"--{name}={getattr(arguments, name)}" for name in names]
                running.append((subprocess.Popen(command), path, f"{back_end}, upcast: {upcast}"))
            process, path, name = running.pop(0)
            if process.wait() or not path.exists():
                # The curves of the others are worth having.
                curves.append({"name": name, "error": f"ended with {process.returncode}"})
                continue
            curves.append({"name": name, **json.loads(path.read_text(encoding="utf-8"))})
    return curves


def smoothed(losses: list[float]) -> list[float]:
    """Return the means of consecutive steps."""
    return [statistics.mean(losses[start : start + WINDOW]) for start in range(0, len(losses), WINDOW)]


def table(curves: list[dict[str, Any]]) -> list[str]:
    """Rows in Markdown: the mean loss of the first and last steps, and how far it is from the first curve on the way."""
    lines = [
        f"| back end | upcast | masters | moments | loss, first {WINDOW} | halfway | last {WINDOW} | most above the first row |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    reference: list[float] = []
    for curve in curves:
        if "error" in curve:
            lines.append(f"| {curve['name']} | {curve['error']} | | | | | | |")
            continue
        means = smoothed(curve["losses"])
        reference = reference or means
        above = max(mean - other for mean, other in zip(means, reference, strict=True))
        figures = (means[0], means[len(means) // 2], means[-1], above)
        words = (curve["back_end"], "yes" if curve["upcast"] else "no", curve["masters"], curve["moments"])
        lines.append(f"| {' | '.join((*words, *(f'{figure:.3f}' for figure in figures)))} |")
    return lines


def picture(curves: list[dict[str, Any]], title: str, width: int = 760, height: int = 420) -> str:
    """Return the curves as SVG: full lines with the upcast, dashed ones without."""
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
        style = f'stroke="{COLOURS[curve["back_end"]]}" stroke-width="1.6" fill="none"'
        style += "" if curve["upcast"] else ' stroke-dasharray="5 4"'
        points = " ".join(f"{x((nth + 0.5) * WINDOW):.1f},{y(mean):.1f}" for nth, mean in enumerate(means))
        name = f"{curve['back_end']}, {'upcast' if curve['upcast'] else 'no upcast'}"
        line = top + 14 + 18 * row
        parts += [
            f'<polyline points="{points}" {style}/>',
            f'<line x1="{left + across + 10}" y1="{line}" x2="{left + across + 34}" y2="{line}" {style}/>',
            f'<text x="{left + across + 40}" y="{line + 4}">{name}</text>',
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
    parser.add_argument("--back-end", choices=BACK_ENDS, help="train under this one, in this process")
    parser.add_argument("--upcast", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    if arguments.back_end:
        arguments.json.write_text(json.dumps(train(arguments)), encoding="utf-8")
        # Whatever a library does at its end may hang; nothing is left to do.
        sys.stdout.flush()
        os._exit(0)
    curves = all_of_them(arguments)
    title = f"Loss at learning rate {arguments.rate:g}, loaded in bfloat16"
    if arguments.json:
        found = {"rate": arguments.rate, "steps": arguments.steps, "model": arguments.model, "curves": curves}
        arguments.json.write_text(json.dumps(found), encoding="utf-8")
    if arguments.svg:
        arguments.svg.write_text(picture(curves, title), encoding="utf-8")
    print(f"{measured_on(*PACKAGES)}, learning rate {arguments.rate:g}, {arguments.steps} steps\n")
    print("\n".join(table(curves)))
    if any("error" in curve for curve in curves):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""Case E's throughput: tokens/s, seconds a step, MFU and peak memory of a Llama-shaped model under one back end.

``python benchmarks/throughput.py --back-end fsdp2`` trains 7, 3 or 1 billion random weights, as many as fit the free memory of
one GPU, 8 sequences a step, first of 2048 and then of 4096 tokens, and prints a table. ``--model 7b`` takes that size,
``--no-upcast`` leaves the optimizer bfloat16 weights, ``--json FILE`` writes the figures. Where the shortest sequence does not
fit, it is halved. On several GPUs: ``torchrun --nproc-per-node 4 benchmarks/throughput.py --child ...``. ``--device cpu --model
tiny`` tries it without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from back_ends import BACK_ENDS, SHAPES, dtypes, largest_model, prepare, step  # type: ignore[import-not-found] # a script imports from its own directory
from machine import PACKAGES, measured_on  # type: ignore[import-not-found] # a script imports from its own directory

from pytest_distcompat.cost import PEAK

RATE = 1e-5
#: The model's size is chosen by the GPU's free memory.
AUTO = "auto"
#: No shorter sequence is tried.
SHORTEST = 128


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train in this process, and return what each length of sequence took."""
    import torch

    cuda = arguments.device == "cuda"
    began = time.perf_counter()
    if arguments.model == AUTO:
        free = torch.cuda.mem_get_info()[0]
        arguments.model = largest_model(arguments.back_end, free, upcast=arguments.upcast)
        print(
            f"{arguments.back_end}: {arguments.model} fits {free / 2**30:.0f} GiB",
            file=sys.stderr,
            flush=True,
        )
    shape = SHAPES[arguments.model]
    prepared = prepare(
        arguments.back_end,
        shape,
        arguments.device,
        arguments.batch,
        RATE,
        upcast=arguments.upcast,
        recompute=arguments.recompute,
    )
    device = prepared.accelerator.device
    found: dict[str, Any] = {
        "back_end": arguments.back_end,
        "upcast": arguments.upcast,
        "recompute": arguments.recompute,
        "model": arguments.model,
        "parameters": prepared.parameters,
        "batch": arguments.batch,
        "ranks": prepared.accelerator.num_processes,
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "rows": [],
    }
    peak = next((value for name, value in PEAK.items() if name in found["device"]), None)
    for sequence in arguments.sequences:
        tokens = torch.randint(0, shape.vocabulary, (arguments.batch, sequence), device=device)
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        seconds = []
        try:
            for _ in range(arguments.warm_up + arguments.steps):
                started = time.perf_counter()
                loss = step(prepared, tokens)
                if cuda:
                    torch.cuda.synchronize(device)
                seconds.append(time.perf_counter() - started)
        except torch.OutOfMemoryError as error:
            found["rows"].append(
                {"sequence": sequence, "out_of_memory": str(error).partition("\n")[0]}
            )
            break
        found.setdefault("ready_after", time.perf_counter() - began - sum(seconds))
        found |= dtypes(prepared)
        took = statistics.median(seconds[arguments.warm_up :])
        rate = arguments.batch * sequence / took
        # Palm's appendix B (https://arxiv.org/abs/2204.02311): operations a token, without and with those of attention.
        plain = 6 * prepared.parameters
        attention = 12 * shape.layers * shape.hidden * sequence
        found["rows"].append(
            {
                "sequence": sequence,
                "seconds": took,
                "first": seconds[0],
                "slowest": max(seconds[arguments.warm_up :]),
                "tokens_per_second": rate,
                "mfu": plain * rate / peak if peak else None,
                "mfu_attention": (plain + attention) * rate / peak if peak else None,
                "peak_bytes": torch.cuda.max_memory_allocated(device)
                if cuda
                else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "reserved_bytes": torch.cuda.max_memory_reserved(device) if cuda else None,
                "loss": float(loss),
            }
        )
    return found


def halving(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure in a process of its own, and again with half the sequence while not even the shortest fits."""
    lengths = sorted(arguments.sequences)
    too_long: list[dict[str, Any]] = []
    while True:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "found.json"
            command = [
                sys.executable,
                __file__,
                "--child",
                *_forwarded(arguments, lengths),
                "--json",
                str(path),
            ]
            # Pieces of a size that is no longer asked for are given back: https://docs.pytorch.org/docs/stable/notes/cuda.html
            environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
            done = subprocess.run(command, env=environment, check=False)
            if done.returncode or not path.exists():
                raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        first = found["rows"][0]
        if "out_of_memory" not in first or lengths[0] <= SHORTEST:
            return {**found, "rows": [*found["rows"], *too_long]}
        too_long = [first, *too_long]
        lengths = [lengths[0] // 2]


def _forwarded(arguments: argparse.Namespace, lengths: list[int]) -> list[str]:
    names = ("back_end", "model", "device", "batch", "steps", "warm_up")
    values = [f"--{name.replace('_', '-')}={getattr(arguments, name)}" for name in names]
    switches = [
        "--upcast" if arguments.upcast else "--no-upcast",
        "--recompute" if arguments.recompute else "--no-recompute",
    ]
    return [*values, *switches, "--sequences", *map(str, lengths)]


def table(found: dict[str, Any]) -> list[str]:
    """Rows in Markdown."""
    lines = [
        "| back end | upcast | masters | sequence | seconds a step | tokens/s | MFU | with attention | peak GiB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found["rows"]:
        head = f"| {found['back_end']} | {'yes' if found['upcast'] else 'no'} | {found.get('masters', '')} | {row['sequence']}"
        if "out_of_memory" in row:
            lines.append(f"{head} | out of memory | | | | |")
            continue
        parts = [
            "" if row[name] is None else f"{row[name]:.1%}" for name in ("mfu", "mfu_attention")
        ]
        figures = (
            f"{row['seconds']:.3f}",
            f"{row['tokens_per_second']:.0f}",
            *parts,
            f"{row['peak_bytes'] / 2**30:.1f}",
        )
        lines.append(f"{head} | {' | '.join(figures)} |")
    return lines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--back-end", choices=BACK_ENDS, required=True)
    parser.add_argument(
        "--model", choices=(AUTO, *SHAPES), default=AUTO, help="auto: the largest that fits the GPU"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequences", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--upcast", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--recompute", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help="measure in this process, as one rank")
    arguments = parser.parse_args()
    if arguments.device == "cpu" and arguments.model == AUTO:
        parser.error("--device cpu needs --model: tiny is for a machine without a GPU")
    found = measure(arguments) if arguments.child else halving(arguments)
    if arguments.json and int(os.environ.get("RANK", "0")) == 0:
        arguments.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if not arguments.child:
        print(
            f"{measured_on(*PACKAGES)}, {found['device']}, {found['parameters'] / 1e9:.2f}e9 parameters\n"
        )
        print("\n".join(table(found)))


if __name__ == "__main__":
    main()

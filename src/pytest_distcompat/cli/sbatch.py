"""``sbatch``: write a Slurm job script that runs a pytest session over nodes."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    """Add the subcommand to the parser's."""
    sbatch = commands.add_parser(
        "sbatch",
        help="write a Slurm job script for a session over nodes",
        description="Write a Slurm job script to standard output. What follows -- is given to pytest.",
        epilog="example: distcompat sbatch --nodes 2 --gpus-per-node 8 --time 00:30:00 -- tests/test_matrix.py > night.sbatch",
    )
    sbatch.add_argument("--nodes", type=int, default=2, help="number of nodes (2)")
    sbatch.add_argument("--gpus-per-node", type=int, default=0, metavar="N", help="GPUs of each node (0: CPU and gloo)")
    sbatch.add_argument("--time", default="01:00:00", help="Slurm's time limit of the job (01:00:00)")
    sbatch.add_argument("--partition", default="", help="Slurm's partition (default: the cluster's)")
    sbatch.add_argument("pytest", nargs="*", metavar="ARGUMENT", help="what pytest runs")
    sbatch.set_defaults(call=_sbatch)


def _sbatch(options: argparse.Namespace) -> int:
    wanted = {
        "job-name": "distcompat",
        "nodes": options.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": options.gpus_per_node,
        "time": options.time,
        "partition": options.partition,
        # pytest itself gets the signal before the limit, so that it ends its nodes and writes its reports.
        "signal": "B:INT@60",
    }
    pytest = [
        sys.executable,
        "-m",
        "pytest",
        "--distcompat-nodes",
        str(options.nodes),
        "--distcompat-executor",
        "slurm",
    ]
    pytest += ["--distcompat-gpus", str(options.gpus_per_node), *options.pytest]
    lines = ["#!/bin/bash", *(f"#SBATCH --{name}={value}" for name, value in wanted.items() if value)]
    lines += [f"cd {shlex.quote(str(Path.cwd()))}", f"exec {shlex.join(pytest)}"]
    print("\n".join(lines))
    return 0

"""The commands ``distcompat join`` and ``distcompat sbatch``, for sessions over several machines.

``distcompat join 10.0.0.1:29500 --token-file token`` makes this machine a *node* of a pytest
session that runs elsewhere: it runs an agent (``agent``), which starts ranks here until the session
ends. The token is a secret that pytest's process and its nodes share. Users, Slurm and Ray start
it. ``distcompat sbatch --nodes 2 -- tests`` prints a job script for Slurm that runs pytest over the
nodes of the job: pytest starts ``distcompat join`` on each by ``srun``.

The command line calls ``add`` by the entry point group ``pytest_distcompat.commands``. Each
subcommand is a function of the parsed options that returns the exit code.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import socket
import sys
from pathlib import Path
from typing import Any

from pytest_distcompat.cli.output import named_in_errors
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.user_input import read_address

#: Texts of ``sbatch`` that become part of the script: the option, a pattern that the whole text
#: must match, and the words for it in an error. The forms of a time limit:
#: https://slurm.schedmd.com/sbatch.html#OPT_time
_TEXTS = (
    ("time", r"(\d+-)?\d+(:\d+){0,2}", "a time limit of Slurm, as 90, 01:30:00 or 2-12:00:00"),
    ("partition", r"[\w.,+-]+", "names of partitions"),
)


def add(commands: Any) -> None:
    """Add the subcommands; ``commands`` is what argparse's ``add_subparsers`` returned."""
    join = commands.add_parser(
        "join",
        help="be a further node of a pytest session",
        description="Join a pytest session that was started with --distcompat-nodes, "
        "and run its ranks here until it ends.",
    )
    join.add_argument(
        "session", metavar="HOST:PORT", help="where that pytest listens (--distcompat-listen)"
    )
    join.add_argument(
        "--token-file",
        required=True,
        metavar="FILE",
        help="the session's token; - for standard input",
    )
    join.add_argument(
        "--name",
        default=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        help="the node's name in verdicts (default: Slurm's, else the host's)",
    )
    join.add_argument(
        "--wait",
        type=float,
        default=60,
        metavar="SECONDS",
        help="how long to wait for the session (60)",
    )
    # For agents that pytest's process starts itself: they end when their parent process does.
    join.add_argument("--with-parent", action="store_true", help=argparse.SUPPRESS)
    join.set_defaults(call=_join)
    sbatch = commands.add_parser(
        "sbatch",
        help="write a Slurm job script for a session over nodes",
        description="Write a Slurm job script to standard output. "
        "What follows -- is given to pytest.",
        epilog="example: distcompat sbatch --nodes 2 --gpus-per-node 8 --time 00:30:00 "
        "-- tests/test_matrix.py > night.sbatch",
    )
    sbatch.add_argument("--nodes", type=int, default=2, help="number of nodes (2)")
    sbatch.add_argument(
        "--gpus-per-node",
        type=int,
        default=0,
        metavar="N",
        help="GPUs of each node (0: CPU and gloo)",
    )
    sbatch.add_argument(
        "--time", default="01:00:00", help="Slurm's time limit of the job (01:00:00)"
    )
    sbatch.add_argument(
        "--partition", default="", help="Slurm's partition (default: the cluster's)"
    )
    sbatch.add_argument("pytest", nargs="*", metavar="ARGUMENT", help="what pytest runs")
    sbatch.set_defaults(call=_sbatch)


def _join(options: argparse.Namespace) -> int:
    """Read the token, and be a node of the session until it ends."""
    from pytest_distcompat.ext.cluster import agent

    host, port = read_address(options.session)
    # None for an address without a port.
    if not port:
        raise UsageProblem(f"{options.session!r} is not right: expected HOST:PORT")
    from_stdin = options.token_file == "-"  # noqa: S105 - a file's name
    # An OSError in the block becomes a message with the option's name.
    with named_in_errors(f"--token-file {options.token_file}"):
        try:
            if from_stdin:
                # One line: pytest's process, which writes it, may keep the pipe open.
                token = sys.stdin.readline()
            else:
                token = Path(options.token_file).read_text("utf-8")
        except UnicodeDecodeError:
            raise UsageProblem(
                f"--token-file {options.token_file}: it is no text in UTF-8"
            ) from None
    if not token.strip():
        raise UsageProblem(f"--token-file {options.token_file}: there is no token in it")
    return agent.join(
        host,
        port,
        token.strip().encode(),
        options.name,
        options.wait,
        with_parent=options.with_parent,
    )


def _sbatch(options: argparse.Namespace) -> int:
    """Print the job script."""
    if options.nodes < 1:
        raise UsageProblem(
            f"--nodes {options.nodes} is not right: expected a whole number of at least 1"
        )
    if options.gpus_per_node < 0:
        raise UsageProblem(
            f"--gpus-per-node {options.gpus_per_node} is not right: "
            "expected a whole number of at least 0"
        )
    for name, pattern, expected in _TEXTS:
        value = getattr(options, name)
        # Not ``match`` with ``$``, which lets a line end pass: the value becomes a line of a shell
        # script.
        if value and not re.fullmatch(pattern, value):
            raise UsageProblem(f"--{name} {value!r} is not right: expected {expected}")
    #: Option of sbatch -> value; an option with an empty value or 0 is left out.
    wanted = {
        "job-name": "distcompat",
        "nodes": options.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": options.gpus_per_node,
        "time": options.time,
        "partition": options.partition,
        # pytest itself, which takes the place of the script's shell, gets SIGINT 60 seconds before
        # the limit, so that it ends its nodes and writes its reports.
        "signal": "B:INT@60",
    }
    of_nodes = ("--distcompat-nodes", str(options.nodes), "--distcompat-executor", "slurm")
    gpus = ("--distcompat-gpus", str(options.gpus_per_node))
    pytest = [sys.executable, "-m", "pytest", *of_nodes, *gpus, *options.pytest]
    lines = ["#!/bin/bash"]
    for name, value in wanted.items():
        if value:
            lines.append(f"#SBATCH --{name}={value}")
    directory = shlex.quote(str(Path.cwd()))
    lines += [f"cd {directory}", f"exec {shlex.join(pytest)}"]
    print("\n".join(lines))
    return 0

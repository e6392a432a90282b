"""``join``: be a node of a pytest session that runs elsewhere."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path
from typing import Any

from pytest_distcompat.cli.output import named_in_errors
from pytest_distcompat.failures import UsageProblem


def add(commands: Any) -> None:
    """Add the subcommand to the parser's."""
    join = commands.add_parser(
        "join",
        help="be a further node of a pytest session",
        description="Join a pytest session that was started with --distcompat-nodes, and run its ranks here until it ends.",
    )
    join.add_argument("session", metavar="HOST:PORT", help="where that pytest listens (--distcompat-listen)")
    join.add_argument("--token-file", required=True, metavar="FILE", help="the session's token; - for standard input")
    join.add_argument(
        "--name",
        default=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        help="the node's name in verdicts (default: Slurm's, else the host's)",
    )
    join.add_argument("--wait", type=float, default=60, metavar="SECONDS", help="how long to wait for the session (60)")
    join.add_argument("--with-parent", action="store_true", help=argparse.SUPPRESS)
    join.set_defaults(call=_join)


def _join(options: argparse.Namespace) -> int:
    from pytest_distcompat.nodes import agent

    host, colon, port = options.session.rpartition(":")
    if not colon or not port.isdecimal():
        raise UsageProblem(f"{options.session!r} is not right: expected HOST:PORT")
    from_stdin = options.token_file == "-"  # noqa: S105 - a file's name
    with named_in_errors(f"--token-file {options.token_file}"):
        token = sys.stdin.readline() if from_stdin else Path(options.token_file).read_text("utf-8")
    if not token.strip():
        raise UsageProblem(f"--token-file {options.token_file}: there is no token in it")
    return agent.join(
        host, int(port), token.strip().encode(), options.name, options.wait, with_parent=options.with_parent
    )

"""The command that runs a run alone: of one over several nodes it says what to start on each."""

from __future__ import annotations

from dataclasses import replace

from pytest_distcompat.ext.cluster.run import _command
from pytest_distcompat.launch.request import Request


def test_the_command_of_a_run_over_nodes() -> None:
    request = Request("a:b", {}, 4, "/store/run", nodes=2)
    command = _command(request)
    assert command.startswith("torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400 --nproc-per-node 2 ")
    assert command.endswith("-m pytest_distcompat.launch.rank /store/run/request.json --by-hand  # on each node")
    on_one = _command(replace(request, nodes=1))
    assert on_one == replace(request, nodes=1).command()
    assert on_one.startswith("torchrun --standalone --nproc-per-node 4 ")

"""Whether the nodes of a session can run the same: versions, files, clocks, a shared directory.

A *node* is one of several machines that run a test together. ``membership`` calls ``difference``
once all nodes have joined. It compares the facts that each node's agent has sent (``facts``), and
tries whether pytest's process sees what the nodes write. The answer is a text for the user, such as
``n2 has torch 2.9, n1 has 2.8``, or empty.
"""

from __future__ import annotations

import shutil
import socket
import uuid
from collections.abc import Sequence
from pathlib import Path

from pytest_distcompat.ext.cluster.facts import differences, facts
from pytest_distcompat.ext.cluster.node import Node, problems
from pytest_distcompat.ext.cluster.settings import Settings
from pytest_distcompat.launch.request import Warmth


def difference(nodes: Sequence[Node], settings: Settings, warmth: Warmth, *, accounts: bool) -> str:
    """Return how the nodes differ, as text for the user; empty if they are alike.

    They are compared with the first node. If one node has all runs, it is compared with pytest's
    own machine.

    Args:
        nodes: The nodes, in their order.
        settings: The nodes of the session.
        warmth: What their launcher processes import; ``own`` has the user's files outside of the
            repository.
        accounts: Whether a scheduler counts their devices.
    """
    first = nodes[0].name
    first_facts = nodes[0].facts
    if settings.node:
        first = f"pytest on {socket.gethostname()}"
        # The number of GPUs does not count where a scheduler counts them: it is 0 for ``cpu``.
        device = "cpu" if accounts else settings.device
        # ``wall`` is by how many seconds a node's clock is ahead of the one here: 0 for this
        # machine.
        first_facts = {**facts(settings.root, warmth.own, device), "wall": 0.0}
    texts: list[str] = []
    for node in nodes:
        texts += differences(node.name, node.facts, first, first_facts)
    if texts:
        return "; ".join(texts)
    if not settings.shared:
        return ""
    return _why_not_shared(nodes, settings.shared)


def _why_not_shared(nodes: Sequence[Node], shared: str) -> str:
    """Return which node does not share the directory ``shared``, with advice; empty if all do.

    Each node writes a file, and pytest's process looks for all of them.
    """
    # A node that can write below this new directory sees what pytest makes.
    directory = Path(shared, f"nodes-{uuid.uuid4().hex[:8]}")
    directory.mkdir(parents=True)
    files: dict[Node, Path] = {}
    for number, node in enumerate(nodes):
        files[node] = directory / str(number)

    def request_to_write(node: Node) -> dict[str, str]:
        return {"do": "write", "path": str(files[node])}

    problem_by_node = problems(nodes, request_to_write)
    texts = []
    for node, problem in problem_by_node.items():
        if problem:
            texts.append(f"{node.name} cannot write in {shared} ({problem})")
    for node, path in files.items():
        if not path.exists():
            texts.append(
                f"pytest on {socket.gethostname()} does not see what {node.name} wrote in {shared}"
            )
    shutil.rmtree(directory, ignore_errors=True)
    if not texts:
        return ""
    advice = (
        "suites, and tests with shared_dir, need a directory that all nodes share; "
        "expected --basetemp=DIR with one, "
        "or cells with option checkpoints='node', where the driver has it"
    )
    return f"{texts[0]}: {advice}"

"""Whether nodes can run the same.

Compared are their versions, files and clocks, and the directory that they share.
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
    """Return in what nodes differ, empty if in nothing.

    They are compared with the first node, or, where one node has all runs, with pytest's own.

    Args:
        nodes: The nodes, in their order.
        settings: The nodes of the session.
        warmth: What their launcher processes import.
        accounts: Whether a scheduler counts their devices.
    """
    first = nodes[0].name
    first_facts = nodes[0].facts
    if settings.node:
        first = f"pytest on {socket.gethostname()}"
        device = "cpu" if accounts else settings.device
        first_facts = {**facts(settings.root, warmth.own, device), "wall": 0.0}
    texts: list[str] = []
    for node in nodes:
        texts += differences(node.name, node.facts, first, first_facts)
    if texts:
        return "; ".join(texts)
    return _why_not_shared(nodes, settings.shared) if settings.shared else ""


def _why_not_shared(nodes: Sequence[Node], shared: str) -> str:
    """Return which node has another directory in place of the shared one.

    Empty if pytest sees what all nodes write there.
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

"""The directories of a run on nodes that share no file system: each node saves on its own disk.

In a cell with ``checkpoints=node`` the trainer saves on each *node* (machine), and each node loads
its own files. pytest's process sends every node the same paths, which are right on its own machine
only. The node's ``agent`` calls ``on_node`` to replace them before it starts ranks.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from pytest_distcompat.run_paths import SuitePayload


def on_node(payload: SuitePayload, directory: Path, own: Path) -> SuitePayload:
    """Return the payload with paths on this node's own disk, and make the directory to save into.

    Args:
        payload: The payload as pytest's process sent it, with paths on its own machine.
        directory: The directory of the run on that machine.
        own: The directory on this node that holds its runs, for as long as the session lasts.

    Raises:
        FileNotFoundError: If the checkpoint that the run loads is not on this node.
    """

    def below_own(path: str) -> Path:
        """Return the path that has the same place below this node's directory of runs."""
        return own / Path(path).relative_to(directory.parent)

    save_to = below_own(payload.save_to)
    load_from = below_own(payload.load_from)
    export = below_own(payload.export)
    # The run loads what an earlier run has saved, perhaps through another agent, whose directory is
    # gone.
    if payload.run.after and not load_from.exists():
        raise FileNotFoundError(
            f"the node was lost since run {payload.run.after!r}, whose files were there"
        )
    # An earlier attempt of this run, which was interrupted, may have left files.
    shutil.rmtree(own / directory.name, ignore_errors=True)
    save_to.mkdir(parents=True)
    return dataclasses.replace(
        payload, save_to=str(save_to), load_from=str(load_from), export=str(export)
    )

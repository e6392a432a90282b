"""The directories of a run on nodes that share no file system: each node saves on its own disk.

In a cell with ``checkpoints=node`` the trainer saves on each *node* (machine), and each node loads
its own files. pytest's process sends each node the *payload* of a run: what its ranks are to do,
and the directories to use. These are right on the machine of pytest's process only. So the *agent*,
the process on a node that starts ranks, first calls ``on_node`` to replace them.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from pytest_distcompat.run_paths import SuitePayload


def on_node(payload: SuitePayload, directory: Path, own: Path) -> SuitePayload:
    """Return the payload with paths on this node's own disk, and make the directory to save into.

    ``save_to`` at ``/store/train-1a2b/checkpoint`` becomes ``/agent/runs/train-1a2b/checkpoint``.

    Args:
        payload: The payload as pytest's process sent it, with paths on its own machine.
        directory: The directory of the run on that machine: ``/store/train-1a2b``. Those of other
            runs are beside it.
        own: The agent's directory of runs: ``/agent/runs``. It is removed when the agent ends.

    Raises:
        FileNotFoundError: If the checkpoint that the run loads is not on this node. Then the run
            fails with this text.
    """

    def below_own(path: str) -> Path:
        """Return the path that has the same place below this node's directory of runs."""
        return own / Path(path).relative_to(directory.parent)

    save_to = below_own(payload.save_to)
    load_from = below_own(payload.load_from)
    export = below_own(payload.export)
    # ``after`` names the earlier run whose checkpoint this one loads; empty if it loads none. If
    # that run had another agent on this node, its directory is gone.
    if payload.run.after and not load_from.exists():
        raise FileNotFoundError(
            f"the node was lost since run {payload.run.after!r}, whose files were there"
        )
    # An earlier attempt of this run, which was interrupted, may have left files.
    shutil.rmtree(own / directory.name, ignore_errors=True)
    # The directory of an export is made by the rank that exports.
    save_to.mkdir(parents=True)
    return dataclasses.replace(
        payload, save_to=str(save_to), load_from=str(load_from), export=str(export)
    )

"""The directories of a run where each node has its own, below one that lasts as long as the session."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from pytest_distcompat.run_paths import SuitePayload


def on_node(payload: SuitePayload, directory: Path, own: Path) -> SuitePayload:
    """Return the payload for a node that has the run's directories below ``own``, the one to save into being made.

    Args:
        payload: The payload as pytest's process sent it.
        directory: The directory of the run there.
        own: The directory of this node's runs.

    Raises:
        FileNotFoundError: What the run loads is not there.
    """

    def below_own(path: str) -> Path:
        return own / Path(path).relative_to(directory.parent)

    save_to = below_own(payload.save_to)
    load_from = below_own(payload.load_from)
    export = below_own(payload.export)
    if payload.run.after and not load_from.exists():
        raise FileNotFoundError(
            f"the node was lost since run {payload.run.after!r}, whose files were there"
        )
    # An interrupted run may have left some.
    shutil.rmtree(own / directory.name, ignore_errors=True)
    save_to.mkdir(parents=True)
    return dataclasses.replace(
        payload, save_to=str(save_to), load_from=str(load_from), export=str(export)
    )

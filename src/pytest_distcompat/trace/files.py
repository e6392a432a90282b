"""Record of a saved file: what a checkpoint or an export has under which keys.

In the action ``files`` of a run, after ``save`` or ``export``, ``probe.files`` reads what the
trainer has written: each library's format by itself, never by the trainer's own ``load``. Checks
look in the records for each name of the unwrapped model, and for the optimizer's state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class FileInfo:
    """One saved file, or one part of a file that has several.

    The index of sharded weights (``model.safetensors.index.json``) has no values: it has only
    ``files`` and ``total_size``.
    """

    #: The path relative to the checkpoint, ``model.safetensors``. A part of a pickle has its key
    #: behind it (``mp_rank_00_model_states.pt:module``), an exported file ``export/`` before it.
    path: str
    #: ``safetensors``, ``dcp`` (torch.distributed.checkpoint), ``torch`` (``torch.save``),
    #: ``deepspeed`` or ``index``. Empty in ``Snapshot.saved``, the files of a checkpoint with the
    #: model alone (option ``save_only_model``), whose values are compared, not their format.
    format: str
    #: ``model``, ``optimizer``, ``scheduler`` or ``index``. Of a file that the action ``damage``
    #: corrupted: how, such as ``truncate``.
    holds: str
    #: The names in the file: ``("lm_head.weight", ...)``. An optimizer's are those of parameters.
    keys: tuple[str, ...]
    #: Key of a model -> global shape, where the file says it.
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    #: Key of a model -> dtype, where the file says it.
    dtypes: Mapping[str, str] = field(default_factory=dict)
    #: Key of a model -> digest of its value; in ``Snapshot.saved`` only.
    digests: Mapping[str, str] = field(default_factory=dict)
    #: Of an index: key -> the file that it is in.
    files: Mapping[str, str] = field(default_factory=dict)
    #: Of an index: how many bytes all values are; None if it does not say.
    total_size: int | None = None

    def renamed(self, name: Callable[[str], str]) -> FileInfo:
        """Return the file with ``name(key)`` in place of each key."""

        def with_names(mapping: Mapping[str, T]) -> dict[str, T]:
            return {name(key): value for key, value in mapping.items()}

        return dataclasses.replace(
            self,
            keys=tuple(name(key) for key in self.keys),
            shapes=with_names(self.shapes),
            dtypes=with_names(self.dtypes),
            digests=with_names(self.digests),
            files=with_names(self.files),
        )

"""Which names and shapes the tensors of a trained or saved model must have.

``checks.names`` makes an object of ``ExpectedNames`` from the record of the unwrapped model, which
is the model before anything wraps it. Then it asks the object what a *live* name (that of the
wrapped model, ``module.lm_head.weight``) or a key in a saved file stands for.

Three things make that more than a set of names:

- Tied parameters, such as embedding and output layer, are one tensor with several names.
- A LoRA adapter is saved by PEFT under shorter names, without the adapter's name.
- The model's library, such as transformers, may write other names than the model's own.
"""

from __future__ import annotations

from collections.abc import Iterable

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks._renamed import Renamed, renamed
from pytest_distcompat.model_values import adapter_name, shared_name
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import FileInfo, ParameterInfo, UnwrappedInfo

#: The shape of a tensor.
_Shape = tuple[int, ...]


class ExpectedNames:
    """Names and shapes of the unwrapped model, which live and saved tensors must have.

    Tied parameters count under their first name.

    The argument ``unused`` has the live names of the parameters that three steps did not update.

    Attributes:
        cell: The cell, such as ``fsdp2-bf16_upcast-w2-lora``.
        unwrapped: The record of the unwrapped model.
        first_names: Name -> first name of the same tensor. It has all names of tied parameters, and
            PEFT's names for the parameters of an adapter.
        parameters: The names of parameters.
        trainable: The names of trainable parameters.
        updated: The names of parameters for which an optimizer must have state. A trainable
            parameter that never got a gradient has none.
        persistent: The names of buffers that are saved.
        not_persistent: The names of buffers that are not saved.
        state_dict: The names that a state dict may have.
        in_files: The names of parameters as files must have them.
        written: Names that the model's library writes in place of the model's own.
        shapes: Name of a parameter or buffer -> its shape.
    """

    def __init__(self, cell: Cell, unwrapped: UnwrappedInfo, unused: frozenset[str]) -> None:
        self.cell = cell
        self.unwrapped = unwrapped
        self.first_names: dict[str, str] = {}
        for group in unwrapped.tied:
            if group:
                self.first_names.update(dict.fromkeys(group, group[0]))
        self.parameters: set[str] = set()
        self.trainable: set[str] = set()
        for info in unwrapped.parameters:
            name = self.first_name(info.name)
            self.parameters.add(name)
            if info.trainable:
                self.trainable.add(name)
        self.persistent: set[str] = set()
        self.not_persistent: set[str] = set()
        for info in unwrapped.buffers:
            if info.persistent:
                self.persistent.add(info.name)
            else:
                self.not_persistent.add(info.name)
        self.state_dict = set(unwrapped.state_dict)
        if cell.option("lora"):
            self._add_names_of_adapter()
            self.state_dict |= set(self.first_names)
        self.in_files = self._names_in_files()
        self.written = set(unwrapped.written_names)
        self.shapes: dict[str, _Shape] = {}
        for info in (*unwrapped.parameters, *unwrapped.buffers):
            self.shapes[info.name] = tuple(info.shape)
        never_updated = {self.unwrapped_name(live) for live in unused}
        self.updated = self.trainable - never_updated

    def _add_names_of_adapter(self) -> None:
        """Add PEFT's names of what an adapter trains, and of buffers that its layers share."""
        for name in self.trainable:
            self.first_names[adapter_name(name)] = name
        for name in self.persistent:
            self.first_names[shared_name(name)] = name

    def _names_in_files(self) -> set[str]:
        """Return the names of parameters as the model's own state dict has them.

        They are ``parameters``, unless a hook of the model renames some, as torchtitan's does for
        fused projections.
        """
        own: set[str] = set()
        for name in self.unwrapped.state_dict:
            # torch's ``get_extra_state`` is an entry that is no tensor.
            if not name.endswith("_extra_state"):
                own.add(self.first_name(name))
        renamed_by_hook = self.parameters - own
        if not own or not renamed_by_hook:
            return self.parameters
        buffers = self.first_names_of(self.unwrapped.buffers)
        names_by_hook = own - self.parameters - buffers
        return self.parameters - renamed_by_hook | names_by_hook

    def first_name(self, name: str) -> str:
        """Return the name under which a tensor counts: the first of its names.

        It is the name itself if the tensor has no other.
        """
        return self.first_names.get(name, name)

    def first_names_of(self, infos: Iterable[ParameterInfo]) -> set[str]:
        """Return the first names of unwrapped parameters or buffers."""
        return {self.first_name(info.name) for info in infos}

    def unwrapped_names_of(self, infos: Iterable[ParameterInfo]) -> set[str]:
        """Return the unwrapped model's names for live parameters or buffers."""
        return {self.unwrapped_name(info.name) for info in infos}

    def unwrapped_name(self, live: str) -> str:
        """Return the unwrapped model's name for a live name.

        Segments that wrappers put in are removed: ``lm_head.weight`` for ``module.lm_head.weight``.
        """
        strategy = STRATEGIES.get(self.cell.strategy)
        return self.first_name(
            strategy.canonical(live, self.cell, self.state_dict | self.parameters)
        )

    def shape(self, live: str) -> _Shape | None:
        """Return the shape of the unwrapped parameter or buffer.

        None if there is none of that name.
        """
        return self.shapes.get(self.unwrapped_name(live))

    def known_in(self, file: FileInfo) -> set[str]:
        """Return the names that may be keys of the file; an optimizer has trainable ones only."""
        if file.holds == "model":
            return self.state_dict | self.parameters | self.written
        return self.trainable | set(self.first_names)

    def renamed_in(self, file: FileInfo) -> list[Renamed]:
        """Return groups of the file's unknown keys, by the part in which they differ from names.

        An example is a group of all keys with the extra prefix ``_orig_mod.``.
        """
        known = self.known_in(file)
        unknown = set(file.keys) - known - self.not_persistent
        return renamed(unknown, known)

    def names_in(self, file: FileInfo) -> set[str]:
        """Return the names that the file has, with the model's own names for renamed keys."""
        names = {self.first_name(key) for key in file.keys}
        for group in self.renamed_in(file):
            for name in group.names.values():
                names.add(self.first_name(name))
        return names

    def written_by_library(self, keys: Iterable[str]) -> bool:
        """Tell whether any key is a name that only the library gives, not the model itself."""
        other_keys = set(keys) - self.state_dict
        return not self.written.isdisjoint(other_keys)

    def has_key_of_model(self, file: FileInfo) -> bool:
        """Tell whether any key of the file is a name of the model, see ``is_of_model``."""
        return any(self.is_of_model(key) for key in file.keys)

    def is_of_model(self, key: str) -> bool:
        """Tell whether the key is a name of the unwrapped model, or a changed one.

        A changed name has further segments in front (``net.lm_head.weight``), or lacks some
        (``weight``).
        """
        known = self.state_dict | self.parameters | self.written | self.not_persistent
        if self.unwrapped_name(key) in known:
            return True
        segments = key.split(".")
        for nth in range(len(segments)):
            end = ".".join(segments[nth:])
            if end in known:
                return True
        for name in known:
            if name.endswith(f".{key}"):
                return True
        return False

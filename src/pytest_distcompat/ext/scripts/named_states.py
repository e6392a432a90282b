"""State of a script beside model and optimizer: variables that a user names, and library objects.

A user's test says ``launch(extra_state=["ema", "trainer.curriculum"])`` for state that a checkpoint
must bring back too: ``ema`` is a variable of a function or module of the script, and
``trainer.curriculum`` an attribute of one. The ``Recorder`` in each rank calls ``NamedStates.read``
after a step, a save or a load. The result is the values of each state then, as texts of numbers and
digests (hashes) of tensors, which ``resume_roundtrip`` compares later.

Libraries know of further state: what is registered by ``Accelerator.register_for_checkpointing``,
and torch's ``AveragedModel``. That is read without being named.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType, SimpleNamespace
from typing import Any

from pytest_distcompat.trace import ExtraState, ExtraStateInfo

#: Packages whose functions are not the script's: a variable there is not meant.
_LIBRARIES = frozenset(
    {"pytest_distcompat", "torch", "accelerate", "transformers", "deepspeed", "safetensors"}
)
#: Stands for a variable that does not exist; None may be its value.
_MISSING = object()


class NamedStates:
    """States of a script, as the check ``extra_state`` compares them.

    Args:
        expected: Name of a variable, with dots for attributes, such as ``trainer.ema`` -> what is
            expected of it: that it changes, is alike on all ranks, and comes back by a load.
    """

    def __init__(self, expected: Mapping[str, ExtraState]) -> None:
        self.expected = expected
        #: Objects that a library saves and loads, or averages weights in, in the order in which it
        #: learned of them.
        self.known: list[weakref.ref[Any]] = []

    def add(self, objects: Iterable[Any]) -> None:
        """Note objects that a library knows of, except those that take no weak reference."""
        for value in objects:
            if all(reference() is not value for reference in self.known):
                with contextlib.suppress(TypeError):
                    self.known.append(weakref.ref(value))

    def read(self, *, known: bool) -> tuple[ExtraStateInfo, ...]:
        """Return the values of the states that exist now.

        Args:
            known: Whether to read the objects that libraries know of too. Their ``state_dict()``
                may be a collective, so the caller says True only where all ranks make this call.

        Raises:
            TypeError: If a variable that the user names has values that cannot be compared.
        """
        # Imported late: it needs torch.
        from pytest_distcompat.probe.extra import read_extra_state

        infos: list[ExtraStateInfo] = []
        for name, expected in self.expected.items():
            # The probe reads ``trainer.ema`` of a driver, as ``driver.trainer.ema``. An object with
            # the variable as its only attribute takes the driver's place.
            first = name.partition(".")[0]
            value = _variable(first)
            if value is not _MISSING:
                infos += read_extra_state(SimpleNamespace(**{first: value}), {name: expected})
        if known:
            for name, value in self._known_objects():
                # Not everything that a library saves can be compared. And nothing says that it must
                # change, or be alike on ranks: only that it must come back.
                with contextlib.suppress(TypeError):
                    state = {name: ExtraState(changes=False, alike=False)}
                    infos += read_extra_state(SimpleNamespace(**{name: value}), state)
        return tuple(infos)

    def _known_objects(self) -> Iterator[tuple[str, Any]]:
        """Yield the objects that libraries know of, with a name such as ``EMAModel[0]``."""
        for number, reference in enumerate(self.known):
            value = reference()
            if value is not None:
                yield f"{type(value).__name__}[{number}]", value


def _variable(name: str) -> Any:
    """Return the value of a variable of the script, or ``_MISSING``.

    The innermost of the script's functions that run now comes first, then its modules.
    """
    frames = list(_frames_of_the_script())
    for frame in frames:
        if name in frame.f_locals:
            return frame.f_locals[name]
    for frame in frames:
        if name in frame.f_globals:
            return frame.f_globals[name]
    return _MISSING


def _frames_of_the_script() -> Iterator[FrameType]:
    """Yield the frames of the script's calls that led here, the innermost first."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in _LIBRARIES:
            yield frame
        frame = frame.f_back

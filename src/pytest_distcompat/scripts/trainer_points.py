"""The points of ``transformers.Trainer``, to whose users what it does by many calls of other libraries is one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest_distcompat.scripts import around
from pytest_distcompat.scripts.recorder import Recorder

#: The method that writes ``checkpoint-N``. Private, but the hook ``on_save`` comes when all is written: what other
#: libraries wrote before would have been taken for checkpoints of their own.
#: ``tests/scripts/test_private_names.py`` says when it goes away.
SAVE = "_save_checkpoint"


def wrap(trainer: Any) -> None:
    """Put each wrapper in its place, in the class ``Trainer``."""
    around.put(trainer, "__init__", _constructor)
    around.put(
        trainer,
        SAVE,
        around.saves(
            lambda _result, args, _kwargs: Path(args[0].args.output_dir, f"checkpoint-{args[0].state.global_step}")
        ),
    )
    # What a run leaves for others: no checkpoint to go on from.
    around.put(
        trainer,
        "save_model",
        around.saves(
            lambda _result, args, kwargs: next(iter((*args[1:2], *kwargs.values())), None) or args[0].args.output_dir,
            everyone=False,
        ),
    )


def _constructor(found: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        found.presence.log.write("output", path=str(Path(self.args.output_dir).resolve()))
        self.add_callback(_callback(found))

    return init


def _callback(found: Recorder) -> Any:
    from transformers import TrainerCallback

    class _Begins(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
        """Training that does not begin at step 0 goes on from a checkpoint; now all of it is back, random states too."""

        told = False

        def on_step_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            if not self.told and state.global_step:
                found.guard(found.loaded)
            self.told = True

        def on_train_end(self, *_: Any, **__: Any) -> None:
            found.guard(found.settled)

    return _Begins()

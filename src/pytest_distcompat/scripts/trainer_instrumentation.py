"""The points of ``transformers.Trainer``, to whose users what it does by many calls of other libraries is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pytest_distcompat.scripts import guard, wrappers
from pytest_distcompat.scripts.recorder import Recorder
from pytest_distcompat.scripts.wrappers import Arguments, Keywords, Steps

#: The method that writes ``checkpoint-N``. Private, but the hook ``on_save`` comes when all is written: what other
#: libraries wrote before would have been taken for checkpoints of their own.
#: ``tests/scripts/test_private_names.py`` says when it goes away.
SAVE = "_save_checkpoint"


def wrap(trainer: Any) -> None:
    """Put each wrapper in its place, in the class ``Trainer``."""
    wrappers.put(trainer, "__init__", _constructor)
    wrappers.put(
        trainer,
        SAVE,
        wrappers.saves(
            lambda _result, args, _kwargs: Path(args[0].args.output_dir, f"checkpoint-{args[0].state.global_step}")
        ),
    )
    # What a run leaves for others: no checkpoint to go on from.
    wrappers.put(
        trainer,
        "save_model",
        wrappers.saves(
            lambda _result, args, kwargs: next(iter((*args[1:2], *kwargs.values())), None) or args[0].args.output_dir,
            everyone=False,
        ),
    )


def _constructor(found: Recorder, args: Arguments, kwargs: Keywords) -> Steps:  # noqa: ARG001 - a point
    yield
    trainer = args[0]
    found.rank.log.write("output", path=str(Path(trainer.args.output_dir).resolve()))
    trainer.add_callback(_callback(found))


def _callback(found: Recorder) -> Any:
    from transformers import TrainerCallback

    class _Watches(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
        """Training that does not begin at step 0 goes on from a checkpoint; now all of it is back, random states too."""

        told = False

        def on_step_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            guard.attempt("TrainerCallback.on_step_begin", self._begins, state)

        def on_train_end(self, *_: Any, **__: Any) -> None:
            guard.attempt("TrainerCallback.on_train_end", found.aside, found.settled)

        def _begins(self, state: Any) -> None:
            if not self.told and state.global_step:
                found.aside(found.loaded)
            self.told = True

    return _Watches()

"""Wrappers of the Trainers of transformers and Lightning: each method counts as one call, whatever it calls."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from pytest_distcompat.scripts import guard, wrappers
from pytest_distcompat.scripts.recorder import Recorder
from pytest_distcompat.scripts.wrappers import Arguments, Keywords, Steps

#: The method that writes ``checkpoint-N``. It is private, but the hook ``on_save`` comes too late: when it is called, the
#: files that other libraries wrote for the Trainer would already count as checkpoints of their own.
#: ``tests/scripts/test_private_names.py`` fails when it changes.
SAVE = "_save_checkpoint"

#: Lightning is installed under two names, each with classes of its own.
LIGHTNING = ("pytorch_lightning", "lightning.pytorch")


def wrap_lightning(module: ModuleType) -> None:
    """Wrap ``Trainer.save_checkpoint``, which all ranks call and which writes through a file system of Lightning's own."""
    # https://lightning.ai/docs/pytorch/stable/common/trainer.html
    save = wrappers.saves(lambda _result, args, kwargs: wrappers.second(args, kwargs, "filepath"))
    wrappers.wrap_attribute(module.Trainer, "save_checkpoint", save)


def wrap_lightning_strategies(module: ModuleType) -> None:
    """Wrap ``load_checkpoint`` of each strategy that defines it: ``fit(ckpt_path=...)`` reads by it."""
    for kind in vars(module).values():
        if isinstance(kind, type) and "load_checkpoint" in vars(kind):
            wrappers.wrap_attribute(kind, "load_checkpoint", wrappers.loads)


def wrap(trainer: Any) -> None:
    """Wrap the methods of transformers' ``Trainer``."""
    wrappers.wrap_attribute(trainer, "__init__", _constructor)
    wrappers.wrap_attribute(
        trainer,
        SAVE,
        wrappers.saves(
            lambda _result, args, _kwargs: Path(args[0].args.output_dir, f"checkpoint-{args[0].state.global_step}")
        ),
    )
    # The final model, from which no training resumes.
    wrappers.wrap_attribute(
        trainer,
        "save_model",
        wrappers.saves(
            lambda _result, args, kwargs: next(iter((*args[1:2], *kwargs.values())), None) or args[0].args.output_dir,
            everyone=False,
        ),
    )


def _constructor(recorder: Recorder, args: Arguments, kwargs: Keywords) -> Steps:  # noqa: ARG001 - a wrapper
    yield
    trainer = args[0]
    from pytest_distcompat.scripts.events import Output

    recorder.rank.log.write(Output(str(Path(trainer.args.output_dir).resolve())))
    trainer.add_callback(_callback(recorder))


def _callback(recorder: Recorder) -> Any:
    from transformers import TrainerCallback

    class _RecordsLoad(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
        """Callback that records the loaded state at the first step of a resumed training, when the RNG states are back too."""

        started = False

        def on_step_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            guard.attempt("TrainerCallback.on_step_begin", self._record_load, state)

        def on_train_end(self, *_: Any, **__: Any) -> None:
            guard.attempt("TrainerCallback.on_train_end", recorder.call_unobserved, recorder.record_final_model)

        def _record_load(self, state: Any) -> None:
            if not self.started and state.global_step:
                recorder.call_unobserved(recorder.after_load)
            self.started = True

    return _RecordsLoad()

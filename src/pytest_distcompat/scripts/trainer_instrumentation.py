"""Names and callbacks for the Trainers of transformers and Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pytest_distcompat.scripts import guard
from pytest_distcompat.scripts.recorder import Recorder
from pytest_distcompat.scripts.wrappers import Arguments, Keywords, Steps

#: The method that writes ``checkpoint-N``. It is private, but the hook ``on_save`` comes too late: when it is called, the
#: files that other libraries wrote for the Trainer would already count as checkpoints of their own.
#: ``tests/scripts/test_private_names.py`` fails when it changes.
SAVE = "_save_checkpoint"

#: Lightning is installed under two names, each with classes of its own.
LIGHTNING = ("pytorch_lightning", "lightning.pytorch")


def constructor(recorder: Recorder, args: Arguments, kwargs: Keywords) -> Steps:  # noqa: ARG001 - a wrapper
    """Wrap ``Trainer.__init__``: note the output directory, and add a callback."""
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

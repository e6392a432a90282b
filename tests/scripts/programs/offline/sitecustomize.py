"""Make accelerate load a checkpoint wrongly, in the ways that its own checkpoint script does not notice."""

import os
from typing import Any

from pytest_distcompat.ext.scripts.import_hooks import on_import

FAULT = os.environ.get("FAULT", "")


def _break(module: Any) -> None:
    original = module.load_accelerator_state

    def load_accelerator_state(where: Any, models: Any, optimizers: Any, *rest: Any, **more: Any) -> Any:
        result = original(where, [] if FAULT == "the model is not loaded" else models, optimizers, *rest, **more)
        for state in [state for optimizer in optimizers for state in optimizer.state.values()]:
            if FAULT == "the moments are zero":
                state["exp_avg"].zero_()
            if FAULT == "the moments are in bfloat16":
                state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16()
        return result

    module.load_accelerator_state = load_accelerator_state


if FAULT:
    on_import("accelerate.accelerator", _break)

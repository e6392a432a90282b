"""How Trainer, which does all in one call, is heard to do one thing after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_distcompat.driver import Plan, Seen


class PlanDoneError(Exception):
    """The plan ends with a load, and Trainer has no way to stop before its first step."""


def tell(driver: Any, plan: Plan, seen: Seen) -> Any:
    """The callback that tells of each verb, and asks for a checkpoint where the plan has one.

    A step is told of from ``on_log``: the optimizer and the scheduler have stepped, the norm and the mean of all ranks'
    losses are known, and what is to be saved is not saved yet. ``build`` or ``load`` are told of at the beginning of the first
    step: only then are the random states back.
    """
    from transformers import TrainerCallback

    done = [
        plan.first_step + plan.verbs[:place].count("step") for place, verb in enumerate(plan.verbs) if verb == "save"
    ]

    class _Tell(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
        def __init__(self) -> None:
            self.first = "load" if "load" in plan.verbs else "build"

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if self.first:
                driver.look()
                verb, self.first = self.first, ""
                seen(verb)
                if "step" not in plan.verbs:
                    raise PlanDoneError

        def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = state.global_step in done

        def on_log(self, _args: Any, state: Any, _control: Any, logs: Mapping[str, float], **_: Any) -> None:
            if "loss" in logs:  # at the end there is a log of the whole
                driver.look()
                driver.grad_norm = logs.get("grad_norm")
                batches = (driver.batch_of(place, driver.world.rank) for place in driver.micros(state.global_step - 1))
                driver.tokens = sum(map(driver.tiny.count, batches))
                seen("step", logs["loss"])

        def on_save(self, *_: Any, **__: Any) -> None:
            seen("save")

    return _Tell()

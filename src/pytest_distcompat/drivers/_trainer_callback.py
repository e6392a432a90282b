"""How Trainer, which does all in one call, is heard to do one thing after the other."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from pytest_distcompat.driver import Plan, Seen


class PlanDoneError(Exception):
    """The plan ends with a load, and Trainer has no way to stop before its first step."""


def tell(driver: Any, plan: Plan, seen: Seen) -> Any:
    """The callback that tells of each action, and asks for a checkpoint where the plan has one.

    A step is told of from ``on_log``: the optimizer and the scheduler have stepped, the norm and the mean of all ranks'
    losses are known, and what is to be saved is not saved yet. ``build`` or ``load`` are told of at the beginning of the first
    step: only then are the random states back.
    """
    from transformers import TrainerCallback

    # The steps after which the plan saves.
    done = {
        dataclasses.replace(plan, actions=plan.actions[:place]).last_step
        for place, action in enumerate(plan.actions)
        if action == "save"
    }

    class _Tell(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
        def __init__(self) -> None:
            self.first = "load" if "load" in plan.actions else "build"
            self.step = contextlib.ExitStack()

        def on_step_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            if self.first:
                driver.look()
                action, self.first = self.first, ""
                seen(action)
                if not plan.steps:
                    raise PlanDoneError
            if plan.steps[state.global_step - plan.first_step] == "overflow":
                self.step.enter_context(driver.overflowing())

        def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
            self.step.close()
            control.should_save = state.global_step in done

        def on_log(self, _args: Any, state: Any, _control: Any, logs: Mapping[str, float], **_: Any) -> None:
            if "loss" in logs:  # at the end there is a log of the whole
                driver.look()
                driver.grad_norm = logs.get("grad_norm")
                batches = (driver.batch_of(place, driver.world.rank) for place in driver.micros(state.global_step - 1))
                driver.tokens = sum(map(driver.tiny.count, batches))
                seen(plan.steps[state.global_step - 1 - plan.first_step], logs["loss"])

        def on_save(self, *_: Any, **__: Any) -> None:
            seen("save")

    return _Tell()

"""Callback by which Trainer, which trains in one call, reports single actions.

A run of a test is a plan of actions, such as ``("build", "step", "step", "save", "step")``. After
each action a probe must read model, optimizer and scheduler. ``TrainerDriver.train``
(``trainer.py``) does the plan in one call of ``Trainer.train``. It adds the callback of
``make_callback``, which calls ``report("step", loss)`` or ``report("save")`` when Trainer has done
an action. ``report`` is the worker's function: it checks that the plan has this action next, and
has the probe read. Before each report the callback calls ``driver.read_trainer()``, which sets
``driver.model``, ``driver.optimizer`` and the like to the objects that Trainer has now.

The other actions are ``load`` (resume from a checkpoint), ``again`` (a second training in the same
trainer), ``overflow`` (a step whose gradients overflow), and calls such as ``call evaluate()``: a
*walk* calls methods of the live trainer in random order.

Trainer calls the methods ``on_step_begin``, ``on_step_end``, ``on_log``, ``on_save`` in this order
in each step: https://huggingface.co/docs/transformers/main_classes/callback.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from pytest_distcompat.calls import CALL
from pytest_distcompat.driver import OnAction, Plan


class PlanDoneError(Exception):
    """Raised for a plan without a step: nothing else stops Trainer before its first one.

    ``TrainerDriver.train`` catches it.
    """


def _save_steps(plan: Plan) -> set[int]:
    """Return the numbers of the steps after which the plan saves, as Trainer counts them, from 1.

    The plan ``("build", "step", "step", "save", "step")`` with first step 0 saves after step 2.
    """
    steps = set()
    for index, action in enumerate(plan.actions):
        if action == "save":
            until_save = dataclasses.replace(plan, actions=plan.actions[:index])
            steps.add(until_save.last_step)
    return steps


def _first_action(plan: Plan) -> str:
    """Return the action that is reported at the beginning of the first step."""
    for action in ("load", "again"):
        if action in plan.actions:
            return action
    return "build"


def _tokens_of_step(driver: Any, number: int) -> int:
    """Return how many tokens or samples this rank is trained on in a step."""
    rank = driver.cell.dp_rank(driver.world.rank)
    tokens: int = 0
    for index in driver.micros(number):
        tokens += driver.tiny.count(driver.batch_of(index, rank))
    sequence_peers: int = driver.cell.cp
    # Peers of a sequence share its tokens.
    return tokens // sequence_peers


def make_callback(driver: Any, plan: Plan, report: OnAction) -> Any:  # noqa: C901 - its class needs transformers, so it is defined inside
    """Return a callback that reports each action, and asks for a checkpoint where the plan saves.

    It reports ``build``, ``load`` or ``again`` at the beginning of the first step: only then is all
    restored, random states last. It reports a step from ``on_log``, when optimizer and scheduler
    have stepped and no checkpoint is saved yet.

    Args:
        driver: The ``TrainerDriver`` of this rank.
        plan: The actions of the run.
        report: Called with each action that was done, and the loss of a step.
    """
    from transformers import TrainerCallback

    save_after_steps = _save_steps(plan)

    class _Reporter(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
        """Callback for one training, which knows what is left of the plan."""

        def __init__(self) -> None:
            #: ``load``, ``again`` or ``build``; empty once it is reported.
            self.first = _first_action(plan)
            #: The context of a step whose gradients overflow; empty in other steps.
            self.step = contextlib.ExitStack()
            #: The actions that are not reported yet, calls among them.
            self.pending = list(plan.actions)

        def report(self, action: str, *result: Any) -> None:
            """Report an action, then do and report the calls that follow it in the plan.

            Trainer knows nothing of calls such as ``call evaluate()``.
            """
            report(action, *result)
            self.pending = self.pending[self.pending.index(action) + 1 :]
            while self.pending and self.pending[0].startswith(CALL):
                call = self.pending.pop(0)
                returned = driver.caller.perform(call.removeprefix(CALL))
                report(call, returned)
                driver.read_trainer()

        def action_of(self, step: int) -> str:
            """Return how the plan names a step: ``step`` or ``overflow``.

            Args:
                step: Its number in the whole training, from 0.
            """
            return plan.steps[step - plan.first_step]

        def on_step_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            """Report the action before the first step; begin an overflowing step."""
            if self.first:
                driver.read_trainer()
                action = self.first
                self.first = ""
                self.report(action)
                if not plan.steps:
                    raise PlanDoneError
                # After a load it must go on where the checkpoint was saved.
                if state.global_step != plan.first_step:
                    raise RuntimeError(
                        f"Trainer goes on after {state.global_step} steps; expected "
                        f"{plan.first_step}"
                    )
            if self.action_of(state.global_step) == "overflow":
                self.step.enter_context(driver.overflowing())

        def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
            """Ask Trainer for a checkpoint, and an evaluation, where the plan saves."""
            self.step.close()
            control.should_save = state.global_step in save_after_steps
            # Whether Trainer is to load its best checkpoint at the end. It chooses that by the loss
            # of an evaluation after the step of the save.
            if driver.loads_best(driver.cell):
                control.should_evaluate = control.should_save

        def on_log(
            self, _args: Any, state: Any, _control: Any, logs: Mapping[str, float], **_: Any
        ) -> None:
            """Report the step whose loss Trainer logs, as it does after each."""
            if "loss" in logs:  # the last log is a summary without one
                driver.read_trainer()
                # Trainer has counted the step already.
                step = state.global_step - 1
                # The worker reads these two when it gets the report.
                driver.grad_norm = logs.get("grad_norm")
                driver.tokens = _tokens_of_step(driver, step)
                self.report(self.action_of(step), logs["loss"])

        def on_save(self, *_: Any, **__: Any) -> None:
            """Report that a checkpoint is written."""
            self.report("save")

    return _Reporter()

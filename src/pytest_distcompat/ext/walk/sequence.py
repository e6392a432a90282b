"""``Walk``: a sequence of calls of a live trainer, which of them may follow which, and its runs.

A walk is, say, ``step(), micro(), save(), step()``: what a user's training loop calls on a trainer,
in some order. ``explore`` and ``command`` ask ``allowed`` and ``valid`` which calls may follow
others, make a ``Walk``, and have its ``scenario()`` run.

A *run* is one process group from start to end, on which every *rank* (process) does the same
actions. A walk has a run for the trainer, a further run after each ``resume`` (save, start anew,
load), and a run of the *reference*: one process that makes the same calls on the bare model. The
calls are methods of a class that a *driver* names, the class that builds a trainer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_distcompat.calls import CALL, REFERENCE_CALL, RESUME, Call
from pytest_distcompat.drivers import Calls
from pytest_distcompat.ext.upstream.drivers.tiny import EPOCH_STEPS
from pytest_distcompat.scenario import Run, Scenario

#: Calls before which no gradients may be pending: it is not defined what becomes of the gradients.
_WITHOUT_GRADIENTS = frozenset(
    {"add_group", "freeze", "unfreeze", "save", "load", "load_weights", "resume"}
)
#: Calls that change the structure that a checkpoint must have.
_STRUCTURE = frozenset({"add_group", "freeze", "unfreeze"})


@dataclass
class _State:
    """What a sequence of calls leaves behind.

    Attributes:
        pending: Gradients are accumulated that no step has used.
        frozen: The part of the model that is frozen; empty for none.
        added: A parameter group was added to the optimizer.
        saved: There is a checkpoint of the trainer's present structure.
        trained: There was a step or a micro-batch since the last save.
        optimizer_stepped: The optimizer has taken a step, so that it has a state.
    """

    pending: bool = False
    frozen: str = ""
    added: bool = False
    saved: bool = False
    trained: bool = False
    optimizer_stepped: bool = False

    def apply(self, call: Call) -> None:
        """Change to the state after the call."""
        arguments = dict(call.arguments)
        if call.name in {"step", "micro"}:
            self.trained = True
            self.pending = call.name == "micro" or arguments.get("zero") == "keep"
        if call.name == "step":
            self.optimizer_stepped = True
        if call.name in {"zero_grad", "resume"}:
            self.pending = False
        if call.name == "freeze":
            self.frozen = str(arguments.get("part", "inlet"))
        if call.name == "unfreeze":
            self.frozen = ""
        if call.name == "add_group":
            self.added = True
        if call.name in {*_STRUCTURE, "resume"}:
            # The checkpoint does not fit the new structure, or is in another process group's run.
            self.saved = False
        if call.name == "save":
            self.saved = True
        if call.name in {"save", "resume"}:
            self.trained = False

    def fits(self, call: Call) -> bool:
        """Tell whether the call can be made on the trainer's structure and checkpoint."""
        #: Call -> whether it can be made; calls that are not in it always can.
        conditions = {
            "freeze": not self.frozen,
            "unfreeze": self.frozen == dict(call.arguments).get("part", "inlet"),
            "add_group": not self.added,
            "load": self.saved,
            "load_weights": self.saved,
            # A new process group builds the trainer as it was in the beginning.
            "resume": not self.frozen and not self.added,
        }
        return conditions.get(call.name, True)


def allowed(calls: Sequence[Call], call: Call, own: Sequence[str] = ()) -> bool:
    """Tell whether a call may follow the others.

    Args:
        calls: The calls before.
        call: The call.
        own: The calls that the trainer makes itself in a loop of its own, such as ``step`` of
            transformers' Trainer; such a trainer saves after a step only.
    """
    state = _State()
    for earlier in calls:
        state.apply(earlier)
    if state.pending and call.name in _WITHOUT_GRADIENTS:
        return False
    if own and not state.trained and call.name in {"save", "resume"}:
        return False
    # An optimizer that has not stepped has no state to read.
    reads_state = ("of", "optimizer_state") in call.arguments
    if reads_state and not state.optimizer_stepped:
        return False
    return state.fits(call)


def valid(calls: Sequence[Call], own: Sequence[str] = ()) -> bool:
    """Tell whether each call may follow those before it."""
    for index, call in enumerate(calls):
        if not allowed(calls[:index], call, own):
            return False
    return True


@dataclass(frozen=True)
class Walk:
    """A sequence of calls of one driver, and its runs.

    There is a run for each process group, and one for the reference.
    """

    calls: tuple[Call, ...]
    #: The driver's class of calls (``live_calls``), which has a method for each.
    kind: type[Calls]

    def __str__(self) -> str:
        return ", ".join(map(str, self.calls))

    @property
    def name(self) -> str:
        """Return a name of the sequence, for its runs and directories: ``walk-1a2b3c4d``."""
        digest = hashlib.sha256(str(self).encode()).hexdigest()
        return f"walk-{digest[:8]}"

    def parts(self) -> list[tuple[Call, ...]]:
        """Return the calls of each process group, cut at each ``resume``, which is left out."""
        parts: list[tuple[Call, ...]] = [()]
        for call in self.calls:
            if call.name == RESUME:
                parts.append(())
            else:
                parts[-1] += (call,)
        return parts

    def scenario(self) -> Scenario:
        """Return the runs: the last one is the reference."""
        runs: list[Run] = []
        parts = self.parts()
        first_step = 0
        for number, part in enumerate(parts):
            actions = self._actions(part)
            # ``resume`` saves at the end of a process group, and loads at the start of the next.
            if number > 0:
                actions.insert(0, "load")
            if number + 1 < len(parts):
                actions.append("save")
            after = ""
            if number > 0:
                after = f"{self.name}-{number - 1}"
            run = Run(
                f"{self.name}-{number}",
                ("build_model", "build", *actions),
                first_step=first_step,
                after=after,
                records_calls=True,
            )
            runs.append(run)
            first_step = _next_batch(part, first_step)
        runs.append(self._reference())
        return Scenario("walk", tuple(runs))

    def _actions(self, part: Sequence[Call]) -> list[str]:
        """Return the actions of a rank for these calls: ``call step()`` for ``step()``.

        A call that the trainer makes itself is the plain action, such as ``step``.
        """
        actions = []
        for call in part:
            if call.name in self.kind.own:
                actions.append(call.name)
            else:
                actions.append(f"{CALL}{call}")
        return actions

    def _reference(self) -> Run:
        """Return the run of one process that makes all calls."""
        calls = [f"{REFERENCE_CALL}{call}" for call in self.calls]
        # Of the cell's options it keeps those that change what is trained.
        options = ("model", "frozen", "param_groups", "use_orig_params")
        actions = ("build_model", *calls)
        return Run(
            f"{self.name}-reference",
            actions,
            strategy="ddp",
            world_size=1,
            only=options,
            records_calls=True,
        )


def _next_batch(calls: Sequence[Call], batch: int) -> int:
    """Return the number of the batch after these calls.

    Args:
        calls: The calls.
        batch: The number of the batch of the first call.
    """
    for call in calls:
        if call.name in {"step", "micro", "skip"}:
            batch += 1
        if call.name == "new_epoch":
            batch += EPOCH_STEPS - batch % EPOCH_STEPS
    return batch

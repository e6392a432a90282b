"""Sequences of calls: which call may follow which, and the runs that perform them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_distcompat.calls import CALL, REFERENCE_CALL, RESUME, WALK, Call
from pytest_distcompat.drivers._calls import Calls
from pytest_distcompat.drivers._tiny import EPOCH_STEPS
from pytest_distcompat.scenario import Run, Scenario

#: Calls between which no gradients may be pending: what becomes of these is not defined.
_WHOLE = frozenset({"add_group", "freeze", "unfreeze", "save", "load", "load_weights", "resume"})
#: Calls that change the structure that a checkpoint must have.
_STRUCTURE = frozenset({"add_group", "freeze", "unfreeze"})


def allowed(calls: Sequence[Call], call: Call, own: Sequence[str] = ()) -> bool:
    """Tell whether a call may follow the others.

    Args:
        calls: The calls before.
        call: The call.
        own: The calls that the trainer does itself; such a trainer saves after a step only.
    """
    pending, frozen, added, saved, stepped = False, "", False, False, False
    for one in calls:
        arguments = dict(one.arguments)
        if one.name in {"step", "micro"}:
            pending = one.name == "micro" or arguments.get("zero") == "keep"
            stepped = True
        elif one.name in {"zero_grad", "resume"}:
            pending = False
        if one.name in {"freeze", "unfreeze"}:
            frozen = str(arguments.get("part", "inlet")) if one.name == "freeze" else ""
        added = added or one.name == "add_group"
        saved = one.name == "save" or (saved and one.name not in {*_STRUCTURE, "resume"})
        stepped = stepped and one.name not in {"save", "resume"}
    fits = {
        "freeze": not frozen,
        "unfreeze": frozen == dict(call.arguments).get("part", "inlet"),
        "add_group": not added,
        "load": saved,
        "load_weights": saved,
        # A new process group builds the trainer as it was in the beginning.
        "resume": not (frozen or added),
    }
    # Before a step there is no state to read.
    reads_state = ("of", "optimizer_state") in call.arguments and not any(one.name == "step" for one in calls)
    return (
        fits.get(call.name, True)
        and not reads_state
        and not (pending and call.name in _WHOLE)
        and (stepped or not own or call.name not in {"save", "resume"})
    )


def valid(calls: Sequence[Call], own: Sequence[str] = ()) -> bool:
    """Tell whether each call may follow those before it."""
    return all(allowed(calls[:index], call, own) for index, call in enumerate(calls))


@dataclass(frozen=True)
class Walk:
    """A sequence of calls of one driver, and its runs: one for each process group, and the reference."""

    calls: tuple[Call, ...]
    kind: type[Calls]

    def __str__(self) -> str:
        return ", ".join(map(str, self.calls))

    @property
    def name(self) -> str:
        """Return a name of the sequence, for its directories."""
        return f"{WALK}{hashlib.sha256(str(self).encode()).hexdigest()[:8]}"

    def parts(self) -> list[tuple[Call, ...]]:
        """Return the calls of each process group, without ``resume``."""
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
        position, parts = 0, self.parts()
        for number, part in enumerate(parts):
            actions = ["build_model", "build", *["load"] * bool(number)]
            actions += [call.name if call.name in self.kind.own else f"{CALL}{call}" for call in part]
            actions += ["save"] * (number + 1 < len(parts))
            after = f"{self.name}-{number - 1}" if number else ""
            runs.append(Run(f"{self.name}-{number}", tuple(actions), first_step=position, after=after))
            for call in part:
                position += call.name in {"step", "micro", "skip"}
                position += EPOCH_STEPS - position % EPOCH_STEPS if call.name == "new_epoch" else 0
        reference = ("build_model", *(f"{REFERENCE_CALL}{call}" for call in self.calls))
        only = ("model", "frozen", "param_groups", "use_orig_params")
        runs.append(Run(f"{self.name}-reference", reference, strategy="ddp", world_size=1, only=only))
        return Scenario("walk", tuple(runs))

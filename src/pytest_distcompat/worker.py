"""What a rank of a suite does: the driver's verbs in order, the probe after each. Started by name, imported by nobody."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_distcompat import clock
from pytest_distcompat.cell import Cell
from pytest_distcompat.driver import STEP_VERBS, Driver, Plan
from pytest_distcompat.drivers import find_driver
from pytest_distcompat.places import Places
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.scenario import Life
from pytest_distcompat.trace import Moment
from pytest_distcompat.world import World

if TYPE_CHECKING:
    from torch.nn import Module

    from pytest_distcompat.launch import RankLog
    from pytest_distcompat.probe import Observer

#: The verbs that are the trainer's own, and may be one call to it.
TRAINING = STEP_VERBS | {"build", "load", "save"}


def run(payload: Mapping[str, Any], log: RankLog) -> None:
    """One life on this rank.

    ``payload``: ``driver`` (a name or module:attribute), ``cell`` (an id), ``device`` (cpu or cuda), ``life`` (the fields
    of a Life), ``ranks`` (of the cell that the life is for) and the directories ``save_to``, ``load_from`` and ``export``.
    A life with damage has a copy of ``load_from`` in ``save_to``, and loads that.
    """
    from pytest_distcompat.probe import Observer

    told = payload["life"]
    life = Life(
        **{**told, "verbs": tuple(told["verbs"]), "only": None if told["only"] is None else tuple(told["only"])}
    )
    world = World.from_environment(payload["device"])
    if world.shared:
        _meet_by_gloo(world)
    driver = find_driver(payload["driver"])(Cell.parse(payload["cell"]), world)
    places = Places.told(payload)
    if log.by_hand:
        places.clear(life, world.rank, log.path.parent)
    rank = _Rank(driver, life, places, Observer(), log)
    rank.live()
    _leave(driver)


def _meet_by_gloo(world: World) -> None:
    """Ranks that share a GPU cannot use NCCL, which trainers choose by themselves if nobody else was first."""
    import torch
    from torch import distributed

    torch.cuda.set_device(world.device)
    distributed.init_process_group(world.backend)


#: What must not be destroyed before the process ends, see ``_leave``.
_kept: list[object] = []


class _Rank:
    """The verbs of one life on one rank, each with what the probe sees after it."""

    def __init__(self, driver: Driver, life: Life, places: Places, observer: Observer, log: RankLog) -> None:
        self.driver, self.life, self.places, self.observer, self.log = driver, life, places, observer, log
        self.index, self.end = -1, 0
        self.number = life.first_step
        self.plain: Module | None = None

    def live(self) -> None:
        """All verbs, to the end."""
        self._begin()
        while self.index < len(self.life.verbs):
            if self.life.verbs[self.index] in TRAINING:
                self._train()
            else:
                self._own()

    def _begin(self) -> None:
        """Say which verb is next: if it hangs or dies, that is the last that is heard of this rank."""
        self.index += 1
        if self.index < len(self.life.verbs):
            self.log.write("verb", verb=self.life.verbs[self.index], index=self.index)
        self.observer.restart()
        self.began = clock.now()

    def _end(self, facts: Mapping[str, Any], seconds: float) -> None:
        verb = self.life.verbs[self.index]
        moment = Moment(self.driver.world.rank, self.life.name, verb, self.index, seconds=seconds, **facts)
        self.log.write("moment", verb=verb, index=self.index, moment=moment.to_json())
        self._begin()

    def _own(self) -> None:
        facts = getattr(self, f"_{self.life.verbs[self.index]}")()
        self._end(facts, clock.now() - self.began)

    def _train(self) -> None:
        """All of the trainer's own verbs up to the next that is not: one call. Files are read in between, by us."""
        rest = self.life.verbs[self.index :]
        length = next((n for n, verb in enumerate(rest) if verb not in TRAINING | {"files"}), len(rest))
        verbs = tuple(verb for verb in rest[:length] if verb in TRAINING)
        self.end = self.index + length
        plain, self.plain = self.plain, None
        found = self.places.save_to if self.life.damage else self.places.load_from
        plan = Plan(verbs, self.number, self.places.save_to, found)
        with self.observer.watching():
            self.observer.look_closely(on=self._closely)
            self.driver.train(plain, plan, self._seen)  # type: ignore[arg-type]  # a plan without build needs no model
        if self.index < self.end:
            raise RuntimeError(f"the driver's train() came back before {self.life.verbs[self.index]!r} was seen")

    @property
    def _closely(self) -> bool:
        """Whether single operators are to be seen in the next verb."""
        following = self.life.verbs[self.index] if self.index < self.end else ""
        if following not in STEP_VERBS or self.life.first_step:
            # A training that goes on is compared with one that never stopped: what it reduces shows in its values.
            return False
        steps = sum(verb in STEP_VERBS for verb in self.life.verbs)
        # What the check of accumulation counts in every step of an epoch, all others ask of one.
        return self.number == min(CLOSE, steps) - 1 or self.driver.cell.option("accumulate") != 1

    def _seen(self, verb: str, loss: float | None = None) -> None:
        """What ``Driver.train`` calls after each verb."""
        # Before we look: that is no time of the trainer's.
        seconds = clock.now() - self.began
        expected = self.life.verbs[self.index] if self.index < self.end else ""
        if verb != expected:
            told = f"the next verb of the plan is {expected!r}" if expected else "the plan is done"
            raise RuntimeError(f"the driver's train() told of {verb!r}; {told}")
        with self.observer.aside():
            facts = self._look(whole=verb not in STEP_VERBS or self.number < self.life.first_step + WHOLE)
        if verb in STEP_VERBS:
            driver = self.driver
            facts |= {"loss": _number(loss, "the loss"), "grad_norm": _number(driver.grad_norm, "grad_norm")}
            facts |= {"tokens": int(_number(driver.tokens, "tokens") or 0), **self.observer.facts()}
            self.number += 1
        elif verb == "load":
            # A load that trains again reaches the same state: its steps alone tell.
            facts |= {"steps": tuple(self.observer.steps)}
        self._end(facts, seconds)
        while self.index < len(self.life.verbs) and self.life.verbs[self.index] == "files":
            # By now all ranks have left ``save``, for they took collective steps since.
            self._own()
        self.observer.look_closely(on=self._closely)

    def _plain(self) -> dict[str, Any]:
        self.plain = self.driver.plain_model()
        return self._show(self.plain)

    def _reload(self) -> dict[str, Any]:
        from pytest_distcompat.probe.files import readable

        # The file descriptor closes after the model is shown, in case it is loaded only as it is used.
        with readable(self.places.export) as there:
            self.plain = self.driver.reload(there)
            return self._show(self.plain)

    def _show(self, model: Module) -> dict[str, Any]:
        from pytest_distcompat.probe import read_plain

        driver = self.driver
        facts = {"plain": read_plain(model, driver.blocks, driver.ignored, driver.options)}
        if not self.driver.cell.option("compile"):
            # A hook would break the graph that compile is to see.
            self.observer.attach(model)
        return facts

    def _files(self) -> dict[str, Any]:
        """Rank 0 only; what was exported comes after what was saved."""
        from pytest_distcompat.probe import read_files, read_saved

        if self.driver.world.rank:
            return {}
        exported = read_files(self.places.export, "export/")
        found = {"files": read_files(self.places.save_to) + exported}
        if self.driver.cell.option("save_only_model"):
            found["saved"] = read_saved(self.places.save_to)
        return {what: tuple(fact.renamed(self.driver.saved_name) for fact in facts) for what, facts in found.items()}

    def _export(self) -> dict[str, Any]:
        if not self.driver.can("export"):
            return {}
        # What was trained: an export that rounds the live model, and then writes it, is to be seen.
        facts = self._look(whole=True)
        self.places.export.mkdir(parents=True, exist_ok=True)
        self.driver.export(self.places.export)
        return facts

    def _evaluate(self) -> dict[str, Any]:
        from pytest_distcompat.probe import sample

        if not self.driver.can("evaluate"):
            return {}
        model = self.plain if self.plain is not None else self.driver.model
        with _uncompiled():
            return {"outputs": sample(self.driver.evaluate(model))}

    def _reference(self) -> dict[str, Any]:
        from pytest_distcompat.probe import read_optimizer

        driver, model = self.driver, self.plain
        assert model is not None
        model.float()
        with self.observer.watching():
            loss = driver.reference(model, self.number, self.places.ranks)
        whole = self.number < WHOLE
        self.number += 1
        facts = {"loss": _number(loss, "the loss"), "grad_norm": _number(driver.grad_norm, "grad_norm")}
        facts |= self.observer.facts()
        if driver.optimizer is None:
            raise RuntimeError("reference() is to set self.optimizer to the optimizer that it steps, as train() does")
        return facts | {"optimizer": read_optimizer(model, driver.optimizer, whole=whole)}

    def _rounded(self) -> dict[str, Any]:
        """Its author was not told of this: that a reference cannot be computed so is no failure, only nothing is known."""
        import torch

        dtype = getattr(torch, PRECISIONS.get(self.driver.cell.precision).compute)
        with contextlib.ExitStack() as stack, contextlib.suppress(Exception):
            for device in sorted({"cpu", torch.device(self.driver.world.device).type}):
                stack.enter_context(torch.autocast(device, dtype))
            return self._reference()
        return {}

    def _damage(self) -> dict[str, Any]:
        from pytest_distcompat.probe.damage import spoil

        if self.driver.world.rank:
            return {}
        return {"files": (spoil(self.places.save_to, self.life.damage),)}

    def _look(self, *, whole: bool) -> dict[str, Any]:
        from pytest_distcompat.probe.look import look

        driver = self.driver
        return look(
            driver.model,
            driver.optimizer,
            device=driver.world.device,
            scheduler=driver.scheduler,
            scaler=driver.scaler,
            trainer_world_size=driver.trainer_world_size(),
            whole=whole,
        )


def _number(value: Any, what: str) -> float | None:
    """As the driver says it: trainers have it as a tensor too. Raises TypeError for what is no number."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        told = f"{what} is a {type(value).__name__}: {value!r:.200}"
        raise TypeError(f"{told}; expected a number, or a tensor with one element") from error


def _uncompiled() -> contextlib.AbstractContextManager[object]:
    """Inside, what torch.compile wraps runs as it is written: the question is what the weights are, and a graph for one
    batch takes as long as all of the training. https://docs.pytorch.org/docs/stable/generated/torch.compiler.set_stance.html
    """
    if "torch._dynamo" not in sys.modules:
        # To ask for it would import it, seconds of a rank that compiles nothing.
        return contextlib.nullcontext()
    import torch

    stance: contextlib.AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


#: So many steps of a life are looked at in full: no check compares more of them value by value.
WHOLE = 5
#: In which step of a training, counted from 1, single operators are seen; in its last if it has fewer.
CLOSE = 3


def _leave(driver: Driver) -> None:
    """A rank that did all it was told leaves its process group properly; NCCL warns of one that does not.

    The driver outlives the group: DDP's reducer holds the last reference to a gloo group, whose destructor joins a
    worker thread while it holds the GIL that the thread may be waiting for. Seen once in 36 lives as a hang on return.
    """
    from torch import distributed

    _kept.append(driver)
    if distributed.is_initialized():
        with contextlib.suppress(RuntimeError):
            distributed.destroy_process_group()

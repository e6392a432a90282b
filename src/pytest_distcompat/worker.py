"""What a rank of a suite does: the driver's verbs in order, the probe after each. Started by name, imported by nobody."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_distcompat.cell import Cell
from pytest_distcompat.drivers import Driver, find_driver
from pytest_distcompat.scenario import Life
from pytest_distcompat.trace import Moment
from pytest_distcompat.world import World

if TYPE_CHECKING:
    from torch.nn import Module

    from pytest_distcompat.launch import RankLog
    from pytest_distcompat.probe import Observer


def run(payload: Mapping[str, Any], log: RankLog) -> None:
    """One life on this rank.

    ``payload``: ``driver`` (a name or module:attribute), ``cell`` (an id), ``device`` (cpu or cuda), ``life`` (the fields
    of a Life) and ``checkpoint`` (the directory to save to and to load from).
    """
    from pytest_distcompat.probe import Observer

    life = Life(**{**payload["life"], "verbs": tuple(payload["life"]["verbs"])})
    world = World.from_environment(payload["device"])
    driver = find_driver(payload["driver"])(Cell.parse(payload["cell"]), world)
    rank = _Rank(driver, life, Path(payload["checkpoint"]), Observer())
    for index, verb in enumerate(life.verbs):
        log.write("verb", verb=verb, index=index)
        began = time.perf_counter()
        facts = rank.do(verb)
        moment = Moment(world.rank, life.name, verb, index, seconds=time.perf_counter() - began, **facts)
        log.write("moment", verb=verb, index=index, moment=moment.to_json())
    _leave(driver)


#: What must not be destroyed before the process ends, see ``_leave``.
_kept: list[object] = []


class _Rank:
    """The verbs of one life on one rank, each with what the probe sees after it."""

    def __init__(self, driver: Driver, life: Life, checkpoint: Path, observer: Observer) -> None:
        self.driver, self.checkpoint, self.observer = driver, checkpoint, observer
        self.number = life.first_step
        self.plain: Module | None = None

    def do(self, verb: str) -> dict[str, Any]:
        """Do one verb; the facts of its moment."""
        facts: dict[str, Any] = getattr(self, f"_{verb}")()
        return facts

    def _plain(self) -> dict[str, Any]:
        from pytest_distcompat.probe import read_plain

        self.plain = self.driver.plain_model()
        facts = {"plain": read_plain(self.plain)}
        if not self.driver.cell.option("compile"):
            # A hook would break the graph that compile is to see.
            self.observer.attach(self.plain)
        return facts

    def _build(self) -> dict[str, Any]:
        assert self.plain is not None
        self.driver.build(self.plain)
        self.plain = None
        return self._look()

    def _step(self) -> dict[str, Any]:
        with self.observer.watching():
            loss = self.driver.step(self.number)
        self.number += 1
        return {"loss": loss, **self.observer.facts(), **self._look()}

    def _save(self) -> dict[str, Any]:
        self.driver.save(self.checkpoint)
        return self._look()

    def _load(self) -> dict[str, Any]:
        self.driver.load(self.checkpoint)
        return self._look()

    def _files(self) -> dict[str, Any]:
        """Rank 0 only: by now all ranks have left ``save``, for they took collective steps since."""
        from pytest_distcompat.probe import read_files

        return {"files": read_files(self.checkpoint)} if self.driver.world.rank == 0 else {}

    def _look(self) -> dict[str, Any]:
        from pytest_distcompat.probe import read_model, read_optimizer, read_scheduler
        from pytest_distcompat.probe.optimizer import torch_optimizer

        driver = self.driver
        facts: dict[str, Any] = {"scheduler": read_scheduler(driver.scheduler)}
        inner = torch_optimizer(driver.optimizer)
        facts["model"] = read_model(driver.model, inner, driver.trainer_world_size())
        if inner is not None:
            facts["optimizer"] = read_optimizer(driver.model, driver.optimizer)
        return facts


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

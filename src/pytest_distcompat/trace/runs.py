"""Traces of runs: the snapshots of all ranks of one run, and of all runs of one scenario.

A run is one process group from start to end. A scenario is the runs that a check needs together:
``train``, then ``resume``, which loads what ``train`` saved. ``runner.Runner.trace`` makes the
``Trace`` of a scenario in one cell (one point of the matrix, such as ``fsdp2-fp32-w2``). Checks
are called with it: ``trace.run("resume").at("step", 0)`` has the snapshot of each rank after the
first step of the resumed training.

A *stand-in* (``snapshot.StandIn``) is one process that an extension runs in place of several ranks.
Its tensors have shapes and no values, so it is not compared with other ranks, and saves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from pytest_distcompat.spread import Hosts
from pytest_distcompat.trace.model import UnwrappedInfo
from pytest_distcompat.trace.snapshot import TF32, Snapshot, StandIn


@dataclass(frozen=True)
class RunFailure:
    """Failure of a run: what happened on the rank that failed first, where, and its messages."""

    #: ``raised`` (an exception), ``crashed`` (the process died) or ``hung`` (the time limit).
    kind: str
    #: One line: ``RuntimeError: mat1 and mat2 must have the same dtype``.
    message: str
    #: All that is known, the first cause first: tracebacks, stacks, output.
    text: str
    #: The action that failed, such as ``step``; empty if it was outside any action.
    action: str = ""
    #: The index of that action in the run, from 0; -1 if it was outside any action.
    index: int = -1
    #: The rank that failed first; None if no rank did, as when the launch itself failed.
    rank: int | None = None


@dataclass(frozen=True)
class RunTrace:
    """One run on all its ranks."""

    #: The name in its scenario: ``train``, ``resume``, ``reference``.
    name: str
    #: The number of its ranks.
    world_size: int
    #: What each rank recorded after each of its actions, in no particular order.
    snapshots: tuple[Snapshot, ...]
    #: Why the run failed; None if it ended well.
    end: RunFailure | None = None
    #: The id of the cell that it ran in. A resumed run may be in another one than the check's: with
    #: another number of ranks, say.
    cell: str = ""
    #: The name of each rank's machine; no names if the run was on one machine.
    hosts: Hosts = field(default_factory=Hosts)

    def at(self, action: str, nth: int = 0) -> tuple[Snapshot, ...]:
        """Return the snapshots after the nth such action, one per rank in rank order.

        ``at("step", 0)`` is after the first step, ``at("step", -1)`` after the last one. The result
        is empty if no rank reached the action, and lacks the ranks that did not.
        """
        indices = self.indices(action)
        if not -len(indices) <= nth < len(indices):
            # The run has not so many such actions.
            return ()
        return self.at_index(indices[nth])

    def indices(self, action: str) -> list[int]:
        """Return the index in the run of each such action that any rank reached, in order."""
        return sorted({snapshot.index for snapshot in self.snapshots if snapshot.action == action})

    def at_index(self, index: int) -> tuple[Snapshot, ...]:
        """Return the snapshots after the action with that index in the run."""
        snapshots: list[Snapshot] = []
        for snapshot in self.snapshots:
            if snapshot.index == index:
                snapshots.append(snapshot)
        snapshots.sort(key=lambda snapshot: snapshot.rank)
        return tuple(snapshots)

    @property
    def trained(self) -> tuple[Snapshot, ...]:
        """Return the snapshots after three steps, or after those that stand-ins take.

        What stands in for ranks takes only ``StandIn.steps`` steps.
        """
        steps = 3
        if self.stand_in is not None:
            steps = self.stand_in.steps
        return self.at("step", steps - 1)

    @property
    def on_gpu(self) -> bool:
        """Tell whether its ranks computed on GPUs.

        ``Snapshot.products`` says how a GPU multiplies, such as ``{"matmul": "tf32"}``. On the CPU
        it is empty.
        """
        return any(snapshot.products for snapshot in self.snapshots)

    @property
    def tf32(self) -> bool:
        """Tell whether a rank's GPU multiplied float32 matrices in TF32."""
        return any(snapshot.products.get("matmul") == TF32 for snapshot in self.snapshots)

    @property
    def tf32_since_build(self) -> bool:
        """Tell whether a GPU changed from full float32 to TF32 once the trainer was built.

        Then a library turned TF32 on: a user who wants it sets it before the build.
        """
        before = self.first("build_model")
        if not self.tf32 or before is None:
            return False
        # If nothing was recorded before, nothing is known to have changed.
        return before.products.get("matmul", TF32) != TF32

    @property
    def stand_in(self) -> StandIn | None:
        """Return what took the place of the lowest rank that did not run itself.

        None if all ranks ran.
        """
        for snapshot in self.snapshots:
            if snapshot.stand_in is not None:
                return snapshot.stand_in
        return None

    @property
    def has_values(self) -> bool:
        """Tell whether its tensors had values, so that it can save: no stand-in took part."""
        return self.stand_in is None

    @property
    def has_every_rank(self) -> bool:
        """Tell whether each rank recorded its own part, and no stand-in did so for it."""
        return self.stand_in is None

    @property
    def unwrapped(self) -> UnwrappedInfo | None:
        """Return the model before anything wrapped it, None if it was not recorded.

        A run begins with ``build_model`` or, if it loads an export, with ``reload``.
        """
        first = self.first("build_model") or self.first("reload")
        return first.unwrapped if first else None

    def first(self, action: str) -> Snapshot | None:
        """Return the snapshot of the lowest rank after the first such action.

        None if no rank reached it.
        """
        snapshots = self.at(action)
        return snapshots[0] if snapshots else None


@dataclass(frozen=True)
class Trace:
    """All runs of a scenario, as the checks read them."""

    #: The driver's name, or ``module:attribute``.
    driver: str
    #: Name of a run -> its trace, in the order of the scenario.
    runs: Mapping[str, RunTrace]
    #: Name of a run -> the shell command that repeats it.
    notes: Mapping[str, str] = field(default_factory=dict)
    #: What the user demands of measured numbers, by the name of the limit: ``{"throughput": 0.9}``.
    limits: Mapping[str, float] = field(default_factory=dict)
    #: False for the run of a script that saved nothing, so that nothing is known about files.
    saves: bool = True

    def run(self, name: str = "train") -> RunTrace:
        """Return the run of that name. Raises KeyError where the scenario has none."""
        return self.runs[name]

    @property
    def stand_in(self) -> StandIn | None:
        """Return what took the place of ranks, in the first such run; None if all ran."""
        for run in self:
            if run.stand_in is not None:
                return run.stand_in
        return None

    def __iter__(self) -> Iterator[RunTrace]:
        return iter(self.runs.values())

    def name_hosts(self, text: str) -> str:
        """Return a finding with the machines of the ranks that it names.

        A finding is one sentence of a check about what is wrong: "rank 1 has no gradient". In a run
        on two machines it becomes "rank 1 on n1 has no gradient". A resumed run with another number
        of ranks has other ranks on each machine, and the text does not say which run it is about.
        Then the text stays, and a line below it lists the ranks of each machine for both.
        """
        # A text that quotes a failure is about the run that failed. Any other may be about any run.
        failed_runs: list[RunTrace] = []
        for run in self:
            if run.end is not None and run.end.message in text:
                failed_runs.append(run)
        # A dictionary, to have each only once.
        all_hosts: dict[Hosts, None] = {}
        for run in failed_runs or self:
            if run.hosts.names:
                all_hosts[run.hosts] = None
        if not text or not all_hosts:
            # No finding, or all runs were on one machine.
            return text
        if len(all_hosts) == 1:
            (only_hosts,) = all_hosts
            return only_hosts.name_in(text)
        places: list[str] = []
        for hosts in all_hosts:
            numbers = range(len(hosts.names))
            ranks = ", ".join(map(str, numbers))
            places.append(hosts.name_in(f"ranks {ranks}"))
        return f"{text}\n\nwhere ranks are: {'; '.join(places)}"

    @classmethod
    def of(cls, driver: str, runs: Iterable[RunTrace]) -> Trace:
        """Return a trace of these runs, in order."""
        return cls(driver, {run.name: run for run in runs})

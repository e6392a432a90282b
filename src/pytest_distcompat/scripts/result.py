"""What one run of a script left: how it ended, its trace, and what the checks say of it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.driver import Driver
from pytest_distcompat.failures import Incompatible, LifeFailure, UsageProblem
from pytest_distcompat.judge import Verdict, judge, skipped
from pytest_distcompat.launch import Ending
from pytest_distcompat.runner import life_trace
from pytest_distcompat.scripts import final
from pytest_distcompat.scripts.reading import read_in_a_process
from pytest_distcompat.scripts.sight import Sight
from pytest_distcompat.trace import FileFact, LifeTrace, Moment, Trace

#: The checks that one run gives the evidence for. The others need lives that a script does not have, or verbs of a driver.
CLAIMS = ("active", "names", "optimizer", "dtypes", "memory", "units", "float8")
FINAL = "final_model_loadable"
#: The step that they look at. In the first ones a warm-up may not have moved anything, a gradient scaler may have skipped them.
JUDGED = 3
#: Where in a life stands what was read of its files after it: behind every step.
_FILES = 10**9
#: Where a model can be seen.
KNOWN = "Accelerator.prepare, deepspeed.initialize, DistributedDataParallel, FullyShardedDataParallel, fully_shard, torch.compile"


@dataclass(frozen=True)
class ScriptRun:
    """One run of a script on all its ranks.

    ``cell`` is what was to be running, None where nobody said; ``directory`` holds logs and what the ranks wrote; ``output`` is
    where the script was to leave its model, if that was said; ``saved_name`` gives the plain name of a key in its files.
    """

    ending: Ending
    cell: Cell | None
    directory: Path
    device: str
    output: Path | None = None
    saved_name: Callable[[str], str] = lambda key: key

    @property
    def failed(self) -> bool:
        """Whether the launcher or any rank ended other than well."""
        return self.ending.failed

    @property
    def hard(self) -> bool:
        """Whether more happened than an exception: a crash, a hang."""
        return self.failed and self.ending.kind != "raised"

    def raise_if_failed(self) -> None:
        """Raise LifeFailure with the story of all ranks, if the launcher or any rank ended other than well."""
        __tracebackhide__ = True  # pytest then shows the line of the test
        if self.failed:
            raise LifeFailure(self.text(), hard=self.hard)

    def raise_unless_failed(self, declared: str) -> None:
        """Raise Incompatible if the run did not fail, LifeFailure if it hung or failed with another first cause than declared."""
        __tracebackhide__ = True
        if not self.failed:
            raise Incompatible(f"all ranks ended well; expected the run to fail with {declared!r}\n{self.text()}")
        if self.ending.timed_out or not re.search(declared, self.ending.headline()):
            raise LifeFailure(f"the run failed otherwise than with {declared!r}\n\n{self.text()}", hard=self.hard)

    def text(self) -> str:
        """How it ended: the first cause first, what was bridged, and the command that runs it alone."""
        parts = [self.ending.text(), *self.labels, f"logs: {self.directory}", f"this run alone: {self.ending.command}"]
        return "\n".join(parts)

    @functools.cached_property
    def labels(self) -> tuple[str, ...]:
        """What was done to libraries to make them run on CPU ranks, a line each; none where they were left alone."""
        said = (event for events in self.ending.events.values() for event in events if event["event"] == "bridge")
        return tuple(dict.fromkeys(f"CPU bridge: {event['what']}" for event in said))

    @functools.cached_property
    def life(self) -> LifeTrace:
        """What the probe saw, without what stands in files."""
        cell = self.cell or Cell("ddp", "fp32", len(self.ending.ranks))
        return life_trace("train", self.ending, cell)

    @property
    def losses(self) -> tuple[tuple[float | None, ...], ...]:
        """The loss of each step that each rank's backward began with, by rank."""
        return tuple(
            tuple(
                m.loss
                for m in sorted(self.life.moments, key=lambda one: one.index)
                if m.verb == "step" and m.rank == rank
            )
            for rank in range(self.life.world_size)
        )

    def output_of(self, rank: int) -> str:
        """What that rank wrote to its stdout and stderr, where the launcher kept them apart."""
        found = sorted(self.directory.glob(f"logs/*/attempt_0/{rank}/std*.log"))
        return "".join(path.read_text(encoding="utf-8", errors="replace") for path in found)

    def check(self, *names: str) -> None:
        """Have these checks judge the run: ``active names optimizer dtypes memory units float8 final_model_loadable``.

        One that says nothing of such a run (``units`` under DDP, ``float8`` without fp8) is left out, and ``verdicts`` says why.
        Raises Incompatible with what all of them found; also where there was nothing to probe, or none of them says
        anything, which is never a pass. Raises UsageProblem for an unknown name, or a run for which nobody said what was to
        be running.
        """
        found = self.verdicts(*names)
        bad = [verdict for verdict in found if not verdict.ok and verdict.status != "skipped"]
        if all(verdict.status == "skipped" for verdict in found):
            bad = found
        if bad:
            told = "\n\n".join(
                f"{verdict.check} ({verdict.cell}): {verdict.status}\n{verdict.message}" for verdict in bad
            )
            more = self.text() if self.failed else "\n".join((*self.labels, f"logs: {self.directory}"))
            raise Incompatible(f"{told}\n\n{more}", hard=self.hard)

    def verdicts(self, *names: str) -> list[Verdict]:
        """The same as data: one verdict a name; ``skipped``, and why, for a check that says nothing of such a run."""
        if not names:
            raise UsageProblem(f"no check is named. Known: {', '.join((*CLAIMS, FINAL))}")
        for name in names:
            if name not in {*CLAIMS, FINAL}:
                raise UsageProblem(f"{name!r} is no check of a script's run. Known: {', '.join((*CLAIMS, FINAL))}")
        return [self._verdict(name) for name in names]

    def _verdict(self, name: str) -> Verdict:
        if self.cell is None and name != FINAL:
            raise UsageProblem(f"check {name!r}: launch(strategy=...) was not told what is to be running")
        cell = self.cell or Cell("ddp", "fp32", self.life.world_size)
        if self.failed:
            # No check is better than the run that it is about.
            status = {"raised": "failed"}.get(self.ending.kind, self.ending.kind)
            told = filter(None, (f"the run failed: {self.ending.headline()}", self._probe_failure()))
            return Verdict(name, cell.id, status, "\n".join(told))
        problem = self.unprobed()
        if problem:
            return Verdict(name, cell.id, "failed", problem)
        if name == FINAL:
            checkpoints = [event["path"] for event in self.saved() if event["everyone"]]
            found = final.findings(self.life, cell, self.left_in(), checkpoints, self._read, saved_name=self.saved_name)
            return Verdict(name, cell.id, "failed" if found else "passed", "\n".join(found))
        check = CHECKS.get(name)
        reason = check.applies(cell, Driver)
        if reason:
            return skipped(name, cell, f"the check says nothing here: {reason}")
        short = self._too_short()
        if short:
            return Verdict(name, cell.id, "failed", short)
        life = self.life if name != "names" else self.with_files
        trace = Trace.of("script", [life])
        return judge(check, cell, replace(trace, saves=self._is_to_save))

    def unprobed(self, *, trains: bool = True) -> str:
        """Why there is nothing to judge, if so; empty otherwise. One that ``trains`` is to take a step."""
        if failure := self._probe_failure():
            return failure
        if not Sight.read(self.directory).steps:
            return "nothing to probe: watch_steps=0 leaves the probe out"
        if trains and not self.life.at("build"):
            events = (event for events in self.ending.events.values() for event in events)
            unseen = next((event for event in events if event["event"] == "unseen model"), None)
            told = (
                f"{unseen['optimizer']} stepped, on a model that nothing wrapped"
                if unseen
                else "no optimizer of torch's stepped"
            )
            return f"nothing to probe: {told}. A model is seen when it passes through one of: {KNOWN}"
        return ""

    def _probe_failure(self) -> str:
        """Where the probe itself failed first, and its traceback; empty if it did not."""
        told = "the probe itself failed, at {}, and saw no more from then on\n{}"
        for events in self.ending.events.values():
            for event in events:
                if event["event"] == "probe failed":
                    return f"rank {event['rank']}: {told.format(event['where'], event['text'])}"
        for file in sorted(self.directory.glob("probe-*.failed")):
            where, _, text = file.read_text(encoding="utf-8").removeprefix("at ").partition(":\n")
            return f"a process that is no rank: {told.format(where, text)}"
        return ""

    def _too_short(self) -> str:
        """Why the step that checks look at was not seen in full; empty if it was."""
        watched = Sight.read(self.directory).steps
        if watched < JUDGED:
            return f"watch_steps={watched}: the check looks at step {JUDGED} in full; expected {JUDGED} or more"
        taken = len({moment.index for moment in self.life.moments if moment.verb == "step"})
        if taken < JUDGED:
            steps = "1 optimizer step" if taken == 1 else f"{taken} optimizer steps"
            return f"the run took {steps}: the check looks at step {JUDGED}; let the script take {JUDGED} or more"
        return ""

    def saved(self) -> list[Mapping[str, Any]]:
        """What the run wrote and the probe saw: ``path``, ``step`` and the place ``index``, in order; each path once."""
        events = (event for events in self.ending.events.values() for event in events if event["event"] == "saved")
        return sorted({event["path"]: event for event in events}.values(), key=lambda event: int(event["index"]))

    def left_in(self) -> Path | None:
        """Where the run was to leave its model, or where the probe saw it written last, not as a checkpoint."""
        if self.output is not None:
            return self.output
        events = (event for events in self.ending.events.values() for event in events)
        models = [event["path"] for event in self.saved() if not event["everyone"]]
        told = models or [event["path"] for event in events if event["event"] == "output"]
        return Path(told[-1]) if told else None

    def _read(self, wanted: Mapping[str, Any]) -> Any:
        events = (event for events in self.ending.events.values() for event in events)
        start = next((event for event in events if event["event"] == "start"), {})
        return read_in_a_process(start, self.directory, wanted)

    @functools.cached_property
    def with_files(self) -> LifeTrace:
        """The same life with what stands in the files that it saved: each checkpoint, which is to be whole; then the other files.

        Where there is no checkpoint the files are judged together: a script may write each part of the model by itself.
        """
        seen = [event["path"] for event in self.saved() if Path(event["path"]).exists()]
        output = str(self.output.resolve()) if self.output is not None and self.output.exists() else ""
        paths = list(dict.fromkeys(filter(None, (*seen, output))))
        read = self._read({"what": "files", "paths": paths})["files"] if paths else {}
        found = {path: tuple(_file(fact).renamed(self.saved_name) for fact in read[path]) for path in paths}
        checkpoints = {event["path"] for event in self.saved() if event["everyone"]}
        others = [found[path] for path in seen if path not in checkpoints]
        written = [found[path] for path in seen if path in checkpoints]
        if output and not written and not any(fact.holds == "model" for facts in others for fact in facts):
            # The probe does not see all writing: ``safetensors.torch.save`` gives bytes, and a file may get its name later.
            others.append(found[output])
        together = tuple(fact for facts in others for fact in facts)
        if written:
            written += others
        elif self._is_to_save or any(fact.holds == "model" for fact in together):
            written = [together]
        moments = [Moment(0, "train", "files", _FILES + nth, files=files) for nth, files in enumerate(written)]
        return replace(self.life, moments=(*self.life.moments, *moments))

    @property
    def _is_to_save(self) -> bool:
        """Whether the run called what saves a model, or was to leave one."""
        return self.output is not None or any(event["model"] for event in self.saved())


def _file(data: Mapping[str, Any]) -> FileFact:
    """A FileFact that went through JSON."""
    found = Moment.from_json({"rank": 0, "life": "", "verb": "", "index": 0, "files": [data]}).files
    return found[0]

"""Stages: commands that run one after the other within a time limit, and go on later where they stopped.

What each stage gave is in one JSON file, which is written before and after every stage. A stage that was cut off, by the
time limit or by whatever killed this process, runs again; one that failed does not.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

#: What a stage may have become, and needs no further run.
FINAL = {"passed", "failed", "timed out", "too long"}
#: The states and results of all stages, in the output directory.
RESULTS = "results.json"
#: The logs and reports of all stages, in the output directory: one file, because few may come back from a borrowed machine.
LOGS = "logs.tar.gz"
#: How long an interrupted command may take to write its report, in seconds.
GRACE = 15.0
#: How often to see whether this process is to stop, in seconds.
POLL = 0.5
#: How many characters of a failed command's output are kept.
TAIL = 2000

#: From the working directory of all stages, and the path that the stage's result is expected at, to its command.
Command = Callable[[Path, Path], Sequence[str]]


@dataclass(frozen=True)
class Stage:
    """One command, and how to read what it leaves.

    Attributes:
        name: Names its files and its entry in the results.
        command: Makes the command; given the working directory, and where the command is to write its result.
        seconds: How long it usually takes. With less time left, a shorter stage runs first.
        limit: After how many seconds it is taken for hung.
        resumes: Whether a run goes on where the one before was cut off. Others are cut off twice at most.
        nothing_left: The exit code of a command that found that the runs that were cut off left it nothing to do.
        read: Reads the result that the command has left.
        environment: Variables of the command.
        beside: Stages that follow one another with the same word here run at the same time; empty: alone.
    """

    name: str
    command: Command
    seconds: float
    limit: float = 480.0
    resumes: bool = False
    nothing_left: int | None = None
    read: Callable[[Path], Any] = lambda path: json.loads(path.read_text(encoding="utf-8"))
    environment: Mapping[str, str] = field(default_factory=dict)
    beside: str = ""


@dataclass
class Outcome:
    """Outcome of a stage: its status, how many times it was interrupted, and the seconds of its last run."""

    status: str
    cut_off: int = 0
    seconds: float = 0.0
    exit_code: int | None = None
    result: Any = None
    tail: str = ""


class Runner:
    """Runs stages until all are done or the time is over.

    Args:
        stages: The stages, most valuable first.
        output: Where the results and the logs go; what is there from an earlier call is gone on with.
        work: Where commands run and leave their files.
        deadline: When to stop, as ``time.monotonic`` says.
        whole: How many seconds a whole call has. Who was cut off after most of that is not run again.
    """

    def __init__(
        self, stages: Sequence[Stage], output: Path, work: Path, deadline: float, total_seconds: float
    ) -> None:
        self._stages = {stage.name: stage for stage in stages}
        assert len(self._stages) == len(stages), "two stages have one name"
        self._output = output
        self._work = work
        self._deadline = deadline
        self._whole = total_seconds
        #: The stages that this call has run: who was cut off waits for the next one.
        self._ran: set[str] = set()
        #: Set when this process is interrupted, and the threads that wait for commands have to end them.
        self._stopped = threading.Event()
        output.mkdir(parents=True, exist_ok=True)
        work.mkdir(parents=True, exist_ok=True)
        self.outcomes = self._read()

    def _read(self) -> dict[str, Outcome]:
        """Return the outcomes of earlier calls, and put their files back."""
        logs = self._output / LOGS
        # A file that was being written when the machine went away is no archive.
        with contextlib.suppress(FileNotFoundError, tarfile.ReadError, EOFError), tarfile.open(logs) as archive:
            archive.extractall(self._work, filter="data")
        with contextlib.suppress(FileNotFoundError):
            content = json.loads((self._output / RESULTS).read_text(encoding="utf-8"))["stages"]
            outcomes = {name: Outcome(**outcome) for name, outcome in content.items()}
            for name, outcome in outcomes.items():
                if outcome.status == "running":
                    # Nobody was left to say so.
                    outcomes[name] = self._cut(name, outcome.cut_off, 0.0)
            return outcomes
        return {}

    def forget(self, names: Sequence[str]) -> None:
        """Run these stages again, whatever became of them."""
        for name in names:
            self.outcomes.pop(name, None)
            for path in self._work.glob(f"{name}.*"):
                path.unlink()

    def left(self) -> float:
        """Return the seconds until the deadline."""
        return self._deadline - time.monotonic()

    def open(self) -> list[str]:
        """Return the names of the stages that are to run still."""
        done = {name for name, outcome in self.outcomes.items() if outcome.status in FINAL}
        return [name for name in self._stages if name not in done]

    def run(self) -> bool:
        """Run stages while there is time for one; return whether all are done."""
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            # A shell starts what it runs in the background like that, and every command would inherit it.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        while chosen := self._next():
            before = {stage.name: self.outcomes.get(stage.name, Outcome("cut off")).cut_off for stage in chosen}
            for stage in chosen:
                self._ran.add(stage.name)
                self.outcomes[stage.name] = Outcome("running", before[stage.name])
            self.write()
            self.outcomes |= self._run_together(chosen, before)
            self.write()
            for stage in chosen:
                outcome = self.outcomes[stage.name]
                print(
                    f"{stage.name}: {outcome.status} after {outcome.seconds:.0f} s, {self.left():.0f} s left",
                    flush=True,
                )
        return not self.open()

    def _next(self) -> list[Stage]:
        """Return the first stage that there is time for, and those that run beside it; with all of the time left, the first."""
        waiting = [self._stages[name] for name in self.open() if name not in self._ran]
        left = self.left() - GRACE
        fitting = [stage for stage in waiting if left >= min(stage.seconds, 0.8 * self._whole)]
        if not fitting or not fitting[0].beside:
            return fitting[:1]
        return [stage for stage in fitting if stage.beside == fitting[0].beside]

    def _run_together(self, chosen: Sequence[Stage], cut_off: Mapping[str, int]) -> dict[str, Outcome]:
        """Run stages at the same time, and return their outcomes."""
        with ThreadPoolExecutor(len(chosen)) as threads:
            running = {stage.name: threads.submit(self._run, stage, cut_off[stage.name]) for stage in chosen}
            try:
                return {name: future.result() for name, future in running.items()}
            except BaseException:
                self._stopped.set()
                raise

    def _run(self, stage: Stage, cut_off: int) -> Outcome:
        result = self._work / f"{stage.name}.{cut_off}.json"
        result.unlink(missing_ok=True)
        began, hung_at = time.monotonic(), time.monotonic() + stage.limit
        log_path = self._work / f"{stage.name}.{cut_off}.log"
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(log_path.open("w", encoding="utf-8"))
            environment = {**os.environ, **stage.environment}
            if stage.beside:
                # Leases lie below it: commands with the same one would wait for each other's GPU. Its path is short, since
                # that of a socket below it may have no more than 107 characters.
                temporary = tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True)
                environment["TMPDIR"] = stack.enter_context(temporary)
            process = subprocess.Popen(
                stage.command(self._work, result),
                cwd=self._work,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                exit_code = self._wait(process, hung_at)
            finally:
                _end(process)
        seconds = time.monotonic() - began
        if exit_code is None and time.monotonic() < hung_at:
            outcome = self._cut(stage.name, cut_off, seconds)
        elif exit_code is None:
            outcome = Outcome("timed out", cut_off, seconds)
        else:
            # Of a stage that has never run, nothing was chosen: that proves nothing.
            nothing_left = cut_off > 0 and exit_code == stage.nothing_left
            passed = exit_code == 0 or nothing_left
            outcome = Outcome("passed" if passed else "failed", cut_off, seconds, exit_code)
        try:
            outcome.result = stage.read(result) if result.exists() else None
        except Exception as error:  # whatever a command left, the other stages run
            outcome.result = {"unreadable": repr(error)}
        if outcome.status != "passed":
            outcome.tail = log_path.read_text(encoding="utf-8", errors="replace")[-TAIL:]
        elif outcome.result is None and exit_code == 0:
            outcome.status, outcome.tail = "failed", f"it wrote no {result.name}"
        return outcome

    def _wait(self, process: subprocess.Popen[Any], hung_at: float) -> int | None:
        """Return the exit code of a command; None if it is to be ended."""
        while not self._stopped.is_set():
            left = min(hung_at - time.monotonic(), self.left() - GRACE)
            try:
                return process.wait(min(max(left, 0), POLL))
            except subprocess.TimeoutExpired:
                if left <= 0:
                    return None
        return None

    def _cut(self, name: str, cut_off: int, seconds: float) -> Outcome:
        """Return what becomes of a stage that was cut off once more."""
        stage = self._stages.get(name)
        resumes = stage is not None and stage.resumes
        over = not resumes and (cut_off > 0 or seconds > 0.8 * self._whole)
        return Outcome("too long" if over else "cut off", cut_off + 1, seconds)

    def write(self, summary: Mapping[str, Any] | None = None) -> None:
        """Write the results and the archive of logs, neither of which is ever half written."""
        document = {
            "done": not self.open(),
            "open": self.open(),
            **(summary or {}),
            "stages": {name: asdict(outcome) for name, outcome in self.outcomes.items()},
        }
        with _replacing(self._output / RESULTS) as path:
            path.write_text(json.dumps(document, indent=1), encoding="utf-8")
        with _replacing(self._output / LOGS) as path, tarfile.open(path, "w:gz") as archive:
            for file in sorted(self._work.iterdir()):
                if file.is_file():
                    archive.add(file, file.name)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Give a path beside that one, and put what is written there in its place."""
    beside = path.with_name(f".{path.name}")
    yield beside
    beside.replace(path)


def _end(process: subprocess.Popen[Any]) -> None:
    """End a command and all that it started: first as Ctrl-C would, so that pytest writes its report."""
    with contextlib.suppress(psutil.NoSuchProcess):
        tree = psutil.Process(process.pid).children(recursive=True)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE * 2 / 3)
        below = [*tree, *_descendants(process.pid)]
        for descendant in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                descendant.kill()
        # The next stage needs the memory that a killed one gives back only when it is gone.
        psutil.wait_procs(below, GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _descendants(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def take(earlier: Path, output: Path) -> None:
    """Copy what an earlier call wrote into the output directory, unless that has results of its own."""
    output.mkdir(parents=True, exist_ok=True)
    for name in (RESULTS, LOGS):
        if (earlier / name).exists() and not (output / name).exists():
            # Not the mode of the file: what came back from a borrowed machine may be read-only.
            shutil.copyfile(earlier / name, output / name)

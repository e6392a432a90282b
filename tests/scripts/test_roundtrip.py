"""Stopped and resumed: scripts that go on as if nothing had happened, and scripts that only seem to."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat.ext.scripts import RoundTrip, ScriptRun, launch, resume_roundtrip, resuming
from pytest_distcompat.ext.scripts.launching import Host
from pytest_distcompat.ext.scripts.recorder import STRIDE
from pytest_distcompat.failures import Incompatible, UsageProblem
from pytest_distcompat.trace import RunTrace

from .conftest import PROGRAMS, trip

LOOP = PROGRAMS / "torch_loop.py"
STATES = ("losses", "parameters", "optimizer", "scheduler")


@pytest.fixture(scope="module")
def ddp(module_host: Host) -> RoundTrip:
    return trip(module_host, "torch_loop.py", "--strategy", "ddp", strategy="ddp")


@pytest.fixture(scope="module")
def more_ranks(module_host: Host) -> RoundTrip:
    """Two ranks of FSDP2 that three go on for."""
    return trip(
        module_host,
        *("torch_loop.py", "--strategy", "fsdp2", "--saved-by", "2"),
        strategy="fsdp2",
        reshard_to=3,
        same=["parameters", "optimizer"],
    )


def as_many(host: Host, of: RoundTrip, *more: str) -> RoundTrip:
    """A checkpoint is loaded on as many ranks as saved it."""
    path: Any = of.stopped.saved()[0].path
    line = ["--strategy", "fsdp2", "--steps", "5", "--resume", path, *more]
    resumed = launch(LOOP, *line, strategy="fsdp2", watch_steps=5, host=host)
    return RoundTrip(of.through, of.stopped, resumed, 3, 5, ("losses", "grad_norms", "parameters", "optimizer", "rng"))


def loads(roundtrip: RoundTrip) -> list[int]:
    """How many ranks loaded, by run."""
    runs: tuple[ScriptRun, ...] = (roundtrip.through, roundtrip.stopped, roundtrip.resumed)
    return [len(run.trace.at("load")) for run in runs]


@pytest.mark.spawn
def test_a_torch_loop_resumes(ddp: RoundTrip) -> None:
    assert not ddp.findings
    assert loads(ddp) == [0, 0, 2]


@pytest.mark.nightly
@pytest.mark.spawn
def test_more_ranks_resume_the_checkpoint_of_fewer(more_ranks: RoundTrip) -> None:
    assert not more_ranks.findings
    assert more_ranks.resumed.trace.world_size == 3


@pytest.mark.nightly
@pytest.mark.spawn
def test_a_torch_loop_with_shards_resumes(module_host: Host, more_ranks: RoundTrip) -> None:
    round_trip = as_many(module_host, more_ranks)
    assert not round_trip.findings
    assert loads(round_trip) == [0, 0, 2]


@pytest.mark.nightly
@pytest.mark.spawn
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (
            "from step 0",
            "the resumed run took 5 steps, all of them: it started again at step 0; expected it to start at step 4",
        ),
        (
            "moments are zero",
            r"ranks? 0(, 1)?: optimizer: \d+ of \d+ values differ, first 'exp_avg of .* in step 4, 1 after the load",
        ),
    ],
)
def test_a_run_that_only_seems_to_resume(module_host: Host, more_ranks: RoundTrip, fault: str, expected: str) -> None:
    """(b) and (e): both end well, with losses that look right."""
    round_trip = as_many(module_host, more_ranks, "--fault", fault)
    with pytest.raises(Incompatible, match=expected):
        round_trip.check()


@pytest.mark.nightly
@pytest.mark.spawn
def test_two_optimizers_resume_and_a_forgotten_one_is_found(module_host: Host) -> None:
    round_trip = trip(module_host, "two_optimizers.py", "--strategy", "fsdp2", strategy="fsdp2", same=STATES)
    assert not round_trip.findings
    line = ["--strategy", "fsdp2", "--resume", str(round_trip.stopped.saved()[0].path), "--fault", "second forgets"]
    forgot = launch(PROGRAMS / "two_optimizers.py", *line, strategy="fsdp2", watch_steps=5, host=module_host)
    wrong = RoundTrip(round_trip.through, round_trip.stopped, forgot, 3, 5, STATES).findings
    assert "exp_avg '0.bias' and 3 others: other values after the load at 2 ranks" in wrong


@pytest.mark.spawn
def test_a_run_that_forgets_to_resume(ddp: RoundTrip) -> None:
    """(b): the argument never reaches ``train()``, as in transformers' own test of it: the command of the run through."""
    with pytest.raises(Incompatible, match="it started again at step 0"):
        RoundTrip(ddp.through, ddp.stopped, ddp.through, 3, 5, ddp.same).check()


class OtherMasks(ScriptRun):
    """A resumed run that draws other dropout masks: another random state, and the losses that follow from it."""

    @functools.cached_property
    def trace(self) -> RunTrace:
        snapshots = []
        for snapshot in super().trace.snapshots:
            loss = snapshot.loss
            if loss is not None:
                loss += 1
            snapshots.append(dataclasses.replace(snapshot, rng="of another seed", loss=loss))
        return dataclasses.replace(super().trace, snapshots=tuple(snapshots))


@pytest.mark.spawn
def test_a_cause_is_reported_before_what_follows_from_it(ddp: RoundTrip) -> None:
    resumed = OtherMasks(ddp.resumed.ending, ddp.resumed.cell, ddp.resumed.directory, ddp.resumed.device)
    findings = dataclasses.replace(ddp, resumed=resumed).findings
    assert findings[0] == "rank 0: rng: another random state in step 4, 1 after the load"
    assert any("losses: " in finding for finding in findings)


def with_random_states(run: ScriptRun, *states: str) -> ScriptRun:
    """Return the run with other random states, one after each step."""

    class OtherStates(ScriptRun):
        @functools.cached_property
        def trace(self) -> RunTrace:
            snapshots = []
            for snapshot in super().trace.snapshots:
                step = max(snapshot.index // STRIDE, 1)
                snapshots.append(dataclasses.replace(snapshot, rng=states[step - 1]))
            return dataclasses.replace(super().trace, snapshots=tuple(snapshots))

    return OtherStates(run.ending, run.cell, run.directory, run.device)


@pytest.mark.spawn
@pytest.mark.parametrize(
    ("through", "resumed", "matters"),
    [
        pytest.param("aabbbb", "ccc", False, id="a loader's iterator draws"),
        pytest.param("aabccc", "bbb", False, id="the next epoch's iterator draws"),
        pytest.param("aabbbb", "aaa", True, id="not loaded"),
        pytest.param("abcdef", "ghi", True, id="each step draws"),
    ],
)
def test_another_random_state_is_told_where_it_matters(
    ddp: RoundTrip, through: str, resumed: str, *, matters: bool
) -> None:
    changed = dataclasses.replace(
        ddp, through=with_random_states(ddp.through, *through), resumed=with_random_states(ddp.resumed, *resumed)
    )
    text = "rng: another random state in step 4, 1 after the load"
    expected = [f"rank {rank}: {text}" for rank in range(2)] if matters else []
    assert changed.findings == expected


BY_FILE = Path(__file__).parents[2] / "examples" / "plain_script" / "train.py"


def by_file(script: Path, host: Host, **settings: Any) -> RoundTrip:
    """Stop and resume a script that saves by ``torch.save`` on rank 0."""
    return resume_roundtrip(
        script,
        ["--out-dir", "{output}", "--max-iters", "{steps}", "--save-every", "{save_at}"],
        resume=["--resume"],
        **{"save_at": 3, "total": 5, "host": host, "strategy": "ddp", **settings},
    )


@pytest.mark.spawn
@pytest.mark.nightly
def test_a_file_of_torch_save_is_a_checkpoint(host: Host) -> None:
    round_trip = by_file(BY_FILE, host)
    taken = [len(run.trace.indices("step")) for run in (round_trip.through, round_trip.stopped, round_trip.resumed)]
    assert taken == [5, 3, 2]
    assert {Path(saved.path).name for saved in round_trip.stopped.saved()} == {"ckpt.pt"}


@pytest.mark.nightly
@pytest.mark.spawn
def test_a_file_without_the_optimizer(host: Host, tmp_path: Path) -> None:
    script = tmp_path / "forgets.py"
    text = BY_FILE.read_text(encoding="utf-8")
    script.write_text(text.replace('    optimizer.load_state_dict(checkpoint["optimizer"])\n', ""), encoding="utf-8")
    with pytest.raises(Incompatible, match="the optimizer's state is empty after the load at 2 ranks"):
        by_file(script, host)


@pytest.mark.nightly
@pytest.mark.spawn
def test_other_rows_are_told_before_what_follows_from_them(host: Host, tmp_path: Path) -> None:
    script = tmp_path / "other_rows.py"
    text = BY_FILE.read_text(encoding="utf-8")
    script.write_text(text.replace("1000 * done + rank", "1000 * done + rank + 9 * arguments.resume"), encoding="utf-8")
    with pytest.raises(Incompatible) as caught:
        by_file(script, host)
    first, second, *_ = str(caught.value).splitlines()
    assert first == "ranks 0, 1: data: fed other data in step 4, 1 after the load"
    assert second.startswith("rank 0: losses: ")


@pytest.mark.nightly
@pytest.mark.spawn
@pytest.mark.parametrize("kept", [True, False])
def test_a_file_that_is_only_evaluated(host: Host, tmp_path: Path, kept: bool) -> None:
    """The model is loaded after the file was read: both are before the end."""
    script = tmp_path / "evaluates.py"
    text = BY_FILE.read_text(encoding="utf-8")
    load = '    plain.load_state_dict(checkpoint["model"])\n'
    script.write_text(text if kept else text.replace(load, ""), encoding="utf-8")
    if kept:
        by_file(script, host, save_at=5)
        return
    with pytest.raises(Incompatible, match="other values after the load"):
        by_file(script, host, save_at=5)


SAVES_BY_ITSELF = """
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 6):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 2:
        dcp.save(model.state_dict(), checkpoint_id="{where}/step-2")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.nightly
@pytest.mark.spawn
def test_a_run_without_a_checkpoint_that_the_probe_knows(host: Host, tmp_path: Path) -> None:
    script = tmp_path / "saves.py"
    script.write_text(SAVES_BY_ITSELF.format(where=tmp_path))
    with pytest.raises(Incompatible) as caught:
        resume_roundtrip(script, [], resume=[], save_at=3, total=5, host=host, strategy="ddp")
    first, steps, logs = str(caught.value).splitlines()
    assert first.startswith("no checkpoint was found after step 3; expected one by Accelerator.save_state, ")
    assert steps == "found after step 2"
    assert logs.startswith("logs: ")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"same": ["momenta"]}, r"same=\['momenta'\]: known are losses, grad_norms"),
        ({"save_at": 6}, "save_at=6: expected 1 to total=5 steps"),
        ({"save_at": 0}, "save_at=0: expected 1 to total=5 steps"),
        ({"same": []}, r"same=\[\]: known are losses, grad_norms"),
        ({"same": "losses"}, "same='losses': expected a list of texts"),
        ({"same": 3}, "same=3: expected a list of texts"),
        ({"args": "--steps {steps}"}, "args='--steps {steps}': expected a list of texts"),
        ({"resume": "--resume {checkpoint}"}, "resume='--resume .*': expected a list of texts"),
        ({"save_at": "2"}, "save_at='2': expected 1 to total=5 steps"),
        ({"reshard_to": "4"}, "reshard_to='4': expected a number of ranks"),
        ({"watch_steps": 3}, "resume_roundtrip takes no watch_steps"),
        ({"allow_failure": True}, "resume_roundtrip takes no allow_failure"),
    ],
)
def test_wrong_words(host: Host, settings: dict[str, Any], expected: str) -> None:
    settings_: dict[str, Any] = {"args": [], "resume": [], "save_at": 3, "total": 5, **settings}
    with pytest.raises(UsageProblem, match=expected):
        resume_roundtrip(LOOP, host=host, **settings_)


def test_arguments_may_be_paths_and_numbers(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of ``launch``: a Path has a ``replace`` of its own, which took the words for names of files."""
    seen: list[tuple[Any, ...]] = []

    def started(script: Path, *args: Any, **settings: Any) -> None:
        seen.append((script, args, settings["stop_after"]))
        raise KeyError

    monkeypatch.setattr(resuming, "launch", started)
    with pytest.raises(KeyError):
        resume_roundtrip(LOOP, [tmp_path / "{steps}", 7], resume=[], save_at=3, total=5, host=host)  # type: ignore[list-item]
    assert seen == [(LOOP, (str(tmp_path / "5"), "7"), 3)]

"""A waiting request reports its holders, and does not wait for a suspended process where it need not."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from pytest_distcompat.lease import Inventory, LeaseTimeout, Pool, default_directory, read_timeline, watch

from .conftest import DEADLINE, Contender, await_that

if TYPE_CHECKING:
    from tests.lease.conftest import Field

GPUS = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")
SLOTS = ("cpu-0.0", "cpu-0.1")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("NOTIFY_AFTER_S", 0.05), ("GIVE_UP_AFTER_S", 0.1), ("_CHECK_INTERVAL_S", 0.01)):
        monkeypatch.setattr(watch, name, seconds)


def suspend(contender: Contender) -> None:
    contender.process.send_signal(signal.SIGSTOP)
    await_that(psutil.Process(contender.process.pid).status, psutil.STATUS_STOPPED)


def test_cpu_slots_of_a_suspended_process_are_not_waited_for(arena: Field) -> None:
    (holder,) = arena.enter("tests/a.py::test_suspended", ids=SLOTS)
    holder.send("lease 2")
    assert holder.receive() == ["got", *SLOTS]
    suspend(holder)
    notices: list[str] = []
    pool = Pool(arena.directory, Inventory("cpu", SLOTS), notify=notices.append, timeline=arena.timeline)
    with pool.lease(2, who="tests/b.py::test_waits", timeout=DEADLINE) as lease:
        assert (lease.ids, lease.environment) == ((), {})
    assert read_timeline(arena.timeline)[-1].waited_for == ("tests/a.py::test_suspended",)
    pid = holder.process.pid
    assert notices == [f"goes on without 2 of 2 CPU slots of pid {pid}, suspended (tests/a.py::test_suspended)"]
    # The next test does not wait for the same again, nor reports it.
    notices.clear()
    began = time.monotonic()
    with pool.lease(1, who="next", timeout=DEADLINE):
        pass
    assert notices == []
    assert time.monotonic() - began < watch.GIVE_UP_AFTER_S
    # When it goes on and gives them back, they are lent again.
    holder.process.send_signal(signal.SIGCONT)
    holder.send("release")
    assert holder.receive() == ["released"]
    with pool.lease(2, who="later", timeout=DEADLINE) as lease:
        assert lease.ids == SLOTS


def test_free_slots_beside_a_suspended_process_are_lent(arena: Field) -> None:
    (holder,) = arena.enter("suspended", ids=SLOTS)
    holder.send("lease 1")
    assert holder.receive() == ["got", SLOTS[0]]
    suspend(holder)
    pool = Pool(arena.directory, Inventory("cpu", SLOTS))
    with pool.lease(1, who="one", timeout=DEADLINE) as lease:
        assert lease.ids == SLOTS[1:]
    with pool.lease(2, who="two", timeout=DEADLINE) as lease:
        assert lease.ids == SLOTS[1:]


def test_a_suspended_waiter_does_not_hold_up_those_behind_it(arena: Field) -> None:
    holder, waiter = arena.enter("holder", "tests/a.py::test_suspended", ids=SLOTS)
    holder.send("lease 2")
    assert holder.receive() == ["got", *SLOTS]
    waiter.send("lease 2")
    arena.await_waiting("tests/a.py::test_suspended")
    suspend(waiter)
    notices: list[str] = []
    pool = Pool(arena.directory, Inventory("cpu", SLOTS), notify=notices.append)
    with pool.lease(1, who="behind", timeout=DEADLINE):
        pass
    pid = waiter.process.pid
    assert notices == [f"goes on without 1 of 2 CPU slots of pid {pid}, suspended (tests/a.py::test_suspended)"]


def test_another_run_that_keeps_cpu_slots_for_long_is_not_waited_for(
    arena: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that waits in a debugger. It is not suspended."""
    (holder,) = arena.enter("tests/a.py::test_debugged", ids=SLOTS)
    holder.send("lease 2")
    assert holder.receive() == ["got", *SLOTS]
    slots = Inventory("cpu", SLOTS)
    with pytest.raises(LeaseTimeout), Pool(arena.directory, slots).lease(1, who="soon", timeout=0.5):
        pass
    monkeypatch.setattr(watch, "LONG_LEASE_S", 0.0)
    with Pool(arena.directory, slots).lease(1, who="late", timeout=DEADLINE) as lease:
        assert lease.ids == ()
    # Within a run tests last as long as they last, and the run's own limits end them.
    with (
        pytest.raises(LeaseTimeout),
        Pool(arena.directory, slots, timeline=arena.timeline).lease(1, who="worker", timeout=0.5),
    ):
        pass


def test_a_request_waits_for_gpus_and_reports_it(arena: Field) -> None:
    (holder,) = arena.enter("tests/a.py::test_suspended")
    holder.send("lease 4")
    assert holder.receive() == ["got", *GPUS]
    suspend(holder)
    notified, notices = threading.Event(), []

    def collect(text: str) -> None:
        notices.append(text)
        notified.set()

    pool = Pool(arena.directory, arena.pool.inventory, notify=collect)
    got: list[tuple[str, ...]] = []

    def wait() -> None:
        with pool.lease(1, who="tests/b.py::test_waits", timeout=DEADLINE) as lease:
            got.append(lease.ids)

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert notified.wait(DEADLINE)
    assert notices == [f"waits for 1 of 4 GPUs of pid {holder.process.pid}, suspended (tests/a.py::test_suspended)"]
    assert got == []
    # The progress line has all of it, all the while.
    assert re.search(
        rf"^tests/b.py::test_waits has waited \d+ s for 1 of 4 GPUs: tests/a.py::test_suspended "
        rf"\(pid {holder.process.pid}, suspended\) has had GPU-a, GPU-b, GPU-c, GPU-d for \d+ s$",
        pool.waits,
    )
    holder.process.send_signal(signal.SIGCONT)
    holder.send("release")
    waiter.join(DEADLINE)
    assert (got, pool.waits) == ([("GPU-a",)], "")


def test_a_wait_is_one_short_line_said_once(arena: Field, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "NOTIFY_OF_WORKERS_AFTER_S", 0.1)
    parameters = "-".join(["bf16_upcast"] * 20)
    other, second = arena.enter(f"tests/a/very/deep/test_file.py::test_long[{parameters}]", "tests/c.py::test")
    for holder, count in ((other, 3), (second, 1)):
        holder.send(f"lease {count}")
        assert holder.receive()[0] == "got"
    notices: list[str] = []
    # A session of its own, whose requests wait one after another for the same.
    pool = Pool(arena.directory, arena.pool.inventory, notify=notices.append)
    for _ in range(3):
        with pytest.raises(LeaseTimeout), pool.lease(1, who=f"tests/b.py::test[{parameters}]", timeout=0.3):
            pass
    (notice,) = notices
    assert notice.startswith(f"waits for 1 of 4 GPUs of pid {other.process.pid} (...")
    assert notice.endswith("bf16_upcast]) and 1 other")
    assert len(f"distcompat: {notice}") <= 100


def test_waiting_for_a_worker_of_the_same_session_is_not_reported(arena: Field) -> None:
    (holder,) = arena.enter("holder")
    holder.send("lease 4")
    assert holder.receive() == ["got", *GPUS]
    for timeline, expected in ((arena.timeline, False), (None, True)):
        notices: list[str] = []
        pool = Pool(arena.directory, arena.pool.inventory, timeline=timeline, notify=notices.append)
        with pytest.raises(LeaseTimeout), pool.lease(1, who="late", timeout=0.5):
            pass
        assert bool(notices) is expected


@pytest.mark.parametrize("more", [[], pytest.param(["-n1"], marks=pytest.mark.nightly)], ids=["alone", "xdist"])
@pytest.mark.usefixtures("run_on_gpus")
def test_pytest_shows_that_a_test_waits_for_a_lease(pytester: pytest.Pytester, tmp_path: Path, more: list[str]) -> None:
    ids = tuple(f"GPU-{number}" for number in range(8))
    other = Contender(pytester.path / "tmp" / default_directory().name, tmp_path, "tests/other.py::test_long", ids)
    other.send("lease 8")
    assert other.receive() == ["ready"]
    assert other.receive()[0] == "got"
    pytester.makepyfile(test_it="import pytest\n@pytest.mark.distcompat(world_size=2)\ndef test(): pass")
    plugins = ["-p", "stand_in", "-p", "no:randomly", "--basetemp=base"]
    run = pytester.popen([sys.executable, "-m", "pytest", *plugins, *more], stdin=subprocess.DEVNULL, text=True)
    assert run.stderr is not None
    lines = iter(run.stderr.readline, "")
    line = next(line for line in lines if line.startswith("distcompat: "))
    other.kill()
    for pipe in (other.process.stdin, other.process.stdout):
        assert pipe is not None
        pipe.close()
    assert re.match(
        r"distcompat: waits for 2 of 8 GPUs of pid \d+ \(tests/other.py::test_long\)\n",
        line,
    )
    assert "1 passed" in run.communicate(timeout=DEADLINE)[0]

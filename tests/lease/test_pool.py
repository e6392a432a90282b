"""Promises of a lease, in one process."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from freezegun import freeze_time

from pytest_distcompat import devices
from pytest_distcompat.failures import DistcompatError, UsageProblem
from pytest_distcompat.lease import (
    Holder,
    Inventory,
    Lease,
    LeaseTimeout,
    Pool,
    cpu_slots,
    default_directory,
    gpus,
    here,
)
from pytest_distcompat.lease import pool as pool_module
from pytest_distcompat.lease.inventory import VISIBLE

from .conftest import lease_elsewhere

if TYPE_CHECKING:
    from tests.lease.conftest import Field, MadeUpMemory

IDS = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]
UUIDS = ["GPU-aaaa0000-1", "GPU-bbbb1111-2", "GPU-cccc2222-3"]


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_uuids", lambda: UUIDS)


def lease_now(pool: Pool, ranks: int, who: str = "test_it") -> tuple[str, ...]:
    """Return the devices that another thread can have now."""
    with lease_elsewhere(pool, ranks, who) as lease:
        return lease.ids


def test_a_lease_names_its_devices_and_shows_them_to_ranks(arena: Field) -> None:
    with (
        arena.pool.lease(2, who="one", timeout=0) as first_lease,
        lease_elsewhere(arena.pool, 2, "two") as second_lease,
    ):
        assert (first_lease.ids, second_lease.ids) == (("GPU-a", "GPU-b"), ("GPU-c", "GPU-d"))
        assert second_lease.environment == dict.fromkeys(VISIBLE, "GPU-c,GPU-d")
    assert lease_now(arena.pool, 4) == ("GPU-a", "GPU-b", "GPU-c", "GPU-d")


def test_an_exception_in_the_block_gives_the_devices_back(arena: Field) -> None:
    with pytest.raises(KeyboardInterrupt), arena.pool.lease(4, who="one"):
        raise KeyboardInterrupt
    assert len(lease_now(arena.pool, 4)) == 4


def test_more_than_there_are_is_refused_at_once(arena: Field) -> None:
    with pytest.raises(UsageProblem, match="5 ranks need 5 GPUs; there are 4: GPU-a, GPU-b"):
        lease_now(arena.pool, 5)
    with pytest.raises(UsageProblem, match="at least 1, not 0"):
        lease_now(arena.pool, 0)


def test_a_test_that_was_lent_devices_starts_scripts_on_them(arena: Field) -> None:
    """As a test on three GPUs that starts a script on two, while others wait for all four."""
    (waiter,) = arena.enter("group")
    with arena.pool.lease(3, who="test_on_three") as lease:
        waiter.send("lease 4")
        arena.await_waiting("group")
        assert lease_patiently(arena.pool, 2) == lease.ids[:2]
        with pytest.raises(UsageProblem, match=r"^script: 4 GPUs are needed, and the test that starts it was lent 3$"):
            lease_patiently(arena.pool, 4)
    assert waiter.receive() == ["got", *IDS]


def lease_patiently(pool: Pool, ranks: int) -> tuple[str, ...]:
    with pool.lease(ranks, who="script", timeout=5) as lease:
        return lease.ids


def test_tickets_of_another_version_may_have_more_or_fewer_fields(arena: Field) -> None:
    """As where two repositories of one user run at once."""
    (other,) = arena.enter("other")
    other.send("lease 2")
    assert other.receive()[0] == "got"
    record = arena.directory / "GPU-a.json"
    signed = json.loads(record.read_text())
    record.write_text(json.dumps({**signed, "colour": "red"}))
    queue = arena.directory / "queue"
    older = {"number": 0, "ids": IDS, "count": 1, "who": "older", "pid": 1}
    (queue / "0.json").write_text(json.dumps(older))
    newer = {**older, "number": 1, "colour": "red"}
    (queue / "1.json").write_text(json.dumps(newer))
    assert lease_patiently(arena.pool, 2) == ("GPU-c", "GPU-d")
    with pytest.raises(LeaseTimeout, match="GPU-a is held by other"):
        lease_now(arena.pool, 3)


def test_a_timeout_names_holders_and_waiters(arena: Field) -> None:
    (waiter,) = arena.enter("tests/b.py::test_waits")
    with arena.pool.lease(3, who="tests/a.py::test_long", timeout=0):
        waiter.send("lease 2")
        arena.await_held(*IDS)
        with pytest.raises(LeaseTimeout) as caught:
            lease_now(arena.pool, 1, "tests/c.py::test_late")
    lines = str(caught.value).splitlines()
    assert lines[0] == "tests/c.py::test_late: no 1 of 4 GPUs to be had in time"
    assert f"GPU-a is held by tests/a.py::test_long (pid {os.getpid()}) since " in lines[1]
    assert lines[4].startswith("  GPU-d is held by a lease that is about to begin")
    assert lines[5] == f"  tests/b.py::test_waits (pid {waiter.process.pid}) waits for 2"
    assert isinstance(caught.value, DistcompatError)
    assert isinstance(caught.value, TimeoutError)


@pytest.mark.nightly
def test_waiting_times_out_though_a_test_froze_the_clock(arena: Field) -> None:
    holder, waiter = arena.enter("holds", "waits")
    holder.send("lease 3")
    assert holder.receive()[0] == "got"
    with freeze_time("2024-01-01"), pytest.raises(LeaseTimeout), arena.pool.lease(2, who="first", timeout=0.1):
        pass
    waiter.send("lease 2")
    arena.await_held(*IDS)
    with freeze_time("2024-01-01"), pytest.raises(LeaseTimeout), arena.pool.lease(1, who="second", timeout=0.1):
        pass


def test_a_request_that_times_out_holds_nothing(arena: Field) -> None:
    with arena.pool.lease(1, who="one"):
        with pytest.raises(LeaseTimeout) as caught:
            lease_now(arena.pool, 4)
        # What it had locked so far is not somebody's.
        assert len(str(caught.value).splitlines()) == 2
        assert lease_now(arena.pool, 3) == ("GPU-b", "GPU-c", "GPU-d")


def test_threads_of_one_process_contend_like_processes(arena: Field) -> None:
    taken: list[tuple[str, ...]] = []
    together = threading.Barrier(4)

    def contend(number: int) -> None:
        with arena.pool.lease(1, who=f"thread {number}") as lease:
            taken.append(lease.ids)
            together.wait(60)

    threads = [threading.Thread(target=contend, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == [("GPU-a",), ("GPU-b",), ("GPU-c",), ("GPU-d",)]


@pytest.mark.parametrize("sharing", ["", ", 2, runs_share=True"], ids=["a GPU", "a place"])
def test_a_forked_child_releases_nothing(sharing: str, arena: Field) -> None:
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from pytest_distcompat.lease import Inventory, Pool\n"
        f"pool = Pool(Path(sys.argv[1]), Inventory('gpu', ('GPU-a',){sharing}))\n"
        "with pool.lease(1, who='parent'):\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        sys.exit()\n"
        "    os.waitpid(child, 0)\n"
        "    print(*(holder.who for holder in pool.holders()))\n"
    )
    command = [sys.executable, "-c", script, str(arena.directory)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "parent\n"


@pytest.mark.usefixtures("three_gpus")
def test_sessions_that_name_gpus_differently_share_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    by_index = Pool(tmp_path / "leases", gpus())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bbbb,GPU-cccc2222-3")
    by_name = Pool(tmp_path / "leases", gpus())
    assert by_index.inventory.ids == ("GPU-bbbb1111-2", "GPU-aaaa0000-1")
    with by_index.lease(1, who="one", timeout=0) as lease:
        assert lease.environment == {**dict.fromkeys(VISIBLE, "1"), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        assert lease_now(by_name, 1) == ("GPU-cccc2222-3",)
        with pytest.raises(LeaseTimeout, match="no 2 of 2 GPUs"):
            lease_now(by_name, 2)
    assert len(lease_now(by_name, 2)) == 2


def test_devices_whose_names_are_no_file_names_are_leased(tmp_path: Path) -> None:
    pool = Pool(tmp_path / "leases", Inventory("gpu", ("MIG-GPU-aaaa/3/0", "MIG-GPU-aaaa/4/0")))
    with pool.lease(1, who="one", timeout=0):
        assert lease_now(pool, 1) == ("MIG-GPU-aaaa/4/0",)


def test_the_cpu_has_two_slots_for_each_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 5}, raising=False)
    monkeypatch.setattr(devices, "gpu_uuids", list)
    slots = Inventory("cpu", ("cpu-2.0", "cpu-2.1", "cpu-5.0", "cpu-5.1"))
    assert cpu_slots() == slots
    assert here() == slots
    pool = Pool(tmp_path / "leases", here())
    with pool.lease(40, who="wide", timeout=0) as lease:
        # More ranks than slots: all of them, and nobody beside them.
        assert lease.ids == pool.inventory.ids
        assert lease.environment == {}
        with pytest.raises(LeaseTimeout, match="no 1 of 4 CPU slots"):
            lease_now(pool, 1)
    assert lease_now(pool, 1) == ("cpu-2.0",)


@pytest.mark.usefixtures("three_gpus")
def test_the_gpus_are_preferred_and_may_be_limited() -> None:
    all_gpus = Inventory("gpu", tuple(UUIDS))
    assert gpus() == all_gpus
    assert here() == all_gpus
    assert gpus(2).ids == tuple(UUIDS[:2])


@pytest.mark.parametrize("ids", [(), ("GPU-a", "GPU-a")])
def test_an_inventory_is_not_empty_and_names_nothing_twice(ids: tuple[str, ...]) -> None:
    with pytest.raises(UsageProblem, match="at least one device and each once"):
        Inventory("gpu", ids)


def test_the_lease_directory_is_private_to_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    Pool(None, Inventory("cpu", ("cpu-0",)))
    assert default_directory().parent == tmp_path
    assert default_directory().stat().st_mode & 0o777 == 0o700


def test_machines_that_share_a_temporary_directory_share_no_leases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Their slots have the same names, and their tickets are numbered by different clocks.
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    boot = tmp_path / "boot_id"
    monkeypatch.setattr(pool_module, "BOOT", boot)
    names = []
    for boot_id in ("1b4e28ba\n", "6fa459ea\n", "1b4e28ba\n"):
        boot.write_text(boot_id, encoding="ascii")
        names.append(default_directory().name)
    assert names[0] == names[2] != names[1]
    assert names[0] == f"distcompat-leases-{os.getuid()}-1b4e28ba"
    boot.unlink()
    monkeypatch.setattr("socket.gethostname", lambda: "node/7")
    assert default_directory() == tmp_path / f"distcompat-leases-{os.getuid()}-node%2F7"


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leases").mkdir(mode=0o700)
    real = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: real + 1)
    command = re.escape(f"sudo rm -r {tmp_path / 'leases'}")
    message = (
        rf"{tmp_path}/leases: it belongs to user {real}, not {real + 1} \(mode 700\)\. To make a new one: {command}$"
    )
    with pytest.raises(UsageProblem, match=message):
        Pool(tmp_path / "leases", Inventory("cpu", ("cpu-0",)))


@pytest.mark.parametrize("mode", [0o755, 0o775, 0o777, 0o750, 0o2755, 0o1777, 0o500], ids=oct)
def test_a_directory_with_a_wrong_mode_is_corrected(tmp_path: Path, mode: int) -> None:
    """A device that is held there stays held."""
    directory = tmp_path / "leases"
    with Pool(directory, Inventory("cpu", ("cpu-0",))).lease(1, who="before"):
        directory.chmod(mode)
        after = Pool(directory, Inventory("cpu", ("cpu-0",)))
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        with pytest.raises(LeaseTimeout, match="cpu-0 is held by before"):
            lease_now(after, 1)
    with after.lease(1, who="after", timeout=0) as lease:
        assert lease.ids == ("cpu-0",)


@pytest.mark.parametrize("kind", ["link", "hard link"])
def test_a_directory_that_others_could_write_to_is_refused(tmp_path: Path, kind: str) -> None:
    """Written to, it would be a file of ours elsewhere."""
    directory = tmp_path / "leases"
    elsewhere = tmp_path / "elsewhere"
    (directory / "queue").mkdir(parents=True)
    directory.chmod(0o777)
    elsewhere.touch()
    put = directory / "queue" / "1.json"
    if kind == "link":
        put.symlink_to(elsewhere)
    else:
        put.hardlink_to(elsewhere)
    message = r"it was open to others \(mode 777, expected 700\), and 1\.json in it is not yours alone\. To make a new one: rm -r "
    with pytest.raises(UsageProblem, match=message):
        Pool(directory, Inventory("cpu", ("cpu-0",)))


@pytest.mark.parametrize("target", ["real", "nowhere"])
def test_a_symbolic_link_is_refused(target: str, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "leases").symlink_to(tmp_path / target)
    with pytest.raises(UsageProblem, match="it is not a directory"):
        Pool(tmp_path / "leases", Inventory("cpu", ("cpu-0",)))


def lease_with(memory: MadeUpMemory, directory: Path, who: str, change: dict[str, int]) -> Lease:
    """Return a lease of two GPUs in which memory in use changes."""
    pool = Pool(directory, Inventory("gpu", ("GPU-a", "GPU-b")), memory=memory, free_timeout=0)
    with pool.lease(2, who=who) as lease:
        for name, added in change.items():
            memory.now[name] += added
    return lease


def assert_leaked(lease: Lease, name: str, size: int, who: str) -> None:
    """Check that the lease found one leak, of that device, size and holder."""
    (leak,) = lease.leak
    assert leak.id == name
    assert leak.bytes == size
    assert leak.who == who


def test_memory_in_use_is_charged_to_the_lease_and_not_to_the_next(tmp_path: Path, memory: MadeUpMemory) -> None:
    leaky = lease_with(memory, tmp_path / "leases", "leaky", {"GPU-b": 300 << 20})
    assert_leaked(leaky, "GPU-b", 300 << 20, "leaky")
    clean = lease_with(memory, tmp_path / "leases", "clean", {"GPU-a": 10 << 20})
    assert clean.leak == ()


def test_memory_that_comes_back_late_is_waited_for(tmp_path: Path, memory: MadeUpMemory) -> None:
    pool = Pool(tmp_path / "leases", Inventory("gpu", ("GPU-a",)), memory=memory, free_timeout=60)
    before = memory.now["GPU-a"]
    with pool.lease(1, who="slow") as lease:
        memory.to_come = [
            {"GPU-a": before + (500 << 20)},
            {"GPU-a": before + (200 << 20)},
            {"GPU-a": before},
        ]
    assert lease.leak == ()
    assert not memory.to_come


def test_memory_of_a_killed_holder_is_waited_for_and_charged_to_it(arena: Field, memory: MadeUpMemory) -> None:
    (holder,) = arena.enter("tests/a.py::test_killed")
    holder.send("lease 2")
    holder.receive()
    for name in ("GPU-a", "GPU-b"):
        # As if NVML had known the made-up GPUs.
        signed = arena.pool._read_record(name)
        assert signed is not None
        known = Holder(name, signed.who, signed.pid, signed.since, memory.now[name])
        text = json.dumps(dataclasses.asdict(known))
        arena.pool._path(name, "json").write_text(text, encoding="utf-8")
    holder.kill()
    before = dict(memory.now)
    memory.to_come = [
        {"GPU-a": before["GPU-a"] + (900 << 20), "GPU-b": before["GPU-b"] + (900 << 20)},
        {"GPU-a": before["GPU-a"], "GPU-b": before["GPU-b"] + (400 << 20)},
    ]
    pool = Pool(arena.directory, arena.pool.inventory, memory=memory, free_timeout=0.1)
    with pool.lease(2, who="next") as lease:
        assert_leaked(lease, "GPU-b", 400 << 20, "tests/a.py::test_killed")
    assert len(lease.leak) == 1
    with pool.lease(2, who="one after") as lease:
        assert lease.leak == ()


def test_devices_of_a_dead_process_are_not_shown_as_held(arena: Field) -> None:
    (dead,) = arena.enter("dead")
    dead.send("lease 1")
    dead.receive()
    dead.kill()
    with arena.pool.lease(1, who="one"):
        (holder,) = arena.pool.holders()
        assert holder.who == "one"

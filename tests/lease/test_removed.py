"""A cleaner of temporary directories removes the directory of leases while sessions run: what is held stays held."""

from __future__ import annotations

import contextlib
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_distcompat.lease import Inventory, LeaseTimeout, Pool

if TYPE_CHECKING:
    from tests.lease.conftest import Field

IDS = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")


def mode(directory: Path) -> int:
    return stat.S_IMODE(directory.stat().st_mode)


def test_devices_lent_before_the_removal_are_not_lent_again(arena: Field) -> None:
    holder, other = arena.enter("tests/a.py::test_holds", "other")
    holder.send("lease 3")
    assert holder.receive() == ["got", *IDS[:3]]
    shutil.rmtree(arena.directory)
    other.send("lease 1")
    assert other.receive() == ["got", "GPU-d"]
    # The message still names the process, whose record is gone.
    with pytest.raises(LeaseTimeout, match=rf"GPU-a is held by .* \(pid {holder.process.pid}\)"):
        arena.pool.lease(2, who="late", timeout=0).__enter__()
    assert mode(arena.directory) == 0o700
    holder.kill()
    other.send("release")
    assert other.receive() == ["released"]
    with Pool(arena.directory, arena.pool.inventory).lease(4, who="next", timeout=60) as lease:
        assert lease.ids == IDS


def test_a_waiter_is_served_before_later_requests(arena: Field) -> None:
    holder, first, second = arena.enter("holder", "first", "second")
    holder.send("lease 4")
    assert holder.receive() == ["got", *IDS]
    first.send("lease 4")
    arena.await_waiting("first")
    shutil.rmtree(arena.directory)
    arena.await_waiting("first")
    second.send("lease 4")
    arena.await_waiting("first", "second")
    holder.send("release")
    assert first.receive() == ["got", *IDS]
    first.send("release")
    assert first.receive() == ["released"]
    assert second.receive() == ["got", *IDS]


@pytest.mark.parametrize(
    ("ids", "remade", "shared"),
    [
        pytest.param(IDS[:1], False, 0, id="one"),
        pytest.param(IDS, False, 0, id="four"),
        pytest.param(IDS[:1], True, 0, id="one and made again"),
        pytest.param(IDS[:1], False, 3, id="one that runs of three share"),
    ],
)
def test_processes_that_fight_while_it_is_removed_never_have_the_same_device(
    arena: Field, tmp_path: Path, ids: tuple[str, ...], remade: bool, shared: int
) -> None:
    """The cleaner may also make it again, open to others."""
    ground = tmp_path / "ground"
    ground.mkdir()
    fighters = arena.enter(*(f"fighter {number}" for number in range(4 - shared)), ids=ids)
    fighters += arena.enter(*(f"sharer {number}" for number in range(shared)), ids=ids, places=2)
    for number, fighter in enumerate(fighters):
        fighter.send(f"fight 80 {number} {ground}")
    removed, over = 0, threading.Event()

    def clean() -> None:
        nonlocal removed
        # Not without a pause: nobody would get anywhere.
        while not over.wait(0.02) and removed < 40:
            # Only while somebody holds something, or is about to.
            if any(arena.directory.glob("*.lock")):
                shutil.rmtree(arena.directory, ignore_errors=True)
                removed += 1
                if remade:
                    arena.directory.mkdir(mode=0o755, exist_ok=True)
                    with contextlib.suppress(FileNotFoundError):
                        arena.directory.chmod(0o755)

    cleaner = threading.Thread(target=clean)
    cleaner.start()
    try:
        assert [fighter.receive() for fighter in fighters] == [["fought"]] * 4
    finally:
        over.set()
        cleaner.join()
    assert removed > 5
    assert not Pool(arena.directory, Inventory("gpu", ids)).holders()
    assert mode(arena.directory) == 0o700


def test_processes_that_create_it_together_get_one_of_the_right_mode(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from pytest_distcompat.lease import Inventory, Pool\n"
        "pool = Pool(Path(sys.argv[1]), Inventory('gpu', ('GPU-a',)))\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "with pool.lease(1, who='one'): pass\n"
    )
    directory = tmp_path / "leases"
    command = [sys.executable, "-c", script, str(directory)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "umask": 0o022}
    both = [subprocess.Popen(command, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    for contender in both:
        assert contender.stdout.readline() == "ready\n"
    shutil.rmtree(directory)
    for contender in both:
        contender.communicate("go\n", timeout=60)
    assert [contender.returncode for contender in both] == [0, 0]
    assert (mode(directory), mode(directory / "queue")) == (0o700, 0o700)


def test_a_removal_while_the_directory_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places of a device are looked for in the directory; between two system calls it may be gone."""
    pool = Pool(tmp_path / "leases", Inventory("gpu", IDS, 2, runs_share=True))
    read = Path.glob

    def remove_and_read(path: Path, pattern: str) -> Iterator[Path]:
        if path == pool.directory:
            raise FileNotFoundError(path)
        yield from read(path, pattern)

    monkeypatch.setattr(Path, "glob", remove_and_read)
    with pool.lease(2, who="meanwhile", timeout=60) as lease:
        assert len(lease.ids) == 2

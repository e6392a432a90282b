"""Not collected here: test_on_ranks.py copies it beside on_ranks.py and runs it on real ranks; every test fails."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_distcompat import Cell

mark = pytest.mark.distcompat(world_size=2)


@mark
@pytest.mark.xfail(reason="known", raises=ValueError)
def test_xfail_raises_another(rank: int) -> None:
    raise KeyError("another")


@mark
@pytest.mark.xfail(reason="known", raises=Exception)
def test_xfail_did_not_raise(rank: int) -> None:
    # pytest's own Failed is no Exception.
    with pytest.raises(ValueError, match="never"):
        pass


@mark
@pytest.mark.xfail(reason="known", strict=True)
def test_xpass_strict(rank: int) -> None:
    pass


@mark
def test_xpass_strict_added(rank: int, request: pytest.FixtureRequest) -> None:
    if rank == 1:
        request.applymarker(pytest.mark.xfail(reason="added", strict=True))


@pytest.fixture
def down_on_rank_0(rank: int) -> Iterator[None]:
    yield
    if rank == 0:
        raise RuntimeError("on the way down")


@mark
@pytest.mark.xfail(reason="known", strict=True)
def test_xpass_strict_until_its_teardown(down_on_rank_0: None) -> None:
    pass


@mark
@pytest.mark.xfail(reason="known")
def test_xfail_and_killed(rank: int) -> None:
    if rank == 0:
        raise ValueError
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.distcompat(world_size=2, timeout=0.7)
@pytest.mark.xfail(reason="known")
def test_xfail_and_hangs(rank: int) -> None:
    time.sleep(60)


@mark
def test_assertion(rank: int) -> None:
    value = {"rank": rank}
    print("printed by", rank)
    assert value == {"rank": 0}


@mark
@pytest.mark.parametrize("x", ["it's $HOME/a::b"])
def test_odd_id_fails(x: str, rank: int) -> None:
    raise ValueError(f"{x} on rank {rank}" if rank else "rank 0")


@mark
def test_peer_in_a_collective(rank: int, process_group: Any) -> None:
    from torch import distributed

    if rank == 1:
        raise ValueError("the cause")
    distributed.barrier()


@mark
def test_disagree(rank: int) -> None:
    if rank == 1:
        pytest.skip("only me")


@mark
def test_killed(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@mark
def test_segfault(rank: int) -> None:
    if rank == 1:
        signal.raise_signal(signal.SIGSEGV)
    time.sleep(60)


@pytest.mark.distcompat(world_size=2, timeout=0.7)
def test_hangs(rank: int, process_group: Any) -> None:
    from torch import distributed

    if rank == 0:
        time.sleep(60)
    distributed.barrier()


@pytest.fixture
def raises_up() -> None:
    raise RuntimeError("on the way up")


@pytest.fixture
def raises_down() -> Iterator[None]:
    yield
    raise RuntimeError("on the way down")


@mark
def test_setup_raises(raises_up: None) -> None:
    pass


@mark
def test_teardown_raises(raises_down: None) -> None:
    pass


@mark
def test_unknown_fixture(no_such_fixture: None) -> None:
    pass


@mark
def test_cell_without_cells(cell: Cell) -> None:
    pass


@mark
def test_exits(rank: int) -> None:
    sys.exit(0)


if "torch" not in sys.modules:  # the fork server has it when it collects

    @mark
    def test_only_in_the_parent(rank: int) -> None:
        pass

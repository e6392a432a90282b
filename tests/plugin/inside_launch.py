"""Not collected here: test_inside.py copies it as ``test_launch.py`` and runs it on the two ranks of a real torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_distcompat import CompatSuite, Matrix

mark = pytest.mark.distcompat

RANK = int(os.environ.get("RANK", "0"))


def reduce() -> float:
    import torch
    from torch import distributed

    total = torch.tensor([distributed.get_rank() + 1.0])
    distributed.all_reduce(total)
    return float(total.item())


def test_ordinary() -> None:
    assert os.environ["WORLD_SIZE"] == "2"


@mark
def test_property(record_property: Any) -> None:
    record_property("same", 2)
    record_property("of rank", RANK)


@mark(world_size=2)
def test_group(process_group: Any, rank: int, world_size: int, device: Any) -> None:
    assert (reduce(), rank, world_size, str(device)) == (3.0, RANK, 2, "cpu")


@mark
def test_shared_dir(shared_dir: Path, tmp_path: Path, process_group: Any) -> None:
    assert not list(tmp_path.iterdir())
    (shared_dir / str(RANK)).write_text("", encoding="utf-8")
    reduce()
    assert len(list(shared_dir.iterdir())) == 2


@mark(strategies=["ddp"])
def test_cells(cell: Any) -> None:
    assert cell.world_size == 2


@mark(world_size=4)
def test_for_four(process_group: Any) -> None:
    raise AssertionError("not on two ranks")


@mark
def test_one_fails(process_group: Any) -> None:
    print("printed by", RANK)
    assert RANK == 0
    reduce()


@pytest.fixture
def waits_at_the_end(process_group: Any) -> Iterator[None]:
    from torch import distributed

    yield
    distributed.barrier()


@mark
def test_one_fails_and_a_fixture_waits(waits_at_the_end: None) -> None:
    assert RANK == 0
    reduce()


@mark
def test_group_after_a_failure(process_group: Any) -> None:
    assert reduce() == 3


@mark
def test_own_group_after_a_failure() -> None:
    from torch import distributed

    distributed.init_process_group("gloo")
    assert reduce() == 3
    distributed.destroy_process_group()


@mark
def test_both_fail() -> None:
    raise ValueError(f"of rank {RANK}")


@mark
def test_one_skips() -> None:
    if RANK == 1:
        pytest.skip("only me")


@mark
def test_both_skip() -> None:
    pytest.skip(f"rank {RANK}")


@mark
def test_xfail_and_words() -> None:
    if RANK:
        pytest.xfail("not yet")
    raise RuntimeError("Connection refused")


@mark
def test_xfail_and_fail_late(process_group: Any) -> None:
    """It would have its connections cut, if it were taken to wait for the other."""
    if RANK:
        pytest.xfail("not yet")
    time.sleep(2)
    raise ValueError("late")


@mark
def test_xfail_and_wait(process_group: Any) -> None:
    if RANK:
        pytest.xfail("not yet")
    process_group.barrier().wait()


@pytest.fixture
def raises_down() -> Iterator[None]:
    yield
    raise RuntimeError("on the way down")


@pytest.fixture
def xfails_on_rank_1() -> None:
    if RANK == 1:
        pytest.xfail("not yet")


@mark
def test_xfail_in_setup_and_fail(xfails_on_rank_1: None) -> None:
    assert RANK == 1, "the call"


@mark
def test_xfail_in_setup_and_pass(xfails_on_rank_1: None) -> None:
    assert RANK == 0


@mark
def test_xfail_and_teardown(raises_down: None) -> None:
    pytest.xfail("not yet")


@pytest.fixture
def one_raises() -> None:
    if RANK == 1:
        raise RuntimeError("on the way up")


@mark
def test_one_raises_in_setup(one_raises: None, process_group: Any) -> None:
    raise AssertionError("nobody gets here")


@pytest.fixture
def one_raises_at_the_end() -> Iterator[None]:
    yield
    if RANK == 1:
        raise RuntimeError("on the way down")


@mark
def test_one_raises_in_teardown(one_raises_at_the_end: None) -> None:
    pass


@mark
@pytest.mark.xfail(reason="of the mark", strict=True)
def test_one_fails_as_expected() -> None:
    assert RANK == 0


@mark
@pytest.mark.xfail(reason="of the mark", strict=True)
def test_none_fails_as_expected() -> None:
    pass


@mark
@pytest.mark.xfail(reason="of the mark")
def test_may_fail() -> None:
    pass


def test_a_script(distcompat: Any) -> None:
    raise AssertionError("not inside a launch")


class TestSuite(CompatSuite):
    driver = "torch"
    matrix = Matrix(("ddp",), ("fp32",))


def test_a_pytest_that_a_test_starts_is_no_rank(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text("def test(): pass", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "1 passed" in done.stdout
    assert "inside a launch" not in done.stdout


def test_known() -> None:
    raise KeyError("_orig_mod.weight")


@mark
def test_known_of_a_marked_one() -> None:
    raise KeyError("_orig_mod.weight")


@mark
def test_known_of_one_rank() -> None:
    if RANK == 1:
        raise KeyError("strictly known")

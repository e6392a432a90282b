"""Not collected here: test_on_ranks.py copies it into a directory of its own and runs it there, on real ranks."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_distcompat import Cell, World

mark = pytest.mark.distcompat(world_size=2)
ODD = ["a b", "it's", 'q"q', "é", "a/b::c[d]", "-dash", "$HOME", "\n", "", "x\\y"]
MODULE: list[int] = []
CLASS: list[int] = []


def setup_module() -> None:
    MODULE.append(os.getpid())


def teardown_module() -> None:
    note("module down")


def note(event: str) -> None:
    with Path("events.txt").open("a", encoding="utf-8") as file:
        file.write(f"{os.getpid()} {event}\n")


@pytest.fixture(scope="module")
def of_module() -> Iterator[list[int]]:
    note("module fixture up")
    yield [os.getpid()]
    note("module fixture down")


@pytest.fixture(scope="class")
def of_class() -> Iterator[int]:
    note("class fixture up")
    yield os.getpid()
    note("class fixture down")


@pytest.fixture
def of_function() -> Iterator[int]:
    yield os.getpid()
    note("function fixture down")


# Ordinary tests between marked ones: one process, fixtures made once and kept.


def test_unmarked_first(of_module: list[int], record_property: Callable[[str, object], None]) -> None:
    record_property("pid", os.getpid())
    of_module.append(1)
    assert [os.getpid()] == MODULE


class TestMixed:
    @classmethod
    def setup_class(cls) -> None:
        CLASS.append(os.getpid())

    def setup_method(self) -> None:
        self.pid = os.getpid()

    def test_unmarked_before(self, of_class: int) -> None:
        assert CLASS == [of_class] == [self.pid] == [os.getpid()]

    @mark
    def test_marked(self, of_class: int, of_module: list[int], rank: int) -> None:
        assert of_module == CLASS == MODULE == [os.getpid()]
        assert self.pid == of_class == os.getpid()

    def test_unmarked_after(self, of_class: int, of_module: list[int]) -> None:
        assert CLASS == [of_class] == [self.pid] == [os.getpid()]
        assert of_module == [os.getpid(), 1]


@mark
def test_all_scopes(
    of_session: int, of_module: list[int], of_class: int, of_function: int, request: pytest.FixtureRequest
) -> None:
    assert {of_session, of_class, of_function, *of_module, request.node.auto} == {os.getpid()}
    assert [os.getpid()] == MODULE


@mark
def test_group(process_group: Any, rank: int, world_size: int, world: World, device: Any) -> None:
    import torch
    from torch import distributed

    total = torch.tensor([float(rank)], device=device)
    distributed.all_reduce(total)
    assert (total.item(), world_size, distributed.get_world_size(process_group)) == (1.0, 2, 2)
    assert (world.rank, world.size, world.local_rank, world.device, world.backend) == (rank, 2, rank, "cpu", "gloo")


@pytest.mark.distcompat(world_size=3)
def test_three(process_group: Any, world_size: int) -> None:
    assert world_size == process_group.size() == 3


@mark
def test_directories(tmp_path: Path, shared_dir: Path, rank: int, process_group: Any) -> None:
    from torch import distributed

    assert not list(tmp_path.iterdir())
    if rank == 0:
        assert not list(shared_dir.iterdir())
    distributed.barrier()
    (shared_dir / str(rank)).write_text(f"{tmp_path}\n{shared_dir}", encoding="utf-8")
    distributed.barrier()
    written = [(shared_dir / str(other)).read_text(encoding="utf-8").splitlines() for other in range(2)]
    assert written[0][0] != written[1][0]
    assert written[0][1] == written[1][1]


@mark
def test_monkeypatch_and_capture(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    rank: int,
) -> None:
    monkeypatch.setenv("OF_RANK", str(rank))
    print(os.environ["OF_RANK"])
    logging.getLogger("ours").warning("of rank %s", rank)
    assert capsys.readouterr().out == f"{rank}\n"
    assert caplog.messages == [f"of rank {rank}"]


@mark
def test_capfd(capfd: pytest.CaptureFixture[str], rank: int) -> None:
    os.write(1, b"below Python")
    assert capfd.readouterr().out == "below Python"


@mark
@pytest.mark.parametrize("x", ODD)
def test_odd_ids(x: str, rank: int) -> None:
    assert x in ODD


def closure(value: int) -> Callable[[], int]:
    return lambda: value


@mark
@pytest.mark.parametrize("made", [lambda: 1, closure(1)], ids=["lambda", "closure"])
def test_what_no_pickle_takes(made: Callable[[], int], rank: int) -> None:
    assert made() == 1


@pytest.mark.distcompat(strategies=["ddp", "fsdp2"], options=[{"compile": True}])
def test_cells(cell: Cell, world: World) -> None:
    assert cell.id in {"ddp-fp32-w2-compile", "fsdp2-fp32-w2-compile"}
    assert cell.world_size == world.size


@mark
@pytest.mark.filterwarnings("error")
def test_warning_filters(rank: int) -> None:
    with pytest.raises(UserWarning, match="of rank"):
        warnings.warn("of rank", UserWarning, stacklevel=1)


@mark
def test_property(record_property: Callable[[str, object], None], rank: int) -> None:
    record_property("of rank", rank)
    record_property("shape", (2, 3))
    record_property("no text", NoText())


class NoText:
    def __str__(self) -> str:
        raise OSError("not here")


@mark
def test_prints(rank: int) -> None:
    print("printed by", rank)
    logging.getLogger("ours").warning("logged by %s", rank)


# Skipped and expected to fail.


@mark
def test_skip() -> None:
    pytest.skip("no need")


@mark
@pytest.mark.skipif(sys.maxsize > 0, reason="never")
def test_skipif() -> None:
    note("skipif started ranks")


@mark
@pytest.mark.skipif("int(os.environ['WORLD_SIZE']) < 2", reason="needs two")
def test_skipif_alone(world_size: int) -> None:
    assert world_size == 2


@mark
@pytest.mark.skipif("int(os.environ['WORLD_SIZE']) == 2", reason="not for two")
def test_skipif_for_others() -> None:
    raise AssertionError


@mark
@pytest.mark.xfail("int(os.environ['RANK']) == 1", reason="on rank 1")
def test_xfail_by_rank(rank: int) -> None:
    assert rank == 0


@mark
def test_importorskip() -> None:
    pytest.importorskip("no_such_module_anywhere")


@mark
@pytest.mark.xfail(reason="known", raises=ValueError, strict=True)
def test_xfail_raises(rank: int) -> None:
    raise ValueError


@mark
@pytest.mark.xfail(reason="known", strict=True)
def test_xfail_on_one_rank(rank: int, process_group: Any) -> None:
    from torch import distributed

    if rank == 1:
        raise ValueError
    distributed.barrier()


@mark
def test_xfail_called(rank: int) -> None:
    pytest.xfail("not yet")


@mark
@pytest.mark.xfail(reason="known")
def test_xpass(rank: int) -> None:
    pass


# After all that, still the same process.


def test_unmarked_last(of_module: list[int]) -> None:
    assert [os.getpid()] == MODULE
    assert of_module == [os.getpid(), 1]

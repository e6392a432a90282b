"""Tests as other harnesses write them, moved unchanged: on real ranks, one group for each form."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.plugin.conftest import FakeRanks, Run, RunPytest

CONFTEST = 'pytest_plugins = ["pytest_distcompat.aliases"]\n'

#: As composer, DeepSpeed, LLaMA-Factory and torchtune have them, but for the import of DistributedTest and gpu_test.
MOVED = """
import os
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pytest_distcompat.aliases import DistributedFixture, DistributedTest, gpu_test

@pytest.fixture
def configure_dist():
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()

@pytest.mark.world_size(2)
@pytest.mark.parametrize("value", [3.0])
def test_composer(configure_dist, value):
    total = torch.tensor([value])
    dist.all_reduce(total)
    assert total.item() == 2 * value

@pytest.mark.world_size(1)
def test_composer_alone():
    assert "RANK" not in os.environ

@pytest.fixture(params=["hello"])
def greeting(request):
    return request.param

class _Checkpoint(DistributedFixture):
    def run(self, class_tmpdir, greeting, color):
        assert os.environ["LOCAL_SIZE"] == os.environ["WORLD_SIZE"] == str(dist.get_world_size()) == str(self.world_size)
        open(os.path.join(class_tmpdir, f"{greeting}-{color}-{dist.get_rank()}"), "w").close()
        if color == "red" and dist.get_rank() == 1:
            raise ValueError("not in red")

class checkpoint(_Checkpoint):
    world_size = 3

@pytest.mark.parametrize("color", ["blue", "red"])
class TestFixture(DistributedTest):
    world_size = 2

    def test(self, checkpoint, class_tmpdir, color):
        assert (dist.get_world_size(), os.environ["LOCAL_SIZE"]) == (2, "2")
        assert len(os.listdir(class_tmpdir)) == 3

@pytest.mark.parametrize("number,color", [(1138, "purple")])
class TestDeepSpeed(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("shape", ["icosahedron"])
    def test(self, number, color, shape, greeting, tmpdir, class_tmpdir):
        assert (dist.is_initialized(), dist.get_world_size()) == (True, 2)
        assert (number, color, shape, greeting) == (1138, "purple", "icosahedron", "hello")
        open(os.path.join(tmpdir, str(dist.get_rank())), "w").close()
        dist.barrier()
        assert len(os.listdir(class_tmpdir)) == 2

def _worker(rank, size, port):
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": str(size)}
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()

@pytest.mark.require_distributed(2)
def test_llama_factory(distcompat_lent):
    import socket
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    mp.spawn(_worker, args=(2, port), nprocs=2)
    assert len(distcompat_lent.ids) >= 1

@gpu_test(gpu_count=2)
def test_torchtune(): raise AssertionError("there are no GPUs")
"""


@pytest.fixture(scope="module")
def moved(run_pytest: RunPytest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All of them in one run."""
    directory = tmp_path_factory.mktemp("moved")
    (directory / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (directory / "test_moved.py").write_text(MOVED, encoding="utf-8")
    return run_pytest(directory, "--strict-markers")


@pytest.mark.nightly
@pytest.mark.spawn
def test_aliased_tests_run_as_under_their_harness(moved: Run) -> None:
    assert moved.outcomes == {
        "test_composer[3.0]": "passed",
        "test_composer_alone": "passed",
        "TestFixture::test[hello-blue]": "passed",
        "TestFixture::test[hello-red]": "failed",
        "TestDeepSpeed::test[hello-icosahedron-1138-purple]": "passed",
        "test_llama_factory": "passed",
        "test_torchtune": "skipped",
    }, moved.out
    assert "the test needs 2 GPUs, there are none to use" in moved.text("test_torchtune")
    message = "RunFailedError: rank 1 of the fixture checkpoint: ValueError: not in red"
    assert message in moved.text("TestFixture::test[hello-red]").splitlines()[0]


#: As composer has it: the whole of pytest is run by torchrun there, once for each number of ranks.
COMPOSER = """
import os
import pytest

def pytest_collection_modifyitems(config, items):
    wanted = int(os.environ.get("WORLD_SIZE", "1"))
    sizes = [getattr(item.get_closest_marker("world_size"), "args", [1])[0] for item in items]
    config.hook.pytest_deselected(items=[item for item, size in zip(items, sizes) if size != wanted])
    items[:] = [item for item, size in zip(items, sizes) if size == wanted]

@pytest.fixture(autouse=True, scope="session")
def configure_dist():
    import torch.distributed as dist
    if os.environ.get("WORLD_SIZE", "1") != "1":
        dist.init_process_group("gloo")
        dist.barrier()
"""

SIZES = """
import os
import pytest

def test_one():
    assert "RANK" not in os.environ

@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.world_size(size)) for size in (1, 2, 3)])
def test_both(size):
    assert int(os.environ.get("WORLD_SIZE", "1")) == size

@pytest.mark.world_size(2)
def test_other(): pass
"""


@pytest.mark.nightly
@pytest.mark.spawn
def test_a_conftest_that_keeps_the_tests_of_one_size(run_pytest: RunPytest, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(f"{CONFTEST}{COMPOSER}", encoding="utf-8")
    (tmp_path / "test_sizes.py").write_text(SIZES, encoding="utf-8")
    run = run_pytest(tmp_path, "-k", "not other")
    assert run.outcomes == dict.fromkeys(["test_one", "test_both[1]", "test_both[2]", "test_both[3]"], "passed"), (
        run.out
    )
    assert "4 passed, 1 deselected" in run.out


def test_every_form_requests_its_ranks(pytester: pytest.Pytester, ranks: FakeRanks) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(
        """
        import pytest, unittest
        from pytest_distcompat.aliases import DistributedTest

        @pytest.mark.world_size(3)
        def test_mark(): pass

        class TestAttribute:
            world_size = 4
            def test(self): pass
            @pytest.mark.world_size(2)
            def test_nearer(self): pass

        class TestOne(DistributedTest):
            world_size = 1
            def test(self): pass

        class TestSome(DistributedTest):
            world_size = [2, 4]
            def test(self): pass

        @pytest.mark.distcompat(world_size=2)
        @pytest.mark.world_size(3)
        def test_our_mark_wins_over_aliases(): pass

        class TestProperty:
            @property
            def world_size(self): return 2
            def test(self): pass

        class TestUnit(unittest.TestCase):
            world_size = 2
            def test(self): pass
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:randomly", "--strict-markers")
    result.assert_outcomes(passed=9)
    assert [(r.payload["nodeid"].partition("::")[2], r.world_size) for r in ranks.requests] == [
        ("test_mark", 3),
        ("TestAttribute::test", 4),
        ("TestAttribute::test_nearer", 2),
        ("TestOne::test", 1),
        ("TestSome::test[w2]", 2),
        ("TestSome::test[w4]", 4),
        ("test_our_mark_wins_over_aliases", 2),
    ]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("0", "(0): expected whole numbers above 0"),
        ("[2, 'x']", "([[]2, 'x'[]]): expected whole numbers above 0"),
        ("", " takes a number of ranks, or a list of them"),
    ],
)
def test_a_wrong_size_is_a_collection_error(argument: str, message: str, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(f"import pytest\n@pytest.mark.world_size({argument})\ndef test(): pass")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*::test: @pytest.mark.world_size{message}"])


def test_more_devices_than_there_are_are_a_skip(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    from pytest_distcompat import devices

    monkeypatch.setattr(devices, "gpu_uuids", lambda: ["GPU-aaaa0000-1", "GPU-bbbb1111-2"])
    monkeypatch.setattr(devices, "used_memory", lambda ids: {})
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(
        """
        import os, pytest
        from pytest_distcompat.aliases import gpu_test

        @gpu_test(gpu_count=1)
        def test_one(): assert os.environ["CUDA_VISIBLE_DEVICES"] in ("0", "1")

        @pytest.mark.require_distributed(3)
        def test_three(): pass

        def test_none(): assert "CUDA_VISIBLE_DEVICES" not in os.environ
        """
    )
    result = pytester.runpytest_inprocess("-rs")
    result.assert_outcomes(passed=2, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED *3 ranks need 3 GPUs, 2 to use"])


def test_without_the_aliases_nothing_changes(pytester: pytest.Pytester, ranks: FakeRanks) -> None:
    pytester.makeini("[pytest]\nmarkers = world_size")
    pytester.makepyfile("import pytest\n@pytest.mark.world_size(2)\ndef test(): pass")
    pytester.runpytest_inprocess().assert_outcomes(passed=1)
    assert not ranks.requests

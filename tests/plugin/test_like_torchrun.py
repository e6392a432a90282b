"""Tests that fail on torchrun's ranks fail on warm ones too. Each test says what forked ranks could share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.plugin.conftest import RunPytest, recorded
from tests.pytest_runs import RECORDED

pytestmark = pytest.mark.spawn

TEST = "\n\n@pytest.mark.distcompat(world_size=2)\ndef test_it(process_group, rank, shared_dir):\n"
SAME = "    from torch import distributed\n    seen = [None, None]\n    distributed.all_gather_object(seen, {value})\n"
#: What ranks that share it would see as equal, by the module's own code, and what a rank says of it.
DIFFERENT = {
    "random": ("import random\nVALUE = random.random()\n", "VALUE"),
    "numpy": ("import numpy\nVALUE = numpy.random.default_rng().random()\n", "VALUE"),
    "clock": ("import time\nVALUE = time.time_ns()\n", "VALUE"),
    "now": ("from datetime import datetime\nVALUE = datetime.now().isoformat()\n", "VALUE"),
    "uuid": ("import uuid\nVALUE = uuid.uuid4().hex\n", "VALUE"),
    "tempfile": ("import tempfile\nVALUE = tempfile.mkdtemp()\n", "VALUE"),
    "port": (
        "import socket\nwith socket.create_server(('localhost', 0)) as s:\n    VALUE = s.getsockname()[1]\n",
        "VALUE",
    ),
    "hash": ("", "hash('name')"),
    "address": ("", "id(pytest)"),
    "model": ("import torch\nVALUE = torch.nn.Linear(2, 2).weight.tolist()\n", "VALUE"),
    "rank": ("import os\nVALUE = os.environ.get('RANK')\n", "VALUE"),
    "copy": ("import os\nVALUE = {**os.environ}\n", "VALUE.get('RANK')"),
    "bytes": ("import os\nVALUE = os.environb.get(b'LOCAL_RANK')\n", "VALUE"),
}
SHARED = {"conftest": ("from conftest import VALUE\n", "VALUE"), "hook": ("", "pytest.of_the_hook")}


@pytest.mark.parametrize(
    "where", ["modules", *(pytest.param(where, marks=pytest.mark.nightly) for where in ("conftest", "hook"))]
)
def test_ranks_do_not_share_state_that_each_would_create(run_pytest: RunPytest, tmp_path: Path, where: str) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n", encoding="utf-8")
    hook = "import functools, pytest, uuid\n@functools.cache\ndef made():\n    return uuid.uuid4().hex\n"
    conftests = {"conftest": "import uuid\nVALUE = uuid.uuid4().hex\n"}
    conftests["hook"] = f"{hook}def pytest_configure(config):\n    pytest.of_the_hook = made()\n"
    (tmp_path / "conftest.py").write_text(conftests.get(where, ""), encoding="utf-8")
    cases = DIFFERENT if where == "modules" else {"shared": SHARED[where]}
    for name, (source, value) in cases.items():
        test = TEST.replace("test_it", f"test_{name}") + SAME.format(value=value)
        text = f"import pytest\n{source}{test}    assert seen[0] != seen[1]\n"
        (tmp_path / f"test_{name}.py").write_text(text, encoding="utf-8")
    result = run_pytest(tmp_path)
    assert result.outcomes == {f"test_{name}": "passed" for name in cases}, result.out


UNIMPORTED = """
import pytest
import torch


@pytest.mark.distcompat(world_size=2)
@pytest.mark.parametrize("name", ["fsdp", "tensor", "nn", "elastic", "_composable"])
def test_not_imported(name):
    assert not hasattr(torch.distributed, name)


@pytest.mark.distcompat(world_size=2)
def test_a_module_of_python_is_not_imported():
    import ctypes

    assert not hasattr(ctypes, "wintypes")


@pytest.mark.distcompat(world_size=2)
def test_imported(process_group):
    from torch.distributed.fsdp import fully_shard

    assert torch.distributed.fsdp.fully_shard is fully_shard
    assert torch.distributed.tensor.DTensor
    model = fully_shard(torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert type(torch.distributed.fsdp.__spec__.loader).__name__ == "SourceFileLoader"
"""


def test_a_module_that_nobody_imported_cannot_be_reached(run_pytest: RunPytest, tmp_path: Path) -> None:
    """The fork server has imported it; an import gives it back, with all that it had imported."""
    (tmp_path / "test_it.py").write_text(UNIMPORTED, encoding="utf-8")
    result = run_pytest(tmp_path)
    assert set(result.outcomes.values()) == {"passed"}, result.out


ALONE = """
import multiprocessing
import os
import signal

import pytest

try:
    os.setsid()
    CAN_LEAVE_ITS_SESSION = True
except PermissionError:
    CAN_LEAVE_ITS_SESSION = False


@pytest.mark.distcompat(world_size=2)
def test_led_its_session_at_import():
    assert not CAN_LEAVE_ITS_SESSION


@pytest.mark.distcompat(world_size=2)
def test_leads_its_session():
    assert os.getsid(0) == os.getpgid(0) == os.getpid()


@pytest.mark.distcompat(world_size=2)
def test_signals_its_group():
    received = []
    signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    os.killpg(0, signal.SIGUSR1)
    assert received == [signal.SIGUSR1]


@pytest.mark.distcompat(world_size=2)
def test_is_nobodys_child():
    assert multiprocessing.parent_process() is None
    assert multiprocessing.current_process().name == "MainProcess"
    assert multiprocessing.Process().name == "Process-1"
"""


def test_a_rank_is_a_process_of_its_own(run_pytest: RunPytest, tmp_path: Path) -> None:
    """A signal to the rank's own group killed the launcher, and what fails under torchrun passed."""
    (tmp_path / "test_it.py").write_text(ALONE, encoding="utf-8")
    for launcher in ("warm", "torchrun"):
        result = run_pytest(tmp_path, "--distcompat-launcher", launcher)
        assert len(result.outcomes) == 4, result.out
        assert set(result.outcomes.values()) == {"passed"}, result.out


@pytest.mark.nightly
@pytest.mark.parametrize("imported", ["at the top", "in the test"])
def test_a_module_beside_the_test_hides_one_of_python(run_pytest: RunPytest, tmp_path: Path, imported: str) -> None:
    """``sys.path`` had another order on warm ranks, so that they imported Python's ``this``."""
    (tmp_path / "this.py").write_text("OWN = True\n", encoding="utf-8")
    at_the_top, in_the_test = ("import this\n", "") if imported == "at the top" else ("", "    import this\n")
    test = f"@pytest.mark.distcompat(world_size=2)\ndef test_it():\n{in_the_test}    assert this.OWN\n"
    (tmp_path / "test_it.py").write_text(f"import pytest\n{at_the_top}\n{test}", encoding="utf-8")
    for launcher in ("warm", "torchrun"):
        result = run_pytest(tmp_path, "--distcompat-launcher", launcher)
        assert result.outcomes == {"test_it": "passed"}, result.out


NEIGHBOURS = "    assert seen[0] != seen[1] != seen[3] != seen[2] != seen[0]\n"


@pytest.mark.nightly
def test_neighbours_in_a_mesh_share_no_state_either(run_pytest: RunPytest, tmp_path: Path) -> None:
    """Of two rows and two columns: ranks 0 and 2 too, which a hook's random numbers reach from numpy and torch."""
    conftest = "import numpy, pytest, torch\ndef pytest_configure(config):\n    pytest.drawn = numpy.random.rand()\n"
    conftest += "    pytest.weight = torch.nn.Linear(1, 1).weight.item()\n"
    (tmp_path / "conftest.py").write_text(conftest, encoding="utf-8")
    source = "import pytest\n"
    for name, value in {"drawn": "pytest.drawn", "weight": "pytest.weight", "hash": "hash('name')"}.items():
        source += TEST.replace("test_it", f"test_{name}").replace("size=2", "size=4")
        source += SAME.replace("[None, None]", "[None] * 4").format(value=value) + NEIGHBOURS
    (tmp_path / "test_it.py").write_text(source, encoding="utf-8")
    result = run_pytest(tmp_path)
    assert result.outcomes == dict.fromkeys(("test_drawn", "test_weight", "test_hash"), "passed"), result.out


@pytest.mark.nightly
def test_state_created_at_collection_is_created_by_each_rank(run_pytest: RunPytest, tmp_path: Path) -> None:
    """By a generator of parameters, and by a collector of the project's own."""
    conftest = "import os, pytest\nclass Own(pytest.Module):\n    def collect(self):\n"
    conftest += "        self.obj.RANK = os.environ.get('RANK')\n        return super().collect()\n"
    conftest += (
        "def pytest_pycollect_makemodule(module_path, parent):\n    return Own.from_parent(parent, path=module_path)\n"
    )
    lazy = "import os, pytest\ndef ranks():\n    yield pytest.param(os.environ.get('RANK'), id='rank')\n\n"
    lazy += "@pytest.mark.parametrize('known', ranks())"
    test = f"{TEST.lstrip().replace('shared_dir', 'known')}    assert known == str(rank)\n"
    modules = {
        "lazy": ("", f"{lazy}\n{test}"),
        "own": (conftest, f"import pytest\nRANK = None\n{TEST}    assert RANK == str(rank)\n"),
    }
    for name, (of_conftest, source) in modules.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "conftest.py").write_text(of_conftest, encoding="utf-8")
        (tmp_path / name / f"test_{name}.py").write_text(source, encoding="utf-8")
        # pytest 9.1 warns of values that can be read once.
        result = run_pytest(tmp_path / name, "-W", "ignore::pytest.PytestWarning")
        assert set(result.outcomes.values()) == {"passed"}, result.out


@pytest.mark.nightly
def test_the_start_method_that_a_module_sets_is_that_of_its_ranks(run_pytest: RunPytest, tmp_path: Path) -> None:
    source = "import multiprocessing, pytest\nmultiprocessing.set_start_method('spawn', force=True)\n"
    message = "    assert multiprocessing.get_start_method() == 'spawn'\n    assert multiprocessing.current_process().name == 'MainProcess'\n"
    (tmp_path / "test_it.py").write_text(f"{source}{TEST}{message}", encoding="utf-8")
    result = run_pytest(tmp_path)
    assert result.outcomes == {"test_it": "passed"}, result.out


@pytest.mark.nightly
@pytest.mark.parametrize("where", ["module", "hook"])
def test_a_file_opened_at_import_has_an_offset_for_each_rank_and_test(
    run_pytest: RunPytest, tmp_path: Path, where: str
) -> None:
    (tmp_path / "rows.txt").write_text("first\nsecond\n", encoding="utf-8")
    opened = "    pytest.rows = Path(__file__).with_name('rows.txt').open()\n"
    head = "import pytest\nfrom pathlib import Path\n"
    hook = f"{head}def pytest_configure(config):\n{opened}" if where == "hook" else ""
    (tmp_path / "conftest.py").write_text(hook, encoding="utf-8")
    body = "    assert pytest.rows.readline() == 'first\\n'\n"
    source = f"{head}{opened.lstrip() if where == 'module' else ''}{TEST}{body}"
    (tmp_path / "test_it.py").write_text(f"{source}{TEST.replace('test_it', 'test_next')}{body}", encoding="utf-8")
    result = run_pytest(tmp_path)
    assert result.outcomes == {"test_it": "passed", "test_next": "passed"}, result.out


@pytest.mark.nightly
def test_ranks_import_only_modules_with_per_rank_state_themselves(run_pytest: RunPytest, tmp_path: Path) -> None:
    depth = "    import psutil\n    (tmp / f'{__name__}-{rank}').write_text(str(len(psutil.Process().parents())))\n"
    for name, source in {"pure": "", "impure": "import time\nNOW = time.time()\n"}.items():
        start = f"import pytest\n{source}from pathlib import Path\ntmp = Path(__file__).parent\n"
        (tmp_path / f"test_{name}.py").write_text(
            f"{start}{TEST.replace('test_it', f'test_{name}')}{depth}", encoding="utf-8"
        )
    result = run_pytest(tmp_path)
    assert result.outcomes == {"test_pure": "passed", "test_impure": "passed"}, result.out
    pure, impure = (
        [int((tmp_path / f"test_{name}-{rank}").read_text()) for rank in (0, 1)] for name in ("pure", "impure")
    )
    # One more process above it: the fork server that has imported the tests.
    assert pure == [depth + 1 for depth in impure]
    message = f"each rank imports the tests itself, as under torchrun, which takes longer: {tmp_path / 'test_impure.py'}:3 reads the clock"
    assert result.out.count(message) == 1, result.out


@pytest.mark.nightly
@pytest.mark.parametrize("reuse", ["never", pytest.param("session", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("place", ["atexit", pytest.param("unconfigure", marks=pytest.mark.nightly)])
def test_exit_handlers_of_ranks_run(run_pytest: RunPytest, tmp_path: Path, place: str, reuse: str) -> None:
    """An exit code that is set there counts, and what was made for the session goes with it."""
    ends = "    import atexit, os\n    if rank == 1:\n        atexit.register(os._exit, 3)\n"
    hook = "def pytest_unconfigure(config):\n    if os.environ.get('RANK') == '1':\n        os._exit(3)\n"
    conftest = "import os, tempfile\ndef pytest_configure(config):\n    config.made = tempfile.TemporaryDirectory(dir=os.getcwd())\n"
    (tmp_path / "conftest.py").write_text(conftest + (hook if place == "unconfigure" else ""), encoding="utf-8")
    (tmp_path / "test_it.py").write_text(
        f"import pytest{TEST}{ends if place == 'atexit' else '    pass'}", encoding="utf-8"
    )
    result = run_pytest(tmp_path, f"--distcompat-reuse={reuse}")
    assert result.code == pytest.ExitCode.TESTS_FAILED, result.out
    assert "rank 1 exited with code 3" in result.out, result.out


@pytest.mark.nightly
def test_temporary_directories_of_the_session_are_removed(run_pytest: RunPytest, tmp_path: Path) -> None:
    made = "import atexit, shutil, tempfile\nfrom pathlib import Path\nHERE = Path(__file__).parent\n"
    made += "DIRECTORY = tempfile.mkdtemp(prefix='at_import-', dir=HERE)\natexit.register(shutil.rmtree, DIRECTORY)\n"
    made += "def pytest_configure(config):\n    config.made = tempfile.mkdtemp(prefix='configured-', dir=HERE)\n"
    made += "def pytest_unconfigure(config):\n    Path(config.made).rmdir()\n"
    (tmp_path / "conftest.py").write_text(made, encoding="utf-8")
    (tmp_path / "test_it.py").write_text(f"import pytest{TEST}    pass\n", encoding="utf-8")
    result = run_pytest(tmp_path)
    assert result.outcomes == {"test_it": "passed"}, result.out
    assert not [*tmp_path.glob("at_import-*"), *tmp_path.glob("configured-*")]


OPTIONS = """
import enum
import pytest

class Mode(enum.Enum):
    FAST = "fast"
    SLOW = "slow"

class Closed:
    def __init__(self, text):
        self.text = text
        self.lock = lambda: text

def pytest_addoption(parser):
    parser.addoption("--mode", type=Mode, default=Mode.FAST)
    parser.addoption("--closed", type=Closed, default=Closed("none"))
    parser.addoption("--of-text", type=Closed, default="none")

@pytest.fixture
def mode(request):
    return request.config.getoption("mode")
"""


@pytest.mark.nightly
@pytest.mark.parametrize("reuse", ["never", pytest.param("module", marks=pytest.mark.nightly)])
def test_an_option_whose_type_is_of_a_conftest_is_the_same_on_ranks(
    run_pytest: RunPytest, tmp_path: Path, reuse: str
) -> None:
    (tmp_path / "conftest.py").write_text(OPTIONS, encoding="utf-8")
    (tmp_path / "test_it.py").write_text(
        f"import pytest\nfrom conftest import Mode{TEST.replace('shared_dir', 'mode')}    assert mode is Mode.SLOW\n",
        encoding="utf-8",
    )
    result = run_pytest(tmp_path, "--mode=slow", f"--distcompat-reuse={reuse}")
    assert result.outcomes == {"test_it": "passed"}, result.out


@pytest.mark.nightly
def test_an_option_that_cannot_be_handed_to_ranks_is_an_error_that_names_it(
    run_pytest: RunPytest, tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text(OPTIONS, encoding="utf-8")
    (tmp_path / "test_it.py").write_text(f"import pytest{TEST}    pass\n", encoding="utf-8")
    for name in ("closed", "of_text"):
        result = run_pytest(tmp_path, f"--{name.replace('_', '-')}=none")
        assert result.code == pytest.ExitCode.USAGE_ERROR, result.out
        assert f"the option {name!r} has a value that cannot be handed to ranks" in result.out
    assert run_pytest(tmp_path).code == pytest.ExitCode.OK, "its default is made anew on ranks"


@pytest.mark.nightly
def test_an_option_that_ranks_cannot_read_is_an_error_that_names_it(run_pytest: RunPytest, tmp_path: Path) -> None:
    bad = "def read(text):\n    raise ValueError('not on ' + text)\nclass Bad:\n    def __init__(self, text):\n        self.text = text\n"
    bad += "    def __reduce__(self):\n        return read, (self.text,)\n"
    bad += "def pytest_addoption(parser):\n    parser.addoption('--bad', type=Bad)\n"
    (tmp_path / "conftest.py").write_text(bad, encoding="utf-8")
    (tmp_path / "test_it.py").write_text(f"import pytest{TEST}    pass\n", encoding="utf-8")
    result = run_pytest(tmp_path, "--bad=ranks")
    assert result.outcomes == {"test_it": "failed"}, result.out
    assert "the option 'bad' has a value that no rank can read (ValueError: not on ranks)" in result.out


@pytest.mark.nightly
def test_a_test_imports_a_module_that_pytest_rewrites(run_pytest: RunPytest, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n", encoding="utf-8")
    (tmp_path / "test_it.py").write_text(f"import pytest{TEST}    import test_later\n", encoding="utf-8")
    (tmp_path / "test_later.py").write_text("VALUE = 1\n", encoding="utf-8")
    result = run_pytest(tmp_path, "test_it.py")
    assert result.outcomes == {"test_it": "passed"}, result.out


@pytest.mark.parametrize("launcher", ["warm", pytest.param("torchrun", marks=pytest.mark.nightly)])
def test_the_command_line_and_the_interpreters_flags_reach_ranks(
    environment: dict[str, str], tmp_path: Path, launcher: str
) -> None:
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--slow', action='store_true')\n", encoding="utf-8"
    )
    (tmp_path / "test_it.py").write_text(
        "import sys, warnings\nimport pytest\nRUN_SLOW = '--slow' in sys.argv\nFLAGS = sys.flags.dev_mode, sys.flags.optimize\n"
        f"{TEST.replace('rank,', 'rank, request,')}    assert RUN_SLOW\n    assert '--slow' in sys.argv\n"
        "    assert '--slow' in request.config.invocation_params.args\n    assert FLAGS == (True, 0)\n"
        "    assert 'error::ResourceWarning' in sys.warnoptions\n",
        encoding="utf-8",
    )
    flags = ["-X", "dev", "-W", "error::ResourceWarning"]
    result = recorded(
        tmp_path,
        [
            *flags,
            "-m",
            "pytest",
            *RECORDED,
            f"--basetemp={tmp_path / 'basetemp'}",
            "--slow",
            f"--distcompat-launcher={launcher}",
        ],
        environment,
    )
    assert result.outcomes == {"test_it": "passed"}, result.out


@pytest.mark.nightly
def test_verify_fails_a_test_that_differs_under_torchrun(run_pytest: RunPytest, tmp_path: Path) -> None:
    """A difference that no watch can see: a variable that warm ranks have, and that torchrun does not give to its own."""
    variable = "    import os\n    given = 'PYTEST_DEBUG_TEMPROOT' in os.environ\n    assert given\n"
    sound = f"{TEST.replace('test_it(', 'test_sound(tmp_path, ')}    assert tmp_path.is_dir()\n"
    (tmp_path / "test_it.py").write_text(f"import pytest{TEST}{variable}{sound}", encoding="utf-8")
    result = run_pytest(tmp_path, "--distcompat-verify=100")
    assert result.outcomes == {"test_it": "failed", "test_sound": "passed"}, result.out
    assert "warm ranks and torchrun's disagree: passed on warm ranks, failed under torchrun" in result.out
    assert "assert given" in result.out
    assert run_pytest(tmp_path).code == pytest.ExitCode.OK


def test_verify_with_the_torchrun_launcher_is_a_usage_error(run_pytest: RunPytest, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(f"import pytest{TEST}    pass\n", encoding="utf-8")
    result = run_pytest(tmp_path, "--distcompat-verify=100", "--distcompat-launcher=torchrun")
    assert "compares warm ranks with torchrun's" in result.out
    assert result.code == pytest.ExitCode.USAGE_ERROR
    assert "expected a number from 0 to 100" in run_pytest(tmp_path, "--distcompat-verify=lots").out


@pytest.mark.spawn
def test_a_module_that_raises_on_ranks_alone_is_told_with_its_error(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os
        import pytest

        if "RANK" in os.environ:
            raise RuntimeError("not where a rank imports it")

        @pytest.mark.distcompat(world_size=2)
        def test_it(): pass
        """
    )
    result = pytester.runpytest_subprocess("--distcompat-gpus=0")
    result.assert_outcomes(failed=1, warnings=1)
    result.stdout.fnmatch_lines(
        [
            "rank [01] raised LookupError: *.py cannot be collected on this rank: *RuntimeError: not where a rank imports it*"
        ]
    )


#: As ``nohup pytest`` in the background of a shell.
IGNORING = """
import signal, sys
import pytest

for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    signal.signal(number, signal.SIG_IGN)
sys.exit(pytest.main(sys.argv[1:]))
"""
HANDLERS = """
import signal
import pytest


@pytest.mark.distcompat(world_size=1)
def test_handlers():
    assert signal.getsignal(signal.SIGHUP) == signal.getsignal(signal.SIGQUIT) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


def test_signals_that_pytest_ignores_are_not_ignored_on_ranks(tmp_path: Path, environment: dict[str, str]) -> None:
    """torchrun's agent handles them, so that its ranks have the defaults."""
    (tmp_path / "test_handlers.py").write_text(HANDLERS, encoding="utf-8")
    run = recorded(tmp_path, ["-c", IGNORING, *RECORDED, f"--basetemp={tmp_path / 'basetemp'}"], environment)
    assert run.outcomes == {"test_handlers": "passed"}, run.out

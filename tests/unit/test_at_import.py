"""Modules that read or make, while they are imported, what each rank of torchrun would read or make for itself."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.machinery
import importlib.util
import io
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from pytest_distcompat.launch import at_import, installed_files
from pytest_distcompat.launch.at_import import Watch
from pytest_distcompat.launch.import_findings import EVERY_TEST, Findings

#: Not to be found in this file, which is the user's own code too, as one word.
NAME = "module_" + "that_is_watched"


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(os.environ)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("RANK", raising=False)
    installed_files.is_installed.cache_clear()
    seed = random.getstate()
    yield tmp_path
    random.setstate(seed)
    # Not all of them are monkeypatch's: the modules set variables too.
    os.environ.clear()
    os.environ.update(before)
    for name in (NAME, "helper", "other", "library"):
        sys.modules.pop(name, None)


def imported(directory: Path, text: str, **others: str) -> Findings:
    """Return the findings of importing a module with that text, beside other modules."""
    for name, source in {NAME: text, **others}.items():
        (directory / f"{name}.py").write_text(source, encoding="utf-8")
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    with Watch() as watch, contextlib.suppress(LookupError):
        importlib.import_module(NAME)
    watch.only_in({str(directory / f"{NAME}.py")})
    return watch.findings


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("os.environ.get('RANK', 0)", "RANK"),
        ("os.getenv('LOCAL_RANK')", "LOCAL_RANK"),
        ("'RANK' in os.environ", "RANK"),
        ("'MASTER_ADDR' in os.environ", "MASTER_ADDR"),
        ("os.environ['WORLD_SIZE']", "WORLD_SIZE"),
        ("os.environb.get(b'RANK')", "RANK"),
        ("os.environ.setdefault('RANK', '0')", "RANK"),
        ("int(os.environ.setdefault('WORLD_SIZE', '1'))", "WORLD_SIZE"),
        ("max(int(os.environ.get(name, -1)) for name in ['RANK'])", "RANK"),
        ("(lambda: os.environ.get('RANK'))()", "RANK"),
        ("__import__('torch.distributed').distributed.is_torchelastic_launched()", "TORCHELASTIC_RUN_ID"),
    ],
)
def test_each_way_to_read_a_variable_is_found(directory: Path, line: str, name: str) -> None:
    findings = imported(directory, f"import os\nANSWER = {line}\n")
    assert findings.found[""] == {}
    file = str(directory / f"{NAME}.py")
    assert findings.found[name] == {file: f"{file}:2 reads {name} at import"}
    assert findings.reason(file, name.__eq__) == f"{file}:2 reads {name} at import"
    assert findings.reason(file, "HOME".__eq__) == ""
    assert findings.reason(str(directory / "other.py"), name.__eq__) == ""
    assert findings.reason(None, name.__eq__)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("dict(os.environ)", "reads the whole environment"),
        ("{**os.environ}", "reads the whole environment"),
        ("os.environ.copy()", "reads the whole environment"),
        ("list(os.environ.items())", "reads the whole environment"),
        ("copy.deepcopy(os.environ)", "reads the whole environment"),
        ("repr(os.environ)", "reads the whole environment"),
        ("time.time()", "reads the clock"),
        ("time.time_ns()", "reads the clock"),
        ("time.strftime('%H')", "reads the clock"),
        ("datetime.datetime.now()", "reads the clock"),
        ("datetime.date.today()", "reads the clock"),
        ("random.random()", "makes something random"),
        ("random.Random().random()", "makes something random"),
        ("uuid.uuid4()", "makes something random"),
        ("secrets.token_hex()", "makes something random"),
        ("os.urandom(4)", "makes something random"),
        ("numpy.random.default_rng()", "makes something random"),
        ("numpy.random.rand()", "draws random numbers of numpy"),
        ("torch.randn(2)", "draws random numbers of torch"),
        ("torch.nn.Linear(2, 2)", "draws random numbers of torch"),
        ("random.getstate()", "makes something random"),
        ("torch.seed()", "makes something random"),
        ("torch.initial_seed()", "makes something random"),
        ("torch.get_rng_state()", "makes something random"),
        ("torch.Generator().seed()", "makes something random"),
        ("ssl.RAND_bytes(4)", "makes something random"),
        ("sqlite3.connect(HERE + '/made')", "opens a database"),
        ("tempfile.mkdtemp(dir=HERE)", "asks for the number of its process"),
        ("os.getpid()", "asks for the number of its process"),
        ("os.mkdir(HERE + '/made')", "calls os.mkdir"),
        ("pathlib.Path(HERE, 'made').mkdir()", "calls os.mkdir"),
        ("pathlib.Path(HERE, 'made').write_text('')", "opens"),
        ("os.open(HERE + '/made', os.O_CREAT)", "opens"),
        ("open(__file__)", "leaves"),
        ("open('/proc/self/stat').close()", "opens /proc/self/stat"),
        ("socket.create_server(('localhost', 0)).close()", "uses a socket"),
        ("subprocess.run(['true'])", "starts a process"),
        ("os.system('true')", "calls os.system"),
    ],
)
def test_per_rank_state_created_at_import_is_found(directory: Path, line: str, what: str) -> None:
    modules = "copy, datetime, os, pathlib, random, secrets, socket, sqlite3, ssl, subprocess, tempfile, time, uuid, numpy, torch"
    findings = imported(directory, f"import {modules}\nHERE = {str(directory)!r}\nMADE = {line}\n")
    (sentence,) = findings.found[""].values()
    assert list(findings.found[""]) == [str(directory / f"{NAME}.py")]
    assert what in sentence
    assert sentence.endswith(" at import")
    assert findings.reason(str(directory / f"{NAME}.py"), "".__eq__) == sentence


@pytest.mark.parametrize(
    "line",
    [
        "def rank(): return os.environ['RANK'], time.time(), random.random()",
        "os.environ.setdefault('RANK', '0')",
        "for name in ['RANK']: os.environ.setdefault(name, '0')",
        "os.environ.get('HOME')",
        "random.seed(7); DATA = [random.random() for _ in range(3)]",
        "DATA = random.Random(7).sample(range(9), 3)",
        "numpy.random.seed(7); DATA = numpy.random.rand(3)",
        "DATA = numpy.random.default_rng(7).random(3)",
        "random.seed(7); STATE = random.getstate()",
        "torch.manual_seed(7); DATA = torch.randn(3)",
        "torch.manual_seed(8); SEED = torch.initial_seed()",
        "DATA = torch.randn(3, generator=torch.Generator().manual_seed(7))",
        "open(__file__).read(); pathlib.Path(__file__).read_bytes()",
        "logging.getLogger(__name__).warning('hello')",
        "with open(__file__) as file: TEXT = file.read()",
        "time.sleep(0)",
        "datetime.datetime(2026, 1, 1); uuid.UUID(int=7)",
        "@dataclasses.dataclass\nclass Settings:\n    rate: float = 0.1",
        "class Kind(enum.Enum):\n    A = enum.auto()",
        "import helper",
        "importlib.import_module('helper')",
    ],
)
def test_state_equal_on_all_ranks_is_ignored(directory: Path, line: str) -> None:
    modules = "dataclasses, datetime, enum, importlib, logging, os, pathlib, random, time, uuid, numpy, torch"
    findings = imported(directory, f"import {modules}\n{line}\n", helper="VALUE = 1\n")
    assert findings.found[""] == {}
    for name in findings.found:
        assert "RANK" not in name


@pytest.mark.parametrize(
    "line", ["os.environ['RANK'] = '0'", "os.environ.update(RANK='0')", "os.environb[b'RANK'] = b'0'"]
)
def test_a_variable_of_the_agents_that_is_set_concerns_them_all(directory: Path, line: str) -> None:
    """Ranks that are forked get the agent's value after it, and those of torchrun before it."""
    file = directory / f"{NAME}.py"
    assert imported(directory, f"import os\n{line}\n").found[""] == {EVERY_TEST: f"{file}:2 sets RANK at import"}
    assert imported(directory, "import os\nos.environ['RANKS'] = '0'\n").found[""] == {}


def test_memory_that_a_fork_would_share_concerns_them_all(directory: Path) -> None:
    (sentence,) = imported(directory, "import mmap\nBUFFER = mmap.mmap(-1, 64)\n").found[""].values()
    assert sentence.startswith("memory that processes share (/dev/zero (deleted) at ")


def test_how_many_threads_torch_uses_matters_where_ranks_have_another_number(directory: Path) -> None:
    """Ranks are brought to ``OMP_NUM_THREADS`` after the fork, which would undo what the module did."""
    findings = imported(directory, "import torch\ntorch.set_num_threads(torch.get_num_threads())\n")
    sentence = f"{directory / NAME}.py:2 sets how many threads torch uses at import"
    assert findings == Findings({"": {}, "OMP_NUM_THREADS": {EVERY_TEST: sentence}})


def test_a_module_that_tests_import_concerns_them_all(directory: Path) -> None:
    findings = imported(directory, "import helper\n", helper="import time\nNOW = time.time()\n")
    assert findings.found[""] == {EVERY_TEST: f"{directory / 'helper.py'}:2 reads the clock at import"}
    assert findings.reason(str(directory / "other.py"), "".__eq__)


def test_a_test_module_that_another_imports_concerns_them_all(directory: Path) -> None:
    (directory / "other.py").write_text(f"from {NAME} import NOW\n", encoding="utf-8")
    sys.modules["other"] = other = ModuleType("other")
    other.__file__ = str(directory / "other.py")
    assert list(imported(directory, "import time\nNOW = time.time()\n").found[""]) == [EVERY_TEST]


def test_a_function_of_another_module_that_reads_concerns_them_all(directory: Path) -> None:
    helper = "import functools, os\n@functools.cache\ndef rank():\n    return os.environ.get('RANK')\n"
    findings = imported(directory, "import helper\nhelper.rank()\n", helper=helper)
    assert findings.found["RANK"] == {EVERY_TEST: f"{directory / 'helper.py'}:4 reads RANK at import"}


def test_a_library_may_read_the_clock_but_not_which_rank_it_is_on(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that ``pip install --target`` installed elsewhere is a library too."""
    site = directory / "site"
    (site / "library-1.0.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(site)
    installed_files._installed_in.cache_clear()
    text = "import os, time\nNOW, WIDTH = time.time(), os.environ.get('COLUMNS')\ndef rank():\n    return os.environ.get('RANK')\n"
    (site / "library.py").write_text(text, encoding="utf-8")
    assert imported(directory, "import library\n") == Findings()
    own = str(directory / f"{NAME}.py")
    findings = imported(directory, "import library\n\nRANK = library.rank()\n")
    assert findings.found["RANK"] == {own: f"{own}:3 reads RANK at import"}
    (site / "library.py").write_text(f"{text}RANK = rank()\n", encoding="utf-8")
    sys.modules.pop("library")
    findings = imported(directory, "import library\n")
    assert findings.found == {"": {}, "RANK": {EVERY_TEST: f"{site / 'library.py'} reads RANK at import"}}


def test_modules_beside_installed_libraries_are_the_users_own(directory: Path) -> None:
    """``pip install --target .`` in the project's own directory."""
    installed_files._installed_in.cache_clear()
    (directory / "library-1.0.dist-info").mkdir()
    (directory / "library-1.0.dist-info" / "RECORD").write_text(
        "library.py,sha256=x,1\nlibrary-1.0.dist-info/RECORD,,\n../../bin/library,,\nhelper/__init__.py,,\n",
        encoding="utf-8",
    )
    text = "import time\nNOW = time.time()\n"
    assert list(imported(directory, "import library\n" + text, library=text).found[""]) == [
        str(directory / f"{NAME}.py")
    ]
    watch = Watch()
    own = {
        name: watch.is_own(str(directory / name))
        for name in ("library.py", "helper/one.py", "helpers/one.py", f"{NAME}.py")
    }
    assert own == {"library.py": False, "helper/one.py": False, "helpers/one.py": True, f"{NAME}.py": True}


def test_tests_that_are_installed_are_the_users_own(directory: Path) -> None:
    """``pytest --pyargs library``, and the same of a conftest there."""
    installed_files._installed_in.cache_clear()
    (directory / f"{NAME}-1.0.dist-info").mkdir()
    (directory / f"{NAME}.py").write_text("import time\nNOW = time.time()\n", encoding="utf-8")

    class Loader(importlib.machinery.SourceFileLoader):
        def exec_module(self, module: ModuleType) -> None:
            super().exec_module(module)

    ordinary = Loader.exec_module
    for patterns, expected in ((("test_*.py",), 0), (("conftest.py", f"{NAME[:6]}*.py"), 1)):
        with Watch() as watch:
            watch.watch_loader(Loader, patterns)
            loader = Loader(NAME, str(directory / f"{NAME}.py"))
            spec = importlib.util.spec_from_loader(NAME, loader)
            assert spec is not None
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
        assert len(watch.findings.found[""]) == expected
        assert Loader.exec_module is ordinary


def test_the_installed_project_under_test_is_the_users_own(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / f"{NAME}-1.0.dist-info").mkdir()
    installed_files._installed_in.cache_clear()
    (directory / f"{NAME}.py").write_text("import time\nNOW = time.time()\n", encoding="utf-8")
    for own, expected in (((), 0), ((str(directory / f"{NAME}.py"),), 1)):
        sys.modules.pop(NAME, None)
        with Watch(own) as watch:
            importlib.import_module(NAME)
        assert len(watch.findings.found[""]) == expected


def patched_functions() -> list[object]:
    """Return what is patched while a module is imported."""
    return [
        type(os.environ),
        type(os.environb),
        builtins.open,
        io.open,
        os.open,
        sys.getprofile(),
    ]


def test_the_patched_functions_are_restored(directory: Path) -> None:
    before = patched_functions()
    assert imported(directory, "import os\nRANK = os.environ['RANK']\n").found["RANK"]  # raises
    assert patched_functions() == before
    assert "exec_module" not in vars(importlib.machinery.SourceFileLoader)
    assert at_import.active is None


def test_installed_modules_are_not_the_users_own() -> None:
    watch = Watch()
    assert not watch.is_own(pytest.__file__)
    assert not watch.is_own(str(importlib.__file__))
    assert not watch.is_own(str(at_import.__file__))
    assert watch.is_own(__file__)

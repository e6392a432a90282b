"""``distcompat init``: what it finds out, what it writes, and that pytest then runs it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_distcompat.cli import main
from pytest_distcompat.ext.scaffold.repository import Class, inspect_repository

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write files into the repository: path to text."""

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    return write


def init(root: Path, *arguments: str) -> int:
    return main(["init", str(root), *arguments])


def suite(root: Path) -> str:
    return (root / "tests" / "test_distcompat.py").read_text(encoding="utf-8")


def collected(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", "--distcompat-gpus=0"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def test_an_empty_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert init(tmp_path) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["wrote tests/test_distcompat.py", "wrote pytest.ini"]
    assert "no workflow was written: the repository is not on GitHub (no .github, no such remote)" in printed
    assert printed[-1] == f"now: cd {tmp_path} && pytest tests/test_distcompat.py"
    assert 'driver = "torch"' in suite(tmp_path)
    assert (tmp_path / "pytest.ini").read_text(encoding="utf-8") == "[pytest]\ndistcompat_profile = smoke\n"
    done = collected(tmp_path)
    assert "tests/test_distcompat.py::TestDistcompat::test[ddp-fp32-w2:active]" in done.stdout, (
        done.stdout + done.stderr
    )


def test_ten_lines(tmp_path: Path) -> None:
    init(tmp_path)
    assert len([line for line in suite(tmp_path).splitlines() if line.strip()]) <= 10


def test_the_second_time_it_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".github").mkdir()
    init(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.relative_to(tmp_path).as_posix() for path in before} == {
        "tests/test_distcompat.py",
        "pytest.ini",
        ".github/workflows/distcompat.yml",
    }
    capsys.readouterr()
    assert init(tmp_path) == 0
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert capsys.readouterr().out.splitlines()[:3] == [
        "kept tests/test_distcompat.py",
        "kept .github/workflows/distcompat.yml",
        "kept distcompat_profile in pytest.ini",
    ]


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert init(tmp_path, "--dry-run") == 0
    assert list(tmp_path.iterdir()) == []
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["would write tests/test_distcompat.py", "would write pytest.ini"]


def test_a_file_that_cannot_be_written_is_not_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_distcompat.py").symlink_to(tmp_path / "gone" / "test_distcompat.py")
    assert init(tmp_path) != 0
    assert "wrote" not in capsys.readouterr().out


TOML = '[project]\nname = "x"\n\n[tool.pytest.ini_options]\n# ours\naddopts = ["-ra"]\ntestpaths = ["checks"]\n\n[tool.ruff]\nline-length = 99\n'
ADDED = "distcompat_profile = smoke"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("pyproject.toml", TOML, '[tool.pytest.ini_options] in pyproject.toml: distcompat_profile = "smoke"'),
        (
            "pyproject.toml",
            TOML.replace(".ini_options", ""),
            '[tool.pytest] in pyproject.toml: distcompat_profile = "smoke"',
        ),
        ("pytest.toml", "", '[pytest] in pytest.toml: distcompat_profile = "smoke"'),
        (
            ".pytest.toml",
            '[pytest]\naddopts = ["-ra"]\n',
            '[pytest] in .pytest.toml: distcompat_profile = "smoke"',
        ),
        ("pytest.ini", "", f"[pytest] in pytest.ini: {ADDED}"),
        ("tox.ini", "[tox]\nskipsdist = true\n[pytest]\naddopts = -ra\n", f"[pytest] in tox.ini: {ADDED}"),
        ("setup.cfg", "[metadata]\nname = x\n[tool:pytest]\naddopts = -ra\n", f"[tool:pytest] in setup.cfg: {ADDED}"),
    ],
)
def test_settings_that_are_there_are_their_owners_to_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, message: str
) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    init(tmp_path)
    assert f"add to {message}" in capsys.readouterr().out.splitlines()
    assert path.read_text(encoding="utf-8") == text
    assert not (tmp_path / "pytest.ini").exists() or name == "pytest.ini"


@pytest.mark.parametrize("text", ["", '[project]\nname = "x"\n'])
def test_settings_that_are_not_there_are_written(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    init(tmp_path)
    assert (tmp_path / "pyproject.toml").read_text(encoding="utf-8") == text
    assert (tmp_path / "pytest.ini").read_text(encoding="utf-8") == f"[pytest]\n{ADDED}\n"


def test_a_config_that_pytest_does_not_read_is_none(tmp_path: Path) -> None:
    (tmp_path / "setup.cfg").write_text("[metadata]\nname = x\n", encoding="utf-8")
    settings = inspect_repository(tmp_path).settings
    assert settings.file == tmp_path / "pytest.ini"
    assert settings.table == "pytest"


def test_the_suite_is_written_into_testpaths(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(TOML, encoding="utf-8")
    (tmp_path / "checks").mkdir()
    init(tmp_path)
    assert (tmp_path / "checks" / "test_distcompat.py").exists()


@pytest.mark.parametrize(
    ("code", "driver", "strategies"),
    [
        ("import torch", "torch", '("ddp", "fsdp2")'),
        ("from torch import nn\nfrom accelerate import Accelerator", "accelerate", '("ddp", "fsdp2")'),
        ("import transformers, accelerate, deepspeed", "trainer", '("ddp", "fsdp2", "zero2")'),
        ("def f():\n    import deepspeed", "deepspeed", '("zero1", "zero3")'),
        ("from .torch import x", "torch", '("ddp", "fsdp2")'),
    ],
)
def test_the_imported_library_selects_the_driver(
    tmp_path: Path, write: Write, code: str, driver: str, strategies: str
) -> None:
    write({"src/mine/train.py": code})
    init(tmp_path)
    assert f'driver = "{driver}"' in suite(tmp_path)
    assert f"strategies={strategies}" in suite(tmp_path)


def test_virtual_environments_and_invalid_files_do_not_select_the_driver(tmp_path: Path, write: Write) -> None:
    write({"env/pyvenv.cfg": "", "env/lib/x.py": "import transformers", ".tox/y.py": "import deepspeed"})
    write({"bad.py": "import accelerate as\n"})
    assert inspect_repository(tmp_path).imports == frozenset()


def test_a_subclass_of_trainer_gets_a_driver(tmp_path: Path, write: Write) -> None:
    own = "import transformers\n\nclass MyTrainer(transformers.Trainer):\n    pass\n"
    write(
        {
            "src/mine/__init__.py": "",
            "src/mine/training.py": own,
            "other/trainer.py": "class Fake(Trainer):\n    pass\n",
        }
    )
    assert inspect_repository(tmp_path).trainer == Class("mine.training", "MyTrainer", Path("src"))
    init(tmp_path)
    assert 'driver = "distcompat_driver:Driver"' in suite(tmp_path)
    text = (tmp_path / "tests" / "distcompat_driver.py").read_text(encoding="utf-8")
    assert "from mine.training import MyTrainer" in text
    done = collected(tmp_path)
    assert "test[ddp-fp32-w2:names]" in done.stdout, done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize(("package", "module"), [(True, "tests.my_driver"), (False, "my_driver")])
def test_an_existing_driver_is_used(tmp_path: Path, package: bool, module: str) -> None:
    (tmp_path / "tests").mkdir()
    if package:
        (tmp_path / "tests" / "__init__.py").touch()
    code = "from pytest_distcompat import Driver\n\nclass Mine(Driver):\n    name = 'mine'\n"
    (tmp_path / "tests" / "my_driver.py").write_text(code, encoding="utf-8")
    init(tmp_path)
    assert "pythonpath" not in (tmp_path / "pytest.ini").read_text(encoding="utf-8")
    assert f'driver = "{module}:Mine"' in suite(tmp_path)
    done = collected(tmp_path)
    assert "test[ddp-fp32-w2:names]" in done.stdout, done.stdout + done.stderr


MINE = "from pytest_distcompat import Driver\n\nclass Mine(Driver):\n    name = 'mine'\n"


@pytest.mark.parametrize(
    ("place", "pythonpath"),
    [
        pytest.param("my_driver.py", "pythonpath = .", marks=pytest.mark.nightly),
        ("src/mine/driver.py", "pythonpath = src"),
        pytest.param("my_driver.py", "", marks=pytest.mark.nightly),
    ],
)
def test_pytest_finds_the_driver(tmp_path: Path, write: Write, place: str, pythonpath: str) -> None:
    """By ``pytest``, which does not put the working directory on ``sys.path``; ``python -m pytest`` would."""
    write({place: MINE} if pythonpath else {place: MINE, "conftest.py": ""})
    if place.startswith("src"):
        write({"src/mine/__init__.py": ""})
    init(tmp_path)
    lines = (tmp_path / "pytest.ini").read_text(encoding="utf-8").splitlines()
    assert lines == ["[pytest]", ADDED, *([pythonpath] if pythonpath else [])]
    script = str(Path(sys.executable).with_name("pytest"))
    command = [script, "-p", "no:cacheprovider", "--collect-only", "-q", "--distcompat-gpus=0"]
    done = subprocess.run(
        [*command, "tests/test_distcompat.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "test[ddp-fp32-w2:names]" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("pytest.ini", "[pytest]\n", "add to [pytest] in pytest.ini: pythonpath = src"),
        (
            "pyproject.toml",
            "[tool.pytest.ini_options]\n",
            'add to [tool.pytest.ini_options] in pyproject.toml: pythonpath = "src"',
        ),
        ("pyproject.toml", "[tool.pytest]\n", 'add to [tool.pytest] in pyproject.toml: pythonpath = ["src"]'),
    ],
)
def test_the_pythonpath_line_fits_the_settings_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, text: str, message: str
) -> None:
    (tmp_path / "src" / "mine").mkdir(parents=True)
    for name, content in {"src/mine/driver.py": MINE, "src/mine/__init__.py": "", file: text}.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    init(tmp_path)
    assert message in capsys.readouterr().out.splitlines()


def test_a_pythonpath_without_the_driver_is_reported(
    tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write({"my_driver.py": MINE, "lib/x.py": "", "pytest.ini": "[pytest]\npythonpath = lib\n"})
    init(tmp_path)
    message = "add . to pythonpath in pytest.ini: the driver or its trainer is imported from there"
    assert message in capsys.readouterr().out.splitlines()


def test_a_driver_that_is_named_is_used(tmp_path: Path) -> None:
    init(tmp_path, "--driver", "accelerate")
    assert 'driver = "accelerate"' in suite(tmp_path)


def test_the_workflow_installs_what_the_repository_needs(tmp_path: Path, write: Write) -> None:
    write({".git/config": '[remote "origin"]\n\turl = git@github.com:me/mine.git\n'})
    write({"pyproject.toml": '[project]\nname = "x"\n', "train.py": "import accelerate, deepspeed\n"})
    init(tmp_path)
    text = (tmp_path / ".github" / "workflows" / "distcompat.yml").read_text(encoding="utf-8")
    assert "- run: pip install . 'pytest-distcompat[accelerate,deepspeed]'" in text
    assert "tests: tests/test_distcompat.py" in text
    assert "${{ github.event_name == 'pull_request' && 'smoke' || 'default' }}" in text


def test_a_directory_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "no_such_directory"]) == 2
    assert "no_such_directory: there is no such directory" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.spawn
def test_from_nothing_to_the_first_matrix(tmp_path: Path) -> None:
    """Two commands and no edit."""
    init(tmp_path)
    command = [
        str(Path(sys.executable).with_name("pytest")),
        "-p",
        "no:cacheprovider",
        "--distcompat-gpus=0",
        "tests/test_distcompat.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "TestDistcompat (driver torch)" in done.stdout
    rows = [line.split()[:2] for line in done.stdout.splitlines() if line.startswith("  ") and "-w2 " in line]
    assert ["ddp-fp32-w2", "ok"] in rows
    assert ["fsdp2-bf16_upcast-w2", "ok"] in rows


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("pyproject.toml", b"[tool.pytest\n", "pyproject.toml: Expected ']'"),
        ("pyproject.toml", b"[tool.x]\nname = 'J\xfcrgen'\n", "pyproject.toml: 'utf-8' codec can't decode"),
        ("tox.ini", b"no section\n", "tox.ini:1: unexpected line"),
        ("pytest.ini", b"[pytest]\ntestpaths = my 'tests\n", "pytest.ini: testpaths = my 'tests: No closing quotation"),
    ],
)
def test_settings_that_cannot_be_read_are_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: bytes, message: str
) -> None:
    """pytest refuses them too; nothing is written beside them."""
    (tmp_path / name).write_bytes(text)
    assert init(tmp_path) == 2
    assert f"distcompat: {tmp_path}/{message}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_key_of_another_table_is_not_pytests(tmp_path: Path, write: Write) -> None:
    write({"pyproject.toml": '[tool.other]\npythonpath = "lib"\n\n[tool.pytest.ini_options]\naddopts = "-ra"\n'})
    assert inspect_repository(tmp_path).settings.values == {"addopts": "-ra"}


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("pytest.ini", "pythonpath = 'my code'"),
        ("pyproject.toml", "pythonpath = \"'my code'\""),
        ("pytest.toml", 'pythonpath = ["my code"]'),
    ],
)
def test_directories_with_spaces(
    tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str], file: str, message: str
) -> None:
    """pytest splits such settings as a shell does."""
    own = "from transformers import Trainer as Base\n\nclass Mine(Base):\n    pass\n"
    listed = {"pytest.ini": "'my tests'", "pyproject.toml": "\"'my tests'\"", "pytest.toml": '["my tests"]'}[file]
    table = "tool.pytest.ini_options" if file == "pyproject.toml" else "pytest"
    write({file: f"[{table}]\ntestpaths = {listed}\n", "my code/mine.py": own, "my tests/conftest.py": ""})
    init(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert f"add to [{table}] in {file}: {message}" in lines
    assert lines[-1].endswith("pytest 'my tests/test_distcompat.py'")


def test_settings_above_are_not_hidden(tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """pytest reads those of a directory above; a new file would take their place."""
    write({"pytest.ini": "[pytest]\naddopts = -ra\n", "one/src/my_driver.py": MINE})
    init(tmp_path / "one")
    assert not (tmp_path / "one" / "pytest.ini").exists()
    printed = capsys.readouterr().out.splitlines()
    assert "add to [pytest] in ../pytest.ini: distcompat_profile = smoke" in printed
    assert "add to [pytest] in ../pytest.ini: pythonpath = one/src" in printed


def test_files_with_syntax_errors_are_ignored(tmp_path: Path, write: Write) -> None:
    """Emacs locks a file by a link to nothing beside it."""
    (tmp_path / ".#train.py").symlink_to("me@here.1234")
    (tmp_path / "data.py").mkdir()
    (tmp_path / "zero.py").write_bytes(b"import deepspeed\0\n")
    write({"train.py": "import accelerate\n"})
    assert init(tmp_path) == 0
    assert inspect_repository(tmp_path).imports == {"accelerate"}


def test_a_file_that_no_import_can_name(tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    write({"train-me.py": "import transformers\n\nclass Mine(transformers.Trainer):\n    pass\n"})
    init(tmp_path)
    assert "train-me.py: no import can name that file, so Mine has no driver" in capsys.readouterr().out.splitlines()
    assert 'driver = "trainer"' in suite(tmp_path)
    assert not (tmp_path / "tests" / "distcompat_driver.py").exists()


def test_which_trainer_is_one_of_transformers(tmp_path: Path, write: Write) -> None:
    """Lightning has a Trainer too; a class of the tests may be a stand-in."""
    write({"a.py": "import transformers\nfrom lightning import Trainer\n\nclass A(Trainer):\n    pass\n"})
    assert inspect_repository(tmp_path).trainer is None
    write({"tests/b.py": "import transformers as t\n\nclass B(t.Trainer):\n    pass\n"})
    assert inspect_repository(tmp_path).trainer == Class("b", "B", Path("tests"))
    write({"z.py": "from transformers.trainer import Trainer as Z\n\nclass C(Z):\n    pass\n"})
    assert inspect_repository(tmp_path).trainer == Class("z", "C")


@pytest.mark.parametrize(
    ("driver", "message"),
    [
        ("trainr", "no driver named 'trainr'. Known: torch, accelerate, deepspeed, trainer."),
        ("mine:", "--driver 'mine:' is not right: expected module:attribute"),
        (":Driver", "--driver ':Driver' is not right: expected module:attribute"),
        ("my/driver.py:Driver", "--driver 'my/driver.py:Driver' is not right: expected module:attribute"),
    ],
)
def test_a_driver_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], driver: str, message: str) -> None:
    assert init(tmp_path, "--driver", driver) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_driver_that_is_named_has_its_strategies_and_its_library(tmp_path: Path, write: Write) -> None:
    """All cells of DeepSpeed's driver under ddp and fsdp2 were skipped, and the run passed."""
    write({".github/x": "", "train.py": "import torch\n"})
    init(tmp_path, "--driver", "deepspeed")
    assert 'strategies=("zero1", "zero3")' in suite(tmp_path)
    text = (tmp_path / ".github" / "workflows" / "distcompat.yml").read_text(encoding="utf-8")
    assert "pip install 'pytest-distcompat[deepspeed]'" in text


def test_a_file_where_a_directory_is_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tests").touch()
    assert init(tmp_path) == 2
    assert f"distcompat: {tmp_path}/tests/test_distcompat.py: " in capsys.readouterr().err

"""Commands, options, settings and Python on the pages are valid."""

from __future__ import annotations

import argparse
import configparser
import inspect
import itertools
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.all_options import ALL_OPTIONS

import pytest_distcompat
from pytest_distcompat import scripts
from pytest_distcompat.cell import Cell
from pytest_distcompat.checks import CHECKS, Check
from pytest_distcompat.cli.main import parser
from pytest_distcompat.drivers import DRIVERS
from pytest_distcompat.ext.reuse.plugin import pytest_distcompat_mark_arguments
from pytest_distcompat.known import read_file
from pytest_distcompat.plugin.marked.declare import read_mark
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.report.document import Report
from pytest_distcompat.status import all_statuses
from pytest_distcompat.strategies import STRATEGIES
from pytest_distcompat.trace import RunTrace, Trace
from pytest_distcompat.world import World

ROOT = Path(__file__).parents[2]
REAL = ROOT / "tests" / "report" / "real.json"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of that language, those inside a list too."""
    fences = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(text) for language_of_fence, text in fences if language_of_fence == language]


def commands(page: Path, name: str) -> list[list[str]]:
    """Return the arguments of each call of a program in the page's console blocks."""
    arguments = []
    for block in blocks(page, "console"):
        for line in block.splitlines():
            if not line.startswith("$ "):
                continue
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words and words[0] == name:
                arguments.append(words[1:])
    return arguments


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_on_pages_are_valid(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for line in commands(page, "distcompat"):
        arguments = parser().parse_args(line)
        if line[0] not in {"diff", "merge", "report"}:
            continue
        outputs = [word for option, word in itertools.pairwise(line) if option == "-o"]
        for word in line[1:]:
            if word.endswith(".json") and word not in outputs:
                shutil.copy(REAL, tmp_path / word)
        assert arguments.call(arguments) == 0, line
        for name in outputs:
            assert (tmp_path / name).stat().st_size, name


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_options_and_settings_on_pages_exist(page: Path) -> None:
    flags = {option.flag for option in ALL_OPTIONS.values()}
    for line in [*commands(page, "pytest"), *commands(page, "python")]:
        for word in line:
            if word.startswith("--distcompat"):
                assert word.partition("=")[0] in flags, line
    for block in blocks(page, "ini"):
        settings = configparser.ConfigParser()
        settings.read_string(block)
        for section in settings.values():
            for key in section:
                assert key in ALL_OPTIONS or not key.startswith("distcompat")


def test_every_option_is_on_its_page() -> None:
    lines = (ROOT / "docs" / "options.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| `--distcompat")]
    row_by_flag = {row.split("`")[1]: row for row in rows}
    assert len(row_by_flag) == len(rows)
    assert set(row_by_flag) == {option.flag for option in ALL_OPTIONS.values()}
    for option in ALL_OPTIONS.values():
        default = row_by_flag[option.flag].split(" | ")[2]
        if option.default:
            assert default.strip("`") == option.default, option.flag
        else:
            assert default in {"all", "none", "no limit"}, option.flag
    for flag, registry in (("strategies", STRATEGIES), ("precisions", PRECISIONS), ("drivers", DRIVERS)):
        words = re.findall(r"\w+", row_by_flag[f"--distcompat-{flag}"])
        assert set(registry.names()) <= set(words), flag


class CheckedFixture:
    """Stand-in for the fixture ``distcompat``: it compares arguments with the real signatures and starts nothing."""

    @staticmethod
    def launch(*args: Any, **settings: Any) -> CheckedFixture:
        inspect.signature(scripts.launch).bind(*args, **settings)
        return CheckedFixture()

    @staticmethod
    def resume_roundtrip(*args: Any, **settings: Any) -> None:
        inspect.signature(scripts.resume_roundtrip).bind(*args, **settings)

    @staticmethod
    def parity(*args: Any, **settings: Any) -> None:
        inspect.signature(scripts.parity).bind(*args, **settings)

    def check(self, *names: str) -> None:
        assert set(names) <= {*CHECKS.names(), "final_model_loadable"}


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name_of)
def test_python_on_pages_runs(page: Path, tmp_path: Path) -> None:
    """Classes and tests are defined: a wrong argument of Matrix, fails, refuses or a mark would raise."""
    space: dict[str, Any] = {name: getattr(pytest_distcompat, name) for name in pytest_distcompat.__all__}
    space["pytest"] = pytest
    space["distcompat"] = CheckedFixture()
    for block in blocks(page, "python"):
        # Where marks stand below each other without a function, each gets one.
        text = re.sub(r"^(@pytest.mark.*)\n(?!def |class )", r"\1\ndef test_it(): ...\n", block, flags=re.MULTILINE)
        exec(compile(text, page.name, "exec"), space)
        for function in functions_of_page(space):
            for mark in getattr(function, "pytestmark", ()):
                read_mark(mark, pytest_distcompat_mark_arguments())
            if "distcompat" in inspect.signature(function).parameters:
                function(CheckedFixture(), tmp_path)


def functions_of_page(space: dict[str, Any]) -> list[Any]:
    """Return the functions in a namespace, without those that stand in this file."""
    functions = [value for value in space.values() if inspect.isfunction(value)]
    return [function for function in functions if function.__module__ != __name__]


def test_items_on_the_page_fit_the_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    space: dict[str, Any] = {}
    for block in blocks(ROOT / "docs" / "extend.md", "python"):
        exec(compile(block, "extend.md", "exec"), space)
    row = space["COMPRESSED"].dtypes(space["BF16_UPCAST"])
    assert row.storage == "float32"
    assert row.compute == "bfloat16"
    assert row.master == "float32"
    # No driver is to be touched for a strategy: torch's computes by autocast wherever the wrapper is DDP.
    monkeypatch.setitem(vars(STRATEGIES), "by_name", {**STRATEGIES.by_name, "ddp_compressed": space["COMPRESSED"]})
    torchs = DRIVERS.get("torch")(Cell("ddp_compressed", "bf16_upcast"), World(0, 2, 0, "cpu"))
    assert type(getattr(torchs, "_autocast")()).__name__ == "autocast"  # noqa: B009 - it is this driver's own
    assert isinstance(space["finite"], Check)
    assert space["finite"].findings(Cell("ddp", "fp32"), Trace("toy", {"train": RunTrace("train", 2, ())})) == []


def test_the_known_issues_of_the_page_are_valid(tmp_path: Path) -> None:
    own, shipped = blocks(ROOT / "docs" / "known.md", "toml")
    (tmp_path / "own.toml").write_text(own, encoding="utf-8")
    (tmp_path / "shipped.toml").write_text(shipped, encoding="utf-8")
    assert len(read_file(tmp_path / "own.toml")) == 2
    assert len(read_file(tmp_path / "shipped.toml")) == 1


def test_every_command_and_flag_is_on_a_page() -> None:
    pages = [ROOT / "docs" / "command.md", ROOT / "docs" / "reports.md"]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    # Flags that every command of their kind has.
    understood = {"-h", "--help", "-o", "--output", "--timeout"}
    actions = parser()._subparsers
    assert actions is not None
    (subparsers,) = (action for action in actions._actions if action.choices)
    choices: dict[str, Any] = dict(subparsers.choices or {})
    for name, choice in choices.items():
        assert f"`{name}`" in text or f"distcompat {name}" in text
        for action in choice._actions:
            if action.help == argparse.SUPPRESS:
                continue
            for flag in action.option_strings:
                assert flag in understood or flag in text, flag


def test_pages_give_the_action_inputs_that_it_has() -> None:
    inputs = yaml.safe_load((ROOT / ".github/actions/distcompat/action.yml").read_text(encoding="utf-8"))["inputs"]
    pages = map(yaml.safe_load, blocks(ROOT / "docs" / "gpu-ci.md", "yaml"))
    (job,) = [page["jobs"]["gpu"] for page in pages if "jobs" in page]
    step = job["steps"][-1]
    assert step["uses"].endswith(f"/.github/actions/distcompat@v{pytest_distcompat.__version__}")
    assert set(step["with"]) <= set(inputs)


def test_the_matrix_of_the_readme_is_consistent() -> None:
    """Its checks, cells and words exist: it was copied from a terminal, and says so."""
    (block,) = [block for block in blocks(ROOT / "README.md", "") if block.startswith("Test")]
    title, heads, *lines = block.splitlines()
    assert title == "TestAccelerate (driver accelerate)"
    assert set(heads.split()) <= set(CHECKS.names())
    rows = [line.split() for line in lines if re.match(r"  \w+-\w+-w\d ", line)]
    assert len(rows) == 7
    for cell, *words in rows:
        assert Cell.parse(cell).id == cell
        assert set(words) <= {status.word for status in all_statuses()}
    verdicts = next(line for line in lines if "runs" in line)
    counts = next(line for line in lines if "selected" in line)
    assert verdicts.split()[0] == counts.split()[0]


@pytest.mark.nightly
@pytest.mark.spawn
def test_the_parallel_plan_of_the_page_is_sound_and_its_red_example_red(tmp_path: Path) -> None:
    driver, suite = blocks(ROOT / "docs" / "parallel.md", "python")
    (finding,) = blocks(ROOT / "docs" / "parallel.md", "text")
    wrong = driver.replace("self.cell.dp_rank(self.world.rank)", "self.world.rank")
    for name, text in (("parallel_driver", driver), ("test_plan", suite), ("wrong_driver", wrong)):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    (tmp_path / "test_wrong.py").write_text(suite.replace("parallel_driver", "wrong_driver"), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--distcompat-gpus=0"]
    sound = subprocess.run(
        [*command, "test_plan.py", "--distcompat-report=r.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert sound.returncode == 0, sound.stdout
    # What the page draws is as much as each rank has.
    (row,) = Report.read(tmp_path / "r.json").rows
    assert row.mesh is not None
    parts = {name: layout["parts"][0] for layout in row.mesh["layouts"] for name in layout["names"]}
    assert parts == {"0.weight": "0:4, :", "0.bias": "0:4", "2.weight": "0:4, 0:8", "2.bias": "0:4"}
    assert {name["unwrapped"]: name["local"] for name in row.names} == {
        "0.weight": 32,
        "0.bias": 4,
        "2.weight": 32,
        "2.bias": 4,
    }
    red = subprocess.run(
        [*command, "test_wrong.py", "-k", "data"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (red.returncode, finding.strip() in red.stdout) == (1, True), red.stdout


@pytest.mark.nightly
def test_commands_of_cases_select_every_named_cell() -> None:
    """A cell of ``-k "a or b"`` that selects nothing is found."""
    for line in commands(ROOT / "docs" / "cases.md", "pytest"):
        expression = line[line.index("-k") + 1]
        named = re.findall(r"(?:ddp|fsdp\d|zero\d)-[\w-]+:?", expression)
        if named and "--pyargs" in line:
            command = [sys.executable, "-m", "pytest", *line, "--collect-only", "-q", "-p", "no:cacheprovider"]
            done = subprocess.run(
                [*command, "--distcompat-gpus=0"], cwd=ROOT, capture_output=True, text=True, check=False
            )
            for cell in named:
                assert f"[{cell}" in done.stdout, f"{expression}: nothing is {cell}\n{done.stdout[-500:]}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_link_includes_punctuation(page: Path) -> None:
    assert re.findall(r"<https?://[^>]*[.,:;]>", page.read_text(encoding="utf-8")) == []


def test_links_between_pages_exist() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{name_of(page)}: {link}"

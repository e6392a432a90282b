"""The site is built without a warning, and what its pages say of the code, of runs and of figures is so."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import pytest_distcompat
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.driver import REQUIRED_METHODS
from pytest_distcompat.ext.upstream.models import UNSUPPORTED, architecture, architectures, of_tasks
from pytest_distcompat.ext.upstream.models._architectures import UNKNOWN
from pytest_distcompat.known import shipped
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.report.document import Report
from pytest_distcompat.status import all_statuses

from .failing import EXAMPLES
from .generated import BUILT, MADE, blocks, made

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REPOSITORY = "https://github.com/pytest-distcompat/pytest-distcompat"


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def rows(text: str) -> list[list[str]]:
    """Return the columns of each row of all tables."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [columns(line) for line in lines]


def columns(row: str) -> list[str]:
    return [column.strip() for column in row.strip("|").split(" | ")]


def names(paths: Iterable[Path]) -> list[str]:
    return [path.name for path in paths]


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    env = {**os.environ, "NO_COLOR": "1", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    for source in DOCS.rglob("*.md"):
        name = source.relative_to(DOCS).with_suffix("").as_posix()
        directory = tmp_path / "site"
        if name != "index":
            directory /= name
        text = (directory / "index.html").read_text(encoding="utf-8")
        assert "<!-- on the site" not in text, f"{name}: a list is missing"
        assert "```" not in text, f"{name}: a block that mkdocs does not take for one"
        # A page loads nothing from elsewhere, and links out of docs/ lead to files that exist there.
        assert not re.findall(r'<(?:script|img)[^>]+src="(?:https?:)?//[^"]+', text)
        for target in re.findall(rf'href="{REPOSITORY}/tree/main/([^"#]+)', text):
            assert (ROOT / target).is_dir(), target
        for target in re.findall(rf'href="{REPOSITORY}/blob/main/([^"#]+)', text):
            assert (ROOT / target).is_file(), target


@pytest.mark.nightly
def test_a_dead_link_fails_the_build(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    without_cache = shutil.ignore_patterns("__pycache__")
    shutil.copytree(DOCS / "hooks", tmp_path / "docs" / "hooks", ignore=without_cache)
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    settings = re.sub(r"^nav:.*", "", settings, flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "mkdocs.yml").write_text(settings, encoding="utf-8")
    (tmp_path / "there").mkdir()

    def build(text: str) -> str:
        (tmp_path / "docs" / "index.md").write_text(text, encoding="utf-8")
        line = [sys.executable, "-m", "mkdocs", "build", "--strict"]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
        return f"{done.returncode} {done.stderr}"

    assert build("[there](../there)").startswith("0 ")
    html = (tmp_path / "build" / "site" / "index.html").read_text(encoding="utf-8")
    assert f'href="{REPOSITORY}/tree/main/there"' in html
    output = build("[gone](../gone)")
    assert output.startswith("1 ")
    assert "'../gone'" in output


def test_generated_blocks_are_up_to_date() -> None:
    text_by_name: dict[str, str] = {}
    for path in DOCS.glob("*.md"):
        text_by_name.update(blocks(path.read_text(encoding="utf-8")))
    assert set(text_by_name) == set(MADE)
    for name, text in text_by_name.items():
        assert text == made(name), f"{name}: run python -m tests.cli.generated"


def test_the_python_api_is_readable_without_a_build() -> None:
    text = page("api")
    assert ":::" not in text
    headings = set()
    for line in text.splitlines():
        if line.startswith("### "):
            headings.add(line.rpartition(".")[2])
    # The registry of checks is for those who add one: docs/extend.md.
    assert headings >= set(pytest_distcompat.__all__) - {"CHECKS"}
    assert headings >= {"launch", "resume_roundtrip", "ScriptRun", "RoundTrip"}
    for method in (*REQUIRED_METHODS, "loss", "make_optimizer", "reference", "export", "rows"):
        assert f"- `{method}(" in text
    assert "- `save_at`: The step after which the checkpoint is written." in text
    assert "- Raises `Incompatible`: With the differences." in text
    # What other pages lead to.
    assert "## Driver" in text.splitlines()
    assert "## Scripts" in text.splitlines()


def test_each_list_of_the_site_has_its_place() -> None:
    lists = []
    for path in DOCS.glob("*.md"):
        lists += re.findall(r"<!-- on the site: (\w+) -->", page(path.stem))
    assert sorted(lists) == sorted(BUILT)


def test_the_list_of_upstream_bugs_has_every_script_and_thread() -> None:
    text = BUILT["upstream"]()
    listed = re.findall(r"\(upstream/(\w+\.py)\)", text)
    scripts = (DOCS / "upstream").glob("*.py")
    assert set(listed) == set(names(scripts))
    broken = [issue.link for issue in shipped() if "refuse" not in issue.kind]
    for link in broken:
        if re.search(r"/(issues|pull)/\d+$", link):
            assert link in text


def test_each_architecture_left_blank_has_its_reason_there() -> None:
    _, _, *body = rows(BUILT["left_blank"]())
    reason_by_model = {}
    for models, reason in body:
        for model in models.split(","):
            reason_by_model[model.strip("` ")] = reason
    assert reason_by_model == {f"hf:{name}": reason for name, reason in UNSUPPORTED.items()}
    for name, reason in reason_by_model.items():
        # A newer transformers may have it.
        assert architecture(name).unsupported_reason in {reason, UNKNOWN}


def test_each_task_has_its_class_or_its_reason_there() -> None:
    _, _, *body = rows(BUILT["tasks"]())
    class_or_reason = {}
    classes = {}
    for row in body:
        task, text = (column.strip("`") for column in row)
        class_or_reason[task] = text
        classes[task] = ""
        if text.startswith("hf:"):
            assert text in architectures()
            classes[task] = text.removeprefix("hf:")
    assert classes == of_tasks()
    assert class_or_reason["image_segmentation"] == "it needs timm"


@pytest.mark.parametrize("name", CHECKS.names())
def test_each_check_says_its_claim_its_causes_and_has_a_failure_to_show(name: str) -> None:
    example = EXAMPLES[name]
    assert example.story(example.cell).findings(name)
    claim, causes, _ = CHECKS.get(name).text.partition("If it fails: ")
    assert claim.strip()
    assert causes


def test_lines_of_the_examples_are_counted_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    newcomer = importlib.import_module("newcomer")
    row_by_example = {}
    for row in rows(page("adopt")):
        name = re.match(r"\[(\w+)\]", row[0])
        if name and row[-1].endswith(" s"):
            row_by_example[name[1]] = row
    drivers = sorted((ROOT / "examples").glob("*/*_driver.py"))
    examples = [path.parent.name for path in drivers]
    assert sorted(row_by_example) == examples
    for path in drivers:
        _, *counts, _ = row_by_example[path.parent.name]
        expected = map(str, newcomer.weigh(path))
        assert counts == list(expected)


def test_commands_that_time_the_examples_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    newcomer = importlib.import_module("newcomer")
    commands: list[list[str]] = []

    def run(command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("subprocess.run", run)
    newcomer.examples(tmp_path)
    drivers = list((ROOT / "examples").glob("*/*_driver.py"))
    assert len(commands) == len(drivers)
    for program, *_ in commands:
        assert Path(program).exists()


def test_pictures_are_small_and_each_is_shown() -> None:
    pictures = sorted((DOCS / "images").glob("*.png"))
    shown = re.findall(r"\(images/([\w-]+\.png)\)", page("reports") + page("parallel"))
    assert sorted(shown) == names(pictures)
    for path in pictures:
        assert path.stat().st_size < 200_000


def test_every_word_of_the_matrix_is_explained() -> None:
    words = {row[0].strip("`") for row in rows(page("reports"))}
    for status in all_statuses():
        assert status.word in words


def test_tolerances_are_those_of_the_precisions() -> None:
    _, _, section = page("checks").partition("## Tolerances")
    precision_rows = [row for row in rows(section) if row[0].startswith("`")]
    listed = set()
    for code, loss, norm in precision_rows:
        name = code.strip("`")
        listed.add(name)
        precision = PRECISIONS.get(name)
        assert allowed(loss) == precision.loss_tolerance, name
        assert allowed(norm) == precision.norm_tolerance, name
    assert listed == set(PRECISIONS.names())


def allowed(text: str) -> float:
    """Return the second number of "seen, allowed"."""
    _, number, *_ = re.findall(r"[\d.]+e-\d+", text)
    return float(number)


def test_the_recorded_run_is_that_of_the_sample() -> None:
    """The matrix of the page, cell by cell, against the report of the same suite."""
    text = page("first-run")
    report = Report.read(ROOT / "tests" / "report" / "real.json")
    word_by_verdict = {(result.cell, result.check): result.status.word for result in report.results}
    checks = ["active", "names", "optimizer", "dtypes"]
    lines = text.splitlines()
    words_by_line = [line.split() for line in lines]
    assert checks in words_by_line
    cells = set()
    counts: Counter[str] = Counter()
    for line in lines:
        if not re.match(r"  \w+-\w+-w\d  ", line):
            continue
        cell, *words = line.split()
        cells.add(cell)
        counts.update(words)
        # A cell that is not run has one word.
        for check, word in zip(checks, words, strict=False):
            assert word == word_by_verdict[cell, check], cell
        assert len(words) <= len(checks)
    assert cells == {result.cell for result in report.results}
    assert set(counts) == {"ok", "known", "FAIL", "CRASH", "HUNG", "refused", "-"}
    assert f"{counts.total()} selected, " in text
    passed = f"{counts['ok']} passed, {counts['refused']} refused"
    failed = f"{counts['known']} known, {counts['FAIL']} failed"
    assert f"{passed}, {failed}" in text


def test_the_summary_of_other_harnesses_counts_its_table() -> None:
    summary, details = page("comparison").split("## Twelve faults")
    (_, *harnesses), _, *faults = rows(details)
    _, _, *ways = rows(summary)
    assert len(ways) == len(harnesses)
    for column, (way, *_, right, cause) in enumerate(ways, 1):
        verdicts = [row[column] for row in faults]
        right_verdicts = [verdict for verdict in verdicts if "✓" in verdict]
        causes_shown = [verdict for verdict in verdicts if "✓✓" in verdict]
        assert right == f"{len(right_verdicts)} of {len(faults)}", way
        assert cause == f"{len(causes_shown)} of {len(faults)}", way

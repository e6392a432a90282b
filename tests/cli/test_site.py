"""The site is built without a warning, and what its pages say of the code, of runs and of figures is so."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import pytest_distcompat
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.driver import REQUIRED_METHODS
from pytest_distcompat.ext.upstream.models import BLANK, architecture, architectures, of_tasks
from pytest_distcompat.ext.upstream.models._architectures import UNKNOWN
from pytest_distcompat.known import shipped
from pytest_distcompat.precisions import PRECISIONS
from pytest_distcompat.report.document import Report
from pytest_distcompat.status import all_statuses

from .failing import EXAMPLES
from .generated import BUILT, MADE, blocks, made

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def rows(text: str) -> list[list[str]]:
    """Return the columns of each row of all tables."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [columns(line) for line in lines]


def columns(row: str) -> list[str]:
    return [column.strip() for column in row.strip("|").split(" | ")]


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        line,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_COLOR": "1", "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    for source in DOCS.rglob("*.md"):
        name = source.relative_to(DOCS).with_suffix("").as_posix()
        built = tmp_path / "site" / ("index.html" if name == "index" else f"{name}/index.html")
        text = built.read_text(encoding="utf-8")
        assert "<!-- on the site" not in text, f"{name}: a list is missing"
        assert "```" not in text, f"{name}: a block that mkdocs does not take for one"
        # A page loads nothing from elsewhere, and links out of docs/ lead to files that exist there.
        assert not re.findall(r'<(?:script|img)[^>]+src="(?:https?:)?//[^"]+', text)
        for kind, target in re.findall(
            r'href="https://github.com/pytest-distcompat/pytest-distcompat/(blob|tree)/main/([^"#]+)', text
        ):
            assert (ROOT / target).is_dir() if kind == "tree" else (ROOT / target).is_file(), target


@pytest.mark.nightly
def test_a_dead_link_fails_the_build(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    shutil.copytree(DOCS / "hooks", tmp_path / "docs" / "hooks", ignore=shutil.ignore_patterns("__pycache__"))
    settings = re.sub(r"^nav:.*", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "mkdocs.yml").write_text(settings, encoding="utf-8")
    (tmp_path / "there").mkdir()

    def build(text: str) -> str:
        (tmp_path / "docs" / "index.md").write_text(text, encoding="utf-8")
        line = [sys.executable, "-m", "mkdocs", "build", "--strict"]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
        return f"{done.returncode} {done.stderr}"

    assert build("[there](../there)").startswith("0 ")
    html = (tmp_path / "build" / "site" / "index.html").read_text(encoding="utf-8")
    assert 'href="https://github.com/pytest-distcompat/pytest-distcompat/tree/main/there"' in html
    output = build("[gone](../gone)")
    assert output.startswith("1 ")
    assert "'../gone'" in output


def test_generated_blocks_are_up_to_date() -> None:
    text_by_name = {name: text for path in DOCS.glob("*.md") for name, text in blocks(path.read_text(encoding="utf-8"))}
    assert set(text_by_name) == set(MADE)
    for name, text in text_by_name.items():
        assert text == made(name), f"{name}: run python -m tests.cli.generated"


def test_the_python_api_is_readable_without_a_build() -> None:
    text = page("api")
    assert ":::" not in text
    headings = {line.rpartition(".")[2] for line in text.splitlines() if line.startswith("### ")}
    # The registry of checks is for those who add one: docs/extend.md.
    assert headings >= {*pytest_distcompat.__all__} - {"CHECKS"}
    assert headings >= {"launch", "resume_roundtrip", "ScriptRun", "RoundTrip"}
    for method in (*REQUIRED_METHODS, "loss", "make_optimizer", "reference", "export", "rows"):
        assert f"- `{method}(" in text
    assert "- `save_at`: The step after which the checkpoint is written." in text
    assert "- Raises `Incompatible`: With the differences." in text
    # What other pages lead to.
    assert {"## Driver", "## Scripts"} <= {*text.splitlines()}


def test_each_list_of_the_site_has_its_place() -> None:
    names = [name for path in DOCS.glob("*.md") for name in re.findall(r"<!-- on the site: (\w+) -->", page(path.stem))]
    assert sorted(names) == sorted(BUILT)


def test_the_list_of_upstream_bugs_has_every_script_and_thread() -> None:
    text = BUILT["upstream"]()
    assert set(re.findall(r"\(upstream/(\w+\.py)\)", text)) == {path.name for path in (DOCS / "upstream").glob("*.py")}
    broken = [issue.link for issue in shipped() if "refuse" not in issue.kind]
    for link in broken:
        if re.search(r"/(issues|pull)/\d+$", link):
            assert link in text


def test_each_architecture_left_blank_has_its_reason_there() -> None:
    cells = {name.strip("` "): reason for names, reason in rows(BUILT["left_blank"]())[2:] for name in names.split(",")}
    assert cells == {f"hf:{name}": reason for name, reason in BLANK.items()}
    for name, reason in cells.items():
        # A newer transformers may have it.
        assert architecture(name).unsupported_reason in {reason, UNKNOWN}


def test_each_task_has_its_class_or_its_reason_there() -> None:
    _, _, *body = rows(BUILT["tasks"]())
    class_or_reason = {task.strip("`"): text.strip("`") for task, text in body}
    classes = {}
    for task, text in class_or_reason.items():
        is_class = text.startswith("hf:")
        assert not is_class or text in architectures()
        classes[task] = text.removeprefix("hf:") if is_class else ""
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
    assert sorted(row_by_example) == [path.parent.name for path in drivers]
    for path in drivers:
        _, *counts, _ = row_by_example[path.parent.name]
        assert list(map(int, counts)) == list(newcomer.weigh(path))


def test_commands_that_time_the_examples_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    newcomer = importlib.import_module("newcomer")
    commands: list[list[str]] = []

    def run(command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("subprocess.run", run)
    newcomer.examples(tmp_path)
    assert len(commands) == len(list((ROOT / "examples").glob("*/*_driver.py")))
    assert all(Path(command[0]).exists() for command in commands)


def test_pictures_are_small_and_each_is_shown() -> None:
    pictures = sorted((DOCS / "images").glob("*.png"))
    shown = re.findall(r"\(images/([\w-]+\.png)\)", page("reports") + page("parallel"))
    assert sorted(shown) == [path.name for path in pictures]
    for path in pictures:
        assert path.stat().st_size < 200_000


def test_every_word_of_the_matrix_is_explained() -> None:
    words = {row[0].strip("`") for row in rows(page("reports"))}
    assert words >= {status.word for status in all_statuses()}


def test_tolerances_are_those_of_the_precisions() -> None:
    _, _, section = page("checks").partition("## Tolerances")
    precision_rows = [row for row in rows(section) if row[0].startswith("`")]
    assert {row[0].strip("`") for row in precision_rows} == set(PRECISIONS.names())
    for name, loss, norm in precision_rows:
        precision = PRECISIONS.get(name.strip("`"))
        assert allowed(loss) == precision.loss_tolerance, name
        assert allowed(norm) == precision.norm_tolerance, name


def allowed(text: str) -> float:
    """Return the second number of "seen, allowed"."""
    _, number, *_ = re.findall(r"[\d.]+e-\d+", text)
    return float(number)


def test_the_recorded_run_is_that_of_the_sample() -> None:
    """The matrix of the page, cell by cell, against the report of the same suite."""
    text = page("first-run")
    real = {
        (result.cell, result.check): result.status.word
        for result in Report.read(ROOT / "tests" / "report" / "real.json").results
    }
    checks = ["active", "names", "optimizer", "dtypes"]
    lines = text.splitlines()
    assert checks in [line.split() for line in lines]
    table = [line.split() for line in lines if re.match(r"  \w+-\w+-w\d  ", line)]
    assert {cell for cell, *_ in table} == {cell for cell, _ in real}
    counts: Counter[str] = Counter()
    for cell, *words in table:
        # A cell that is not run has one word.
        assert words == [real[cell, check] for check in checks[: len(words)]], cell
        counts.update(words)
    assert set(counts) == {"ok", "known", "FAIL", "CRASH", "HUNG", "refused", "-"}
    assert f"{counts.total()} selected, " in text
    summary = f"{counts['ok']} passed, {counts['refused']} refused, {counts['known']} known, {counts['FAIL']} failed"
    assert summary in text


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

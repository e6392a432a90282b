"""How many random changes of a library's executed code would the built-in suite see?

``python benchmarks/random_changes.py --reach default.sqlite --kept DIRECTORY --count 8 accelerate peft``: of each library that
many lines which some cell executes are drawn, and each is changed by itself in a copy of the package: a call or an assignment is
left out, a condition is negated, a number, an operator, a comparison or a truth value is another one. What ``except`` does and
what ``with`` opens stays as it is. The cells that execute the line run as after ``distcompat releases --changed``,
``--cells-per-place`` of them. A change is seen if a verdict is red. With ``--sound report.json`` it is told besides whether
trainings compute or save something else than in that report, as ``distcompat diff`` tells it. Those that are not seen are
printed: some compute the same, and some are what no check asks for.

Map and report are of the default profile: ``pytest --pyargs pytest_distcompat.suite -n 2 --distcompat-reach default.sqlite
--distcompat-report report.json``. What has been run is kept in the directory, so that a study which was interrupted goes on.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import difflib
import importlib.util
import io
import json
import random
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# A script imports from its own directory.
from changed_suite import run_suite  # type: ignore[import-not-found]
from machine import PACKAGES, expect, measured_on  # type: ignore[import-not-found]

from pytest_distcompat.ext.reach.branches import numbers_of
from pytest_distcompat.ext.reach.libraries import FileId
from pytest_distcompat.ext.reach.map import ReachMap
from pytest_distcompat.ext.reach.store import read_map
from pytest_distcompat.ext.upstream.changed import (
    SELECTING_PLUGIN,
    SELECTION,
    read_change,
    select_cells,
)
from pytest_distcompat.report.document import Report
from pytest_distcompat.report.values import value_changes

#: Operators, and what takes their place.
OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.And: "or",
    ast.Or: "and",
}
#: Calls that only tell a human something.
TALK = ("logger", "logging", "warnings", "log_dist", "print", "print_rank_0", "deprecate")


@dataclass(frozen=True)
class Edit:
    """One change of a file's text.

    Attributes:
        kind: What is changed: ``condition``.
        line: The first line of the statement.
        begin: The place in the text where the changed part begins.
        end: Where it ends.
        text: What takes its place.
    """

    kind: str
    line: int
    begin: int
    end: int
    text: str


class Source:
    """The text of a file, in which the syntax tree's positions can be found."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)
        self._line_begins = [0]
        for line in self.text.splitlines(keepends=True):
            self._line_begins.append(self._line_begins[-1] + len(line))

    def begin(self, node: ast.expr | ast.stmt) -> int:
        """Return where a node begins in the text."""
        return self._place(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt) -> int:
        """Return where a node ends in the text."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._place(node.end_lineno, node.end_col_offset)

    def part(self, node: ast.expr | ast.stmt) -> str:
        """Return a node's text."""
        return ast.get_source_segment(self.text, node) or ""

    def _place(self, line: int, column: int) -> int:
        """Return the place of a line and column; Python counts columns in bytes."""
        begin = self._line_begins[line - 1]
        before = self.text[begin:].encode()[:column]
        return begin + len(before.decode())

    def edits(self) -> Iterator[Edit]:
        """Yield all changes of statements in functions."""
        for function in ast.walk(self.tree):
            if isinstance(function, ast.FunctionDef):
                for statement in function.body:
                    yield from self._edits_below(statement)

    def _edits_below(self, statement: ast.stmt) -> Iterator[Edit]:
        """Yield the changes of a statement and of those inside it."""
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Raise):
            # Functions are found by themselves; what an error says is no computation.
            return
        if self._is_talk(statement):
            return
        left_out = isinstance(statement, ast.AugAssign) or (
            isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
        )
        if isinstance(statement, ast.Assign):
            # A local variable that is left out is an error in the next line.
            left_out = not isinstance(statement.targets[0], ast.Name | ast.Tuple)
        if left_out:
            yield self._edit("statement left out", statement, statement, "pass")
        for child in ast.iter_child_nodes(statement):
            if isinstance(child, ast.stmt):
                yield from self._edits_below(child)
            elif isinstance(child, ast.expr):
                yield from self._edits_in(statement, child)
        if isinstance(statement, ast.If | ast.While):
            condition = f"not ({self.part(statement.test)})"
            yield self._edit("condition negated", statement, statement.test, condition)

    def _edits_in(self, statement: ast.stmt, expression: ast.expr) -> Iterator[Edit]:
        """Yield the changes of an expression and of those inside it."""
        for node in ast.walk(expression):
            if isinstance(node, ast.Constant):
                if isinstance(node.value, bool):
                    yield self._edit("truth value", statement, node, str(not node.value))
                elif isinstance(node.value, int | float):
                    yield self._edit("number", statement, node, f"{node.value + 1}")
            elif isinstance(node, ast.BinOp):
                yield from self._other_operator(statement, node.left, node.right, node.op)
            elif isinstance(node, ast.Compare):
                yield from self._other_operator(
                    statement, node.left, node.comparators[0], node.ops[0]
                )
            elif isinstance(node, ast.BoolOp):
                yield from self._other_operator(statement, node.values[0], node.values[1], node.op)
            elif isinstance(node, ast.Call) and node.keywords and node.keywords[-1].arg is not None:
                yield from self._argument_left_out(statement, node)

    def _other_operator(
        self, statement: ast.stmt, left: ast.expr, right: ast.expr, operator: ast.AST
    ) -> Iterator[Edit]:
        """Yield the change of what stands between two expressions."""
        other = OPERATORS.get(type(operator))
        between = self.text[self.end(left) : self.begin(right)]
        # With a bracket or a comment between them the operator is not all.
        if other is None or any(character in between for character in "()#"):
            return
        yield Edit("operator", statement.lineno, self.end(left), self.begin(right), f" {other} ")

    def _argument_left_out(self, statement: ast.stmt, call: ast.Call) -> Iterator[Edit]:
        """Yield the change that leaves out the last argument of a call, one with a name."""
        keyword = call.keywords[-1]
        name = f"{keyword.arg}="
        begin = self.text.rfind(name, self.begin(call), self.begin(keyword.value))
        if begin < 0:
            return
        end = self.end(keyword.value)
        yield Edit("argument left out", statement.lineno, begin, end, text="")

    def _edit(
        self, kind: str, statement: ast.stmt, changed: ast.expr | ast.stmt, text: str
    ) -> Edit:
        """Return the change of a node of a statement."""
        return Edit(kind, statement.lineno, self.begin(changed), self.end(changed), text)

    def _is_talk(self, statement: ast.stmt) -> bool:
        """Tell whether a statement only tells a human something."""
        return isinstance(statement, ast.Expr) and self.part(statement).startswith(TALK)

    def changed(self, edit: Edit) -> str:
        """Return the text with the change."""
        return self.text[: edit.begin] + edit.text + self.text[edit.end :]


@dataclass(frozen=True)
class Change:
    """One change of a file of a library."""

    file: FileId
    source: Source
    edit: Edit

    @property
    def name(self) -> str:
        """A name for files: ``accelerate-data_loader-364-120``."""
        stem = self.file.path.replace("/", ".").removesuffix(".py")
        return f"{self.file.library}-{stem}-{self.edit.line}-{self.edit.begin}"

    @property
    def is_valid(self) -> bool:
        """Tell whether Python can still read the file."""
        try:
            ast.parse(self.source.changed(self.edit))
        except SyntaxError:
            return False
        return True

    def diff(self) -> str:
        """Return the change as a unified diff."""
        path = f"{self.file.library}/{self.file.path}"
        lines = difflib.unified_diff(
            self.source.text.splitlines(keepends=True),
            self.source.changed(self.edit).splitlines(keepends=True),
            f"a/{path}",
            f"b/{path}",
        )
        return "".join(lines)


def executed_changes(reach_map: ReachMap, library: str) -> list[Change]:
    """Return all changes of statements that some cell executes inside a function."""
    spec = importlib.util.find_spec(library)
    assert spec is not None
    assert spec.submodule_search_locations
    directory = Path(spec.submodule_search_locations[0])
    changes = []
    for file_reach in reach_map.coverage_of_library(library):
        file = file_reach.file.id
        executed = set(numbers_of(file_reach.union.lines))
        if not executed:
            continue
        source = Source(directory / file.path)
        for edit in source.edits():
            if edit.line in executed:
                changes.append(Change(file, source, edit))
    return changes


def drawn(changes: Sequence[Change], count: int, seed: int) -> list[Change]:
    """Return some of the changes, as many of each kind."""
    by_kind: dict[str, list[Change]] = defaultdict(list)
    for change in changes:
        by_kind[change.edit.kind].append(change)
    generator = random.Random(f"{seed}")
    for of_kind in by_kind.values():
        generator.shuffle(of_kind)
    chosen: list[Change] = []
    while len(chosen) < count and any(by_kind.values()):
        for kind in sorted(by_kind):
            if not by_kind[kind] or len(chosen) == count:
                continue
            change = by_kind[kind].pop()
            if change.is_valid:
                chosen.append(change)
    return chosen


@dataclass(frozen=True)
class Answer:
    """What the cells say of a change.

    Attributes:
        verdict: ``seen``, ``other values``, ``not seen``, or why there is no answer.
        finding: The first red verdict's message, or what else is computed.
    """

    verdict: str
    finding: str = ""


def answer_to(change: Change, options: argparse.Namespace) -> Answer:
    """Return what the cells say of a change: what is kept, or after running them."""
    kept: Path = options.kept / f"{change.name}.json"
    if kept.is_file():
        return Answer(**json.loads(kept.read_text(encoding="utf-8")))
    diff = options.kept / f"{change.name}.diff"
    diff.write_text(change.diff(), encoding="utf-8")
    selection = options.kept / f"{change.name}.cells"
    patched = read_change(f"{change.file.library}@{diff}", options.kept)
    # It prints the places that no cell executes.
    with contextlib.redirect_stdout(io.StringIO()):
        has_cells = select_cells(
            patched, options.reach, selection, cells_per_place=str(options.cells_per_place)
        )
    answer = Answer("no cell")
    if has_cells:
        report = options.kept / f"{change.name}.report.json"
        answer = run_cells(patched.target, selection, report, options.sound)
    shutil.rmtree(patched.target)
    kept.write_text(json.dumps(dataclasses.asdict(answer)), encoding="utf-8")
    return answer


def run_cells(changed: Path, selection: Path, report: Path, sound: Report | None) -> Answer:
    """Run the selected cells with the changed package until a verdict is red.

    Args:
        changed: A directory with the changed package.
        selection: The file that selects the cells.
        report: The file for the session's report.
        sound: The report of the unchanged package, with which values are compared.
    """
    status = run_suite(changed, report, "-x", "-p", SELECTING_PLUGIN, f"{SELECTION}={selection}")
    if not report.is_file():
        # The library cannot be imported any more: the user would see it at once.
        return Answer("no report", f"pytest ended with {status}")
    session = Report.read(report)
    for result in session.results:
        if result.red:
            return Answer("seen", f"{result.nodeid}: {result.message}")
    if sound is not None:
        for difference in value_changes(sound, session):
            return Answer("other values", f"{difference.cell}: {difference.what}")
    return Answer("not seen", f"{len(session.results)} verdicts")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("libraries", nargs="+", metavar="LIBRARY")
    parser.add_argument("--reach", type=Path, action="append", required=True, metavar="FILE")
    parser.add_argument("--sound", type=Path, metavar="REPORT")
    parser.add_argument("--kept", type=Path, required=True, metavar="DIRECTORY")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cells-per-place", type=int, default=2)
    options = parser.parse_args()
    options.kept = options.kept.resolve()
    if options.sound is not None:
        options.sound = Report.read(options.sound)
    options.kept.mkdir(parents=True, exist_ok=True)
    reach_map = read_map(options.reach[0])
    for path in options.reach[1:]:
        reach_map.merge(read_map(path))
    expect(parser, options.libraries, reach_map.libraries())
    print(f"{measured_on(*PACKAGES)}; {options.cells_per_place} cells for each change\n")
    unseen: list[Change] = []
    for library in options.libraries:
        changes = executed_changes(reach_map, library)
        verdicts: Counter[str] = Counter()
        for change in drawn(changes, options.count, options.seed):
            answer = answer_to(change, options)
            verdicts[answer.verdict] += 1
            print(f"{answer.verdict}: {change.name}, {change.edit.kind}", flush=True)
            if answer.verdict == "other values":
                print(f"  {answer.finding}", flush=True)
            if answer.verdict == "not seen":
                unseen.append(change)
        counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
        print(f"{library}: of {len(changes)} possible changes: {counts}\n", flush=True)
    for change in unseen:
        print(f"{change.edit.kind}\n{change.diff()}")


if __name__ == "__main__":
    main()

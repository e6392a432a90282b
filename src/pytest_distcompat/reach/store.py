"""The file of a map: SQLite, with everything that is needed to show it where the libraries are not installed."""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.reach.branches import Branch, Executed, Function, Rank, SourceFile
from pytest_distcompat.reach.libraries import FileId
from pytest_distcompat.reach.map import Context, ReachMap

#: The version of the tables; a file of another one is not read.
FORMAT = 1
_TABLES = """
create table version (name text primary key, version text);
-- Lines are bits by number here and below.
create table file (id integer primary key, library text, path text, statements blob);
create table function (file integer, name text, first integer, body blob, public integer);
create table branch (
    file integer, number integer, function text, line integer, target integer,
    text text, target_text text, rank integer
);
create table context (id integer primary key, driver text, cell text, action text);
-- Many cells have the same. Branches are bits by their number in the file.
create table executed (id integer primary key, lines blob, branches blob);
create table reached (file integer, context integer, executed integer);
"""


def write_map(path: Path, found: ReachMap) -> None:
    """Write a map to a file, in place of what is there. Raises OSError."""
    # SQLite would write to the old file, which may be of another program.
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.absolute().parent) as directory:
        partial = Path(directory) / path.name
        with contextlib.closing(sqlite3.connect(partial)) as database, database:
            database.executescript(_TABLES)
            _write(database, found)
        partial.replace(path)


def _write(database: sqlite3.Connection, found: ReachMap) -> None:
    database.execute(f"pragma user_version = {FORMAT}")
    database.executemany("insert into version values (?, ?)", found.versions.items())
    file_numbers = {file_id: number for number, file_id in enumerate(found.files)}
    for file_id, number in file_numbers.items():
        file = found.files[file_id]
        database.execute(
            "insert into file values (?, ?, ?, ?)", (number, file_id.library, file_id.path, _blob(file.statements))
        )
        database.executemany(
            "insert into function values (?, ?, ?, ?, ?)",
            [(number, one.name, one.first, _blob(one.body), one.public) for one in file.functions],
        )
        database.executemany(
            "insert into branch values (?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (number, n, one.function, one.line, one.target, one.text, one.target_text, int(one.rank))
                for n, one in enumerate(file.branches)
            ],
        )
    context_numbers = {context: number for number, context in enumerate(found.contexts())}
    for context, number in context_numbers.items():
        database.execute(
            "insert into context values (?, ?, ?, ?)", (number, context.driver, context.cell, context.action)
        )
    executed_numbers: dict[Executed, int] = {}
    for file_id, by_context in found.executed.items():
        for context, executed in by_context.items():
            number = executed_numbers.setdefault(executed, len(executed_numbers))
            database.execute(
                "insert into reached values (?, ?, ?)", (file_numbers[file_id], context_numbers[context], number)
            )
    database.executemany(
        "insert into executed values (?, ?, ?)",
        [(number, _blob(one.lines), _blob(one.branches)) for one, number in executed_numbers.items()],
    )


def read_map(path: Path) -> ReachMap:
    """Return the map in a file.

    Raises:
        UsageProblem: There is none, or not of this format; the message names the file.
    """
    if not path.is_file():
        raise UsageProblem(f"{path}: there is no such file; expected one that --distcompat-reach wrote")
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            ((version,),) = database.execute("pragma user_version")
            if version != FORMAT:
                raise UsageProblem(f"{path}: expected a map of format {FORMAT}, found {version}")
            return _read(database)
    except sqlite3.Error as error:
        raise UsageProblem(f"{path}: no map of --distcompat-reach: {error}") from None


def _read(database: sqlite3.Connection) -> ReachMap:
    found = ReachMap(dict(database.execute("select name, version from version")))
    file_ids: dict[int, FileId] = {}
    statements: dict[int, int] = {}
    for number, library, name, lines in database.execute("select id, library, path, statements from file order by id"):
        file_ids[number] = FileId(library, name)
        statements[number] = _bits(lines)
    functions: dict[int, list[Function]] = {number: [] for number in file_ids}
    for number, function in _functions(database):
        functions[number].append(function)
    branches: dict[int, list[Branch]] = {number: [] for number in file_ids}
    for number, branch in _branches(database):
        branches[number].append(branch)
    for number, file_id in file_ids.items():
        found.files[file_id] = SourceFile(
            file_id, tuple(functions[number]), tuple(branches[number]), statements[number]
        )
    contexts = {
        number: Context(*texts) for number, *texts in database.execute("select id, driver, cell, action from context")
    }
    executed = {
        number: Executed(_bits(lines), _bits(taken))
        for number, lines, taken in database.execute("select id, lines, branches from executed")
    }
    for file, context, number in database.execute("select file, context, executed from reached"):
        found.executed.setdefault(file_ids[file], {})[contexts[context]] = executed[number]
    return found


def _functions(database: sqlite3.Connection) -> Iterator[tuple[int, Function]]:
    """Yield the number of a file and one of its functions."""
    for file, name, first, body, public in database.execute(
        "select file, name, first, body, public from function order by rowid"
    ):
        yield file, Function(name, first, _bits(body), bool(public))


def _branches(database: sqlite3.Connection) -> Iterator[tuple[int, Branch]]:
    """Yield the number of a file and one of its branches, in the order of their numbers."""
    columns = "file, function, line, target, text, target_text, rank"
    rows = database.execute(f"select {columns} from branch order by file, number")  # noqa: S608 - all of it is above
    for file, function, line, target, text, target_text, rank in rows:
        yield file, Branch(function, line, target, text, target_text, Rank(rank))


def _blob(bits: int) -> bytes:
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def _bits(blob: bytes) -> int:
    return int.from_bytes(blob, "little")

"""The file of a map, which is an SQLite database: writing and reading.

A *map* (``map.ReachMap``) says which functions and branches of the installed libraries each *cell*
(test configuration of a driver, the trainer) executes, in which *action*, such as ``step``.
``write_map`` is called at the end of a pytest session (``session_map``) and by ``distcompat reach
-o``, ``read_map`` by ``distcompat reach``. The file has everything that is needed to show the map
where the libraries are not installed, source lines included.
"""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pytest_distcompat.ext.reach.branches import Branch, Executed, Function, Rank, SourceFile
from pytest_distcompat.ext.reach.libraries import FileId
from pytest_distcompat.ext.reach.map import Context, ReachMap
from pytest_distcompat.failures import UsageProblem
from pytest_distcompat.grouping import grouped

#: The version of the tables; a file of another one is not read.
FORMAT = 1
#: The tables. ``reached`` says that a context executed, of a file, what a row of ``executed`` has.
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


def write_map(path: Path, reach_map: ReachMap) -> None:
    """Write a map to a file, in place of what is there.

    Raises:
        OSError: The file cannot be written.
    """
    # Into a new file, which then takes the place of the old one: that may be a file of another
    # program, which SQLite would open and write to.
    with tempfile.TemporaryDirectory(
        prefix=f".{path.name}-", dir=path.absolute().parent
    ) as directory:
        partial = Path(directory) / path.name
        with contextlib.closing(sqlite3.connect(partial)) as database, database:
            database.executescript(_TABLES)
            _write(database, reach_map)
        partial.replace(path)


def _write(database: sqlite3.Connection, reach_map: ReachMap) -> None:
    """Write a map into empty tables."""
    # SQLite keeps this number in the head of the file.
    database.execute(f"pragma user_version = {FORMAT}")
    database.executemany("insert into version values (?, ?)", reach_map.versions.items())
    for number, file in enumerate(reach_map.files.values()):
        _write_file(database, number, file)
    _write_executed(database, reach_map)


def _write_file(database: sqlite3.Connection, file_number: int, file: SourceFile) -> None:
    """Write a file with its functions and branches."""
    file_row = (file_number, file.id.library, file.id.path, _blob(file.statements))
    database.execute("insert into file values (?, ?, ?, ?)", file_row)
    for function in file.functions:
        function_row = (
            file_number,
            function.name,
            function.first,
            _blob(function.body),
            function.public,
        )
        database.execute("insert into function values (?, ?, ?, ?, ?)", function_row)
    for number, branch in enumerate(file.branches):
        branch_row = (
            file_number,
            number,
            branch.function,
            branch.line,
            branch.target,
            branch.text,
            branch.target_text,
            int(branch.rank),
        )
        database.execute("insert into branch values (?, ?, ?, ?, ?, ?, ?, ?)", branch_row)


def _write_executed(database: sqlite3.Connection, reach_map: ReachMap) -> None:
    """Write the contexts, and what each executed of each file.

    Equal lines and branches are one row of ``executed``.
    """
    file_numbers = {file_id: number for number, file_id in enumerate(reach_map.files)}
    context_numbers: dict[Context, int] = {}
    for number, context in enumerate(reach_map.contexts()):
        context_numbers[context] = number
        context_row = (number, context.driver, context.cell, context.action)
        database.execute("insert into context values (?, ?, ?, ?)", context_row)
    #: Each different value, with the number of its row.
    executed_numbers: dict[Executed, int] = {}
    for file_id, by_context in reach_map.executed.items():
        for context, executed in by_context.items():
            # The number of an equal value, or the next one.
            executed_number = executed_numbers.setdefault(executed, len(executed_numbers))
            reached_row = (file_numbers[file_id], context_numbers[context], executed_number)
            database.execute("insert into reached values (?, ?, ?)", reached_row)
    for executed, number in executed_numbers.items():
        executed_row = (number, _blob(executed.lines), _blob(executed.branches))
        database.execute("insert into executed values (?, ?, ?)", executed_row)


def read_map(path: Path) -> ReachMap:
    """Return the map in a file.

    Raises:
        UsageProblem: There is none, or not of this format; the message names the file.
    """
    if not path.is_file():
        raise UsageProblem(
            f"{path}: there is no such file; expected one that --distcompat-reach wrote"
        )
    read_only = f"{path.absolute().as_uri()}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(read_only, uri=True)) as database:
            ((version,),) = database.execute("pragma user_version")
            if version != FORMAT:
                raise UsageProblem(f"{path}: expected a map of format {FORMAT}, found {version}")
            return _read(database)
    except sqlite3.Error as error:
        raise UsageProblem(f"{path}: no map of --distcompat-reach: {error}") from None


def _read(database: sqlite3.Connection) -> ReachMap:
    """Return the map in the tables."""
    reach_map = ReachMap(dict(database.execute("select name, version from version")))
    functions = grouped(_functions(database))
    branches = grouped(_branches(database))
    file_ids: dict[int, FileId] = {}
    file_rows = database.execute("select id, library, path, statements from file order by id")
    for number, library, path, statements in file_rows:
        file_id = FileId(library, path)
        file_ids[number] = file_id
        reach_map.files[file_id] = SourceFile(
            id=file_id,
            functions=tuple(functions.get(number, ())),
            branches=tuple(branches.get(number, ())),
            statements=_bits(statements),
        )
    contexts: dict[int, Context] = {}
    context_rows = database.execute("select id, driver, cell, action from context")
    for number, driver, cell, action in context_rows:
        contexts[number] = Context(driver, cell, action)
    executed: dict[int, Executed] = {}
    executed_rows = database.execute("select id, lines, branches from executed")
    for number, lines, taken_branches in executed_rows:
        executed[number] = Executed(_bits(lines), _bits(taken_branches))
    reached_rows = database.execute("select file, context, executed from reached")
    for file_number, context_number, executed_number in reached_rows:
        by_context = reach_map.executed.setdefault(file_ids[file_number], {})
        by_context[contexts[context_number]] = executed[executed_number]
    return reach_map


def _functions(database: sqlite3.Connection) -> Iterator[tuple[int, Function]]:
    """Yield the number of a file and one of its functions, in the order of the file."""
    rows = database.execute("select file, name, first, body, public from function order by rowid")
    for file_number, name, first, body, public in rows:
        yield file_number, Function(name, first, _bits(body), bool(public))


def _branches(database: sqlite3.Connection) -> Iterator[tuple[int, Branch]]:
    """Yield the number of a file and one of its branches, in the order of their numbers."""
    rows = database.execute(
        "select file, function, line, target, text, target_text, rank from branch "
        "order by file, number"
    )
    for file_number, function, line, target, text, target_text, rank in rows:
        yield file_number, Branch(function, line, target, text, target_text, Rank(rank))


def _blob(bits: int) -> bytes:
    """Return bits as bytes, the lowest first: an integer of SQLite has 64 bits at most."""
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def _bits(blob: bytes) -> int:
    """Return the bits that ``_blob`` wrote."""
    return int.from_bytes(blob, "little")

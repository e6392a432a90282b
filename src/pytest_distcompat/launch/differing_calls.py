"""Tables of C functions whose result or effect differs from one process to another.

Ranks are forked from a process that has imported the user's modules. A module that calls such a
function at its import, as ``time.time()`` or ``os.getpid()``, would give all forked ranks the same
result, while ranks of torchrun, which import the module themselves, have different ones.
``at_import.Watch`` looks up each C function that such a module calls in ``FINDING_BY_FUNCTION``.
"""

from __future__ import annotations

import time

MAKES_RANDOM = "makes something random"
READS_CLOCK = "reads the clock"
_ASKS_FOR_PID = "asks for the number of its process"
_OPENS_DATABASE = "opens a database"
_SETS_THREADS = "sets how many threads torch uses"
#: Functions of ``time`` that do not read the clock; ``asctime`` does only without an argument.
_WITHOUT_CLOCK = frozenset({"sleep", "mktime", "strptime", "asctime", "get_clock_info", "tzset"})
#: Functions of ``os`` that change files or processes.
_CHANGING = (
    "mkdir",
    "rmdir",
    "unlink",
    "remove",
    "rename",
    "replace",
    "link",
    "symlink",
    "truncate",
    "mkfifo",
    "mknod",
    "fork",
    "forkpty",
    "posix_spawn",
    "posix_spawnp",
    "system",
    "kill",
    "killpg",
)
#: By module and name of a C function, the finding about a module that calls it at its import. Each
#: sentence follows the name of the module: "train.py:3 reads the clock at import".
FINDING_BY_FUNCTION: dict[tuple[str, str], str] = {
    ("posix", "times"): READS_CLOCK,
    ("_uuid", "generate_time_safe"): READS_CLOCK,
    ("posix", "getpid"): _ASKS_FOR_PID,
    ("posix", "getppid"): _ASKS_FOR_PID,
    ("_thread", "get_native_id"): _ASKS_FOR_PID,
    ("posix", "urandom"): MAKES_RANDOM,
    ("posix", "getrandom"): MAKES_RANDOM,
    ("_ssl", "RAND_bytes"): MAKES_RANDOM,
    ("_ssl", "RAND_pseudo_bytes"): MAKES_RANDOM,
    ("_posixsubprocess", "fork_exec"): "starts a process",
    ("sqlite3", "connect"): _OPENS_DATABASE,
    ("_sqlite3", "connect"): _OPENS_DATABASE,
    ("torch", "set_num_threads"): _SETS_THREADS,
}
# ``dir`` has constants too, such as ``CLOCK_REALTIME``, which are never looked up.
for _name in dir(time):
    if _name not in _WITHOUT_CLOCK:
        FINDING_BY_FUNCTION["time", _name] = READS_CLOCK
for _name in _CHANGING:
    FINDING_BY_FUNCTION["posix", _name] = f"calls os.{_name}"
#: Findings that matter only where ranks have another value of an environment variable than the
#: process that imported the module: a rank then sets the number of threads by its own value, right
#: after the fork, and would undo what the module had set.
VARIABLE_BY_FINDING = {_SETS_THREADS: "OMP_NUM_THREADS"}
#: Methods of ``datetime.date`` and ``datetime.datetime`` that read the clock.
CLOCK_METHODS = frozenset({"now", "utcnow", "today"})

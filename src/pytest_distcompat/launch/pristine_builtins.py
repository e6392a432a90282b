"""Functions that a rank reports with, bound before any test runs: a test's patches are still there when it reports.

These functions look up nothing that tests replace. ``json.dumps`` would, which is why it is not used here.
"""

from __future__ import annotations

import json
import os
from traceback import format_exception, format_exception_only

#: Convert plain data to a line of JSON, and back.
encode = json.JSONEncoder().encode
decode = json.JSONDecoder().decode

open_file = open
open_descriptor = os.open
write_to = os.write
close_descriptor = os.close
status_of = os.fstat

own_pid = os.getpid
exit_now = os._exit

__all__ = [
    "close_descriptor",
    "decode",
    "encode",
    "exit_now",
    "format_exception",
    "format_exception_only",
    "open_descriptor",
    "open_file",
    "own_pid",
    "status_of",
    "write_to",
]

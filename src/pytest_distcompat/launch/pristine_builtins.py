"""What a rank reports with, bound before any test runs: patches of a test are still there when its phase is reported.

Functions that look nothing else up which tests replace: ``json.dumps`` would do for the first, if it were not for those.
"""

from __future__ import annotations

import json
import os
from traceback import format_exception, format_exception_only

#: Plain data as a line of JSON, and back.
encode = json.JSONEncoder().encode
decode = json.JSONDecoder().decode

open_file = open
open_descriptor = os.open
write_to = os.write
close_descriptor = os.close

own_pid = os.getpid
leave = os._exit

__all__ = [
    "close_descriptor",
    "decode",
    "encode",
    "format_exception",
    "format_exception_only",
    "leave",
    "open_descriptor",
    "open_file",
    "own_pid",
    "write_to",
]

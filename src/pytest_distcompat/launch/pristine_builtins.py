"""Functions that a rank reports with, bound before any test runs.

A test may replace ``open`` or ``os.write``, by ``monkeypatch`` say, and fail: its patches are still
there when the rank logs the failure. So ``rank``, ``rank_log`` and others use the functions of this
module. They look up nothing that tests replace. ``json.dumps`` would look up names in the module
``json``, so it is not used.
"""

from __future__ import annotations

import json
import os
import traceback

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
format_exception = traceback.format_exception
format_exception_only = traceback.format_exception_only

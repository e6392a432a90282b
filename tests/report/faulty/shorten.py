"""Makes tests/report/real.json of a report of this suite: shorter, and without the paths of the machine it was made on.

In this directory: ``pytest -c /dev/null --rootdir . faulty_suite.py --distcompat-gpus 0 --distcompat-timeout 20 --distcompat-report /tmp/faulty.json``, then
``python shorten.py /tmp/faulty.json ../real.json``.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from pytest_distcompat.excerpt import excerpt
from pytest_distcompat.report.document import Report
from pytest_distcompat.report.write import write_report

#: What the directories of a machine are called here.
PATHS = (
    # One in which a long text was cut.
    (r"/[\w./+-]*(?=\\n\.\.\. \d+ characters cut)", "/"),
    (r"/[\w./+-]*/site-packages/", "/site-packages/"),
    (r"/[\w./+-]*/lib/python3\.\d+/", "/python/"),
    (r"/[\w./+-]*/src/pytest_distcompat/", "/src/pytest_distcompat/"),
    (r"/[\w./+-]*/tests/report/faulty/", "/faulty/"),
    (r"/[\w./+-]*/distcompat/runs/", "/tmp/distcompat/runs/"),
)
NAMES = 5
TEXT = 900


def shorten(text: str) -> str:
    """The report as one with short tables and texts."""
    for pattern, name in PATHS:
        text = re.sub(pattern, name, text)
    report = Report.from_json(json.loads(text))
    report.session["settings"]["report"]["value"] = "faulty.json"
    for row in report.rows:
        row.names = [*row.names[:NAMES], *(name for name in row.names[NAMES:] if "key" in name)][: 2 * NAMES]
    for run in report.runs:
        for rank in run["ranks"]:
            rank |= {part: excerpt(rank[part], TEXT) for part in ("text", "stack", "output")}
    results = [type(result)(**{**vars(result), "message": excerpt(result.message, TEXT)}) for result in report.results]
    return Report(report.session, results, report.rows, report.runs, report.unreached).to_text()


if __name__ == "__main__":
    write_report(
        Path(sys.argv[2]), Report.from_json(json.loads(shorten(Path(sys.argv[1]).read_text(encoding="utf-8"))))
    )

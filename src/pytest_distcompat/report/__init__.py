"""Reports of verdicts: terminal, JSON, Markdown, HTML. Uses only strings and plain data."""

from pytest_distcompat.installed import versions
from pytest_distcompat.report.causes import Cause, causes, rank_of_cause
from pytest_distcompat.report.compare import compare
from pytest_distcompat.report.document import Report, counts, facets
from pytest_distcompat.report.html import trend_html
from pytest_distcompat.report.merge import merge
from pytest_distcompat.report.result import Row
from pytest_distcompat.report.telemetry import send, with_device_seconds
from pytest_distcompat.report.text import Line, causes_text, counts_text, matrix_text, plain_text, runs_text
from pytest_distcompat.report.trend import History, Trend, trend
from pytest_distcompat.report.write import FORMATS, append_summary, replace_file, write_report

__all__ = [
    "FORMATS",
    "Cause",
    "History",
    "Line",
    "Report",
    "Row",
    "Trend",
    "append_summary",
    "causes",
    "causes_text",
    "compare",
    "counts",
    "counts_text",
    "facets",
    "matrix_text",
    "merge",
    "plain_text",
    "rank_of_cause",
    "replace_file",
    "runs_text",
    "send",
    "trend",
    "trend_html",
    "versions",
    "with_device_seconds",
    "write_report",
]

"""Verdicts as a matrix: text for the terminal, JSON and Markdown for files. Knows only strings."""

from pytest_distcompat.report.result import WORDS, Result, Row
from pytest_distcompat.report.text import matrix_text
from pytest_distcompat.report.write import FORMATS, write_report

__all__ = ["FORMATS", "WORDS", "Result", "Row", "matrix_text", "write_report"]

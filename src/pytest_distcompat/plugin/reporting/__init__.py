"""Verdicts for the user: terminal section, progress line, report files, commands that run a test again."""

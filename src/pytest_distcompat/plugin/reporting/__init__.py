"""Verdicts for the user.

They are shown in a section of the terminal and a progress line, and written to report files. Each
has the command that runs its test again.
"""

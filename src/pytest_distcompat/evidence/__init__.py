"""Evidence from the recorded runs of a session, as plain data for the reports.

A report shows verdicts, and beside them what the runs recorded. ``store`` reads the runs of a
session and adds them to the report. For each cell ``cells`` makes the evidence of its training,
with ``meshes`` and ``values``. ``progress`` says which runs are in progress.
"""

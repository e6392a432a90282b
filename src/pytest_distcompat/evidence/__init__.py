"""Evidence from the runs in a session's store, as plain data for the reports."""

from pytest_distcompat.evidence.cells import add_training
from pytest_distcompat.evidence.running import Running, running
from pytest_distcompat.evidence.store import StoredRun, add_evidence, read_store

__all__ = ["Running", "StoredRun", "add_evidence", "add_training", "read_store", "running"]

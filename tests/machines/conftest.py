"""Networks of namespaces, for nodes on this machine."""

from tests.machines.network import network
from tests.nodes.conftest import environment, run_pytest

__all__ = ["environment", "network", "run_pytest"]

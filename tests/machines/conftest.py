"""Networks of namespaces, for nodes on this machine."""

from tests.machines.network import network
from tests.nodes.conftest import environment

__all__ = ["environment", "network"]

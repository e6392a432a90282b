"""Values that a user gives: numbers of ranks, and addresses.

They come from options (``--distcompat-listen host:29400``), marks, matrices and commands. A wrong
one raises ``UsageProblem``, whose message the user sees without a traceback.
"""

from __future__ import annotations

import re

from pytest_distcompat.failures import UsageProblem

#: The largest number of ranks, machines or GPUs that is taken for meant: no launch of torchrun has
#: had more.
LARGEST_COUNT = 1_000_000
#: The largest number of a TCP port.
LARGEST_PORT = 65_535
#: A host without colons, or an IPv6 address in brackets, and perhaps a port (RFC 3986, section
#: 3.2).
_ADDRESS = re.compile(
    r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|(?P<host>[^\s:\[\]]+))(?::(?P<port>[0-9]{1,5}))?"
)


def check_count(name: str, value: object) -> None:
    """Raise UsageProblem unless the value is a number of ranks or machines.

    ``name`` says in the message what the value is for: ``world_size``.
    """
    # ``True`` is an int too, by ``isinstance``.
    if type(value) is not int or not 1 <= value <= LARGEST_COUNT:
        raise UsageProblem(
            f"{name} is {value!r}; expected a whole number from 1 to {LARGEST_COUNT}"
        )


def write_address(host: str, port: int) -> str:
    """Return an address as ``read_address`` reads it, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def read_address(text: str) -> tuple[str, int | None]:
    """Return the host and the port of an address: of ``[::1]:29400`` ("::1", 29400).

    The port is None if the address does not say it.

    Raises:
        UsageProblem: It has another form, or the port is not between 1 and 65535.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise UsageProblem(
            f"{text!r} is not right: expected HOST or HOST:PORT, with an IPv6 address in brackets"
        )
    host = match["ipv6"] or match["host"]
    if match["port"] is None:
        return host, None
    port = int(match["port"])
    if not 1 <= port <= LARGEST_PORT:
        raise UsageProblem(f"{text!r} is not right: expected a port from 1 to {LARGEST_PORT}")
    return host, port

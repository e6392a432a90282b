"""The loopback interface, on which the ranks of one machine meet.

Launchers call ``problem`` before a run: without a loopback interface, ranks would try to connect
for minutes. ``agent`` calls ``listen`` for a socket on a free port, for the store by which ranks
find each other; so does ``ext/cluster`` on the interface of its choice.
"""

from __future__ import annotations

import contextlib
import socket

#: The name, as torchrun has it, and not 127.0.0.1. torch looks up the name of each address that
#: connects, and that of 127.0.0.1 as ``::ffff:127.0.0.1``. No /etc/hosts has that one, so a slow
#: name server would cost each run seconds.
HOST = "localhost"

#: The base class of ``socket.socket``. pytest's process calls ``problem``, and plugins such as
#: pytest-socket replace ``socket.socket`` there to forbid connections. ``listen`` is called in
#: processes without plugins.
_Socket = socket.SocketType
#: ``getaddrinfo`` as it was at import, whatever replaces it later.
_resolve = socket.getaddrinfo


def problem() -> str:
    """Return why ranks cannot meet at localhost; empty if they can. Sends nothing."""
    try:
        addresses = _addresses()
    except OSError as error:
        return (
            f"{HOST} does not resolve ({error.strerror}): ranks cannot meet there; "
            f"add '127.0.0.1 {HOST}' to /etc/hosts"
        )
    for family, address in addresses:
        # For a datagram socket ``connect`` only looks up the route, which is the same for any port;
        # nothing is sent. If it raises, the next address is tried.
        with (
            contextlib.suppress(OSError),
            contextlib.closing(_Socket(family, socket.SOCK_DGRAM)) as probe,
        ):
            probe.connect((address, 9))
            return ""
    return f"no loopback interface: ranks cannot meet at {HOST}; `ip link set lo up`"


def listen(host: str = HOST, port: int = 0) -> socket.socket:
    """Listen on one interface, by default where only this machine can connect.

    For port 0 the kernel chooses one.

    Raises:
        OSError: No such interface, or the port is not free.
    """
    for family, address in _addresses(host):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            if port:
                # It may have been used a moment ago. Without a port the kernel chooses a fresh one.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen()
        except OSError:
            # IPv6 may be turned off, and still be in /etc/hosts: try the next address.
            listener.close()
            continue
        return listener
    if port or host != HOST:
        raise OSError(f"port {port} of {host} is not free, or {host} is no address of this machine")
    raise OSError(problem() or f"no port of {HOST} is free")


def _addresses(host: str = HOST) -> list[tuple[int, str]]:
    """Return families and addresses of a host: ``[(AF_INET6, "::1"), (AF_INET, "127.0.0.1")]``.

    IPv6 comes first, as when torch connects.
    """
    addresses = set()
    for family, _, _, _, address in _resolve(host, 0, type=socket.SOCK_STREAM):
        addresses.add((family, str(address[0])))
    # False sorts before True.
    return sorted(addresses, key=lambda address: address[0] != socket.AF_INET6)

"""Ports that no other process is given between the moment when a test picks them and the start of its server."""

from __future__ import annotations

import socket
from contextlib import ExitStack

_held: list[socket.socket] = []


def free_port(count: int = 1) -> int:
    """Return the first of ``count`` consecutive ports of 127.0.0.1 that stay this process's own until it ends.

    Each is bound, but not listened to: a connection is refused until a server listens there, which it can because it
    sets ``SO_REUSEADDR`` as every server does. The system gives a bound port to nobody who asks for any.
    """
    while True:
        with ExitStack() as stack:
            try:
                sockets = [stack.enter_context(_bound(0))]
                first = int(sockets[0].getsockname()[1])
                sockets += [stack.enter_context(_bound(first + more)) for more in range(1, count)]
            except (OSError, OverflowError):  # a neighbour is taken, or beyond the last port
                continue
            stack.pop_all()
        _held.extend(sockets)
        return first


def _bound(port: int) -> socket.socket:
    """A socket at a port that nobody holds; it is closed again if there is none.

    Only afterwards may the port be used again, or two who hold ports could have the same one.
    """
    found = socket.socket()
    try:
        found.bind(("127.0.0.1", port))
    except (OSError, OverflowError):
        found.close()
        raise
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return found

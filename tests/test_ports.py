"""The ports that tests give to their servers."""

from __future__ import annotations

import socket

import pytest
from tests.ports import free_port


def test_a_held_port_is_refused_to_clients_until_a_server_listens_there_and_again_after_it():
    port = free_port()
    for _ in range(2):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)):
            socket.create_connection(("127.0.0.1", port)).close()


def test_ports_in_a_row_are_all_held():
    first = free_port(4)
    for port in range(first, first + 4):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))  # as whoever does not say that a port may be used again


def test_the_system_gives_a_held_port_to_nobody_else():
    first, given = free_port(4), set()
    for _ in range(20_000):
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", 0))
            given.add(other.getsockname()[1])
    assert not given & set(range(first, first + 4))

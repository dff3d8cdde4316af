"""Ports that no one else is given before their user takes them."""

import itertools
import socket
from pathlib import Path

import pytest

from fivefold.testing import _ranks, free_port


def test_ports_are_bindable_distinct_and_not_the_kernels():
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(10_000 <= port < first for port in ports)
    with socket.socket() as server:
        server.bind(("127.0.0.1", ports[0]))


def test_a_port_in_use_is_passed_over_and_none_left_is_an_error(monkeypatch):
    start = free_port()
    with socket.socket() as server:
        server.bind(("127.0.0.1", start))
        server.listen()
        monkeypatch.setattr(_ranks, "_LOWEST", start)
        monkeypatch.setattr(_ranks, "_end", lambda: start + 2)
        assert {free_port(), free_port()} == {start + 1}
        monkeypatch.setattr(_ranks, "_end", lambda: start + 1)
        with pytest.raises(OSError, match="are in use"):
            free_port()


def test_neighbours_in_process_numbers_begin_far_apart(monkeypatch):
    ports = []
    for number in range(4000, 4008):
        monkeypatch.setattr(_ranks.os, "getpid", lambda number=number: number)
        ports.append(free_port())
    ports.sort()
    assert min(b - a for a, b in itertools.pairwise(ports)) > 500

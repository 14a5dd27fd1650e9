"""Ports are free, on the loopback address, and out of the way of outgoing connections."""

from __future__ import annotations

import socket

import pytest

from infra import ports


@pytest.fixture
def listener() -> socket.socket:
    server = socket.create_server((ports.HOST, ports.pick()))
    with server:
        yield server


def test_a_picked_port_can_be_listened_on_and_lies_below_the_ephemeral_range() -> None:
    for _ in range(20):
        port = ports.pick()
        assert ports.LOWEST <= port <= ports.HIGHEST < 32768
        socket.create_server((ports.HOST, port)).close()


def test_a_port_in_use_is_not_free_and_answers(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    assert not ports.free(port)
    assert ports.answers(port)
    listener.close()
    assert ports.free(port)
    assert not ports.answers(port)


def test_a_companion_port_is_free_and_in_range_too(listener: socket.socket) -> None:
    for _ in range(20):
        port = ports.pick(companion=10_000)
        assert port + 10_000 <= ports.HIGHEST
        assert ports.free(port + 10_000)


def test_taken_ports_are_avoided_until_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "LOWEST", 21_000)
    monkeypatch.setattr(ports, "HIGHEST", 21_003)
    monkeypatch.setattr(ports, "free", lambda port: port != 21_001)
    assert ports.pick({21_000, 21_002}) == 21_003
    with pytest.raises(OSError, match="no free port"):
        ports.pick({21_000, 21_002, 21_003})

"""What a run on Trinity stands on."""

from __future__ import annotations

import socket

import pytest
import ray

from agentscope_tuner.backends.trinity.cluster import running_ray


def test_a_ray_of_our_own_has_no_dashboard() -> None:
    with running_ray("local", "a-namespace") as address:
        assert ray.is_initialized()
        assert address
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", 8265), timeout=5)
    assert not ray.is_initialized()

import socket

import pytest

from tests.servers import Servers


@pytest.fixture(scope="session")
def servers_with_training_objects():
    train = {
        f"train/{name}": name.encode() for name in ("b.jpg", "a.jpg", "c.png", "d.txt")
    }
    with Servers(
        {**train, "train/empty.bin": b"", "trainer/x.jpg": b"not under train/"}
    ) as servers:
        yield servers


@pytest.fixture
def server(servers_with_training_objects, request):
    """A server with five training objects, one of them empty, and one object beside them."""
    with servers_with_training_objects.one(request) as server:
        yield server


@pytest.fixture
def as_rank(monkeypatch):
    """`as_rank(rank, world_size)` sets the environment as a launcher does."""

    def become(rank, world_size):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))

    return become


@pytest.fixture
def pair():
    """The two ends of a connection."""
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def silent():
    """A listening socket that never responds, and its endpoint."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening, f"http://127.0.0.1:{listening.getsockname()[1]}"

import pytest

from object_server import ObjectServer


@pytest.fixture(scope="module")
def object_server():
    """A server with a dozen objects that no test changes."""
    with ObjectServer({f"train/{i:02}.bin": bytes([i]) * 100 * i for i in range(12)}) as server:
        yield server

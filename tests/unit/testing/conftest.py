import pytest

from headrace.testing import ObjectServer


@pytest.fixture
def server():
    """A server with a hundred small objects and one with an awkward name, for one test to do as it likes with."""
    objects = {f"many/{i:03}.bin": f"body {i}".encode() for i in range(100)}
    with ObjectServer({**objects, "one & two/ü+%.txt": b"awkward"}) as server:
        yield server

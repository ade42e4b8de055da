import pytest

from tests.servers import Servers


@pytest.fixture(scope="module")
def servers(request):
    """Servers with the OBJECTS of the module."""
    with Servers(request.module.OBJECTS) as servers:
        yield servers


@pytest.fixture
def server(servers, request):
    with servers.one(request) as server:
        if request.node.get_closest_marker("counts"):
            server.misbehave()  # remembers requests from here on
        yield server

import pytest

from tests.servers import Servers


@pytest.fixture(scope="module")
def servers(request, servers_with_training_objects):
    """Servers with the OBJECTS of the module, if it has some."""
    if not hasattr(request.module, "OBJECTS"):
        yield servers_with_training_objects
        return
    with Servers(request.module.OBJECTS) as servers:
        yield servers


@pytest.fixture
def server(servers, request):
    with servers.one(request) as server:
        if request.node.get_closest_marker("counts"):
            server.misbehave()  # remembers requests from here on
        yield server

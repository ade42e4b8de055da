import contextlib

import pytest

from tests.servers import Servers, WatchedServer


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


@pytest.fixture
def serve():
    """`serve(objects)` starts a server that remembers requests. The server ends with the test."""
    with contextlib.ExitStack() as servers:

        def start(objects):
            server = servers.enter_context(WatchedServer(objects))
            server.misbehave()  # remembers requests from here on
            return server

        yield start

"""A device in host memory for loaders; torch computes with one thread here."""

import pytest
import torch

from tests.unit.device.recording import RecordingStreams, use


@pytest.fixture(autouse=True)
def _one_thread():
    # The device in host memory copies with torch's operators. With two threads and one core free,
    # the two wait for each other actively: 200 copies of 320 KB took 19 s instead of 0.2.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def streams(monkeypatch):
    streams = RecordingStreams()
    use(monkeypatch, streams)
    return streams

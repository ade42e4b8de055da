"""An API with a limit of 300 requests a second: no sample is lost, and few requests are repeated."""

import aiohttp

import headrace as hr
from tests.busy_api import BusyApi

SAMPLES = 2000


class Pages(hr.AsyncDataset):
    def __init__(self, url):
        self.url = url

    async def __aenter__(self):
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def __aexit__(self, *error):
        await self.session.close()

    def __len__(self):
        return SAMPLES

    async def aget(self, index):
        async with self.session.get(f"{self.url}/{index}") as response:
            response.raise_for_status()
            return int(await response.text())


class Retried(Pages):
    aget = hr.retrying(Pages.aget)


class Limited(Pages):
    aget = hr.RateLimit(290, burst=20)(Pages.aget)


def read(dataset):
    with hr.DataLoader(dataset, batch_size=50) as loader:
        assert sorted(x for batch in loader for x in batch.tolist()) == list(range(SAMPLES))
        return loader.stats().requests


def test_retries_alone_lose_no_sample():
    with BusyApi(300, burst=300) as api:
        counts = read(Retried(api.url))
    assert api.refused > 0, "the limit was never reached"
    assert counts.requests == api.asked.total() == SAMPLES + api.refused
    assert (counts.retries, counts.throttled) == (api.refused, api.refused)
    assert api.asked.total() < 1.5 * SAMPLES
    assert max(api.asked.values()) <= hr.RetryPolicy().max_attempts


def test_rate_limit_alone_keeps_every_request_from_being_refused():
    with BusyApi(300, burst=60) as api:
        read(Limited(api.url))
    assert api.refused == 0
    assert api.asked.total() == SAMPLES

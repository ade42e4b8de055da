"""Engines on other machines: the same batches as here, whatever is lost."""

import asyncio
import json
import multiprocessing
import os
import re
import time
import warnings

import numpy as np
import psutil
import pytest
import torch

import headrace as hr
from headrace._links import remote
from tests.datasets import Numbers, SlowDataset
from tests.tcp_host import TcpHost, TcpPlacement

BATCHES = 60


def noisy(index):
    return index + torch.rand(3)


def large(index):
    return {"bytes": np.full(1_000_000, index % 251, np.uint8), "empty": np.empty((0, 3))}


def loader(placement, dataset=None, **options):
    options = {"transform": noisy, "seed": 5, "concurrency": 8, **options}
    return hr.DataLoader(
        dataset or SlowDataset(5 * BATCHES, 0.002),
        5,
        shuffle=True,
        placement=placement,
        **options,
    )


def batches_of(loader):
    return torch.stack(list(loader))


@pytest.fixture(scope="module")
def expected():
    with loader("thread") as here:
        return batches_of(here)


@pytest.mark.parametrize(
    ("engines", "options", "address"),
    [(1, {}, "127.0.0.1"), (2, {"num_workers": 2}, "127.0.0.2")],
    ids=["one engine", "two engines of another address, with workers"],
)
def test_batches_are_the_same_as_in_a_thread(expected, engines, options, address):
    placement = TcpPlacement(engines, address=address)
    with loader(placement, **options) as there:
        assert torch.equal(batches_of(there), expected)
        assert there.stats().placement == "tcp"
        there.set_epoch(0)

        async def read():
            return torch.stack([batch async for batch in there])

        assert torch.equal(asyncio.run(read()), expected)
    assert all(host.process.returncode == 0 for host in placement.started)
    assert len(placement.started) == engines


def test_times_and_processes_of_another_machine_are_translated_in_a_trace(tmp_path):
    with loader(TcpPlacement(address="127.0.0.2"), num_workers=1) as there:
        began = time.perf_counter_ns() / 1000
        with hr.trace(tmp_path / "trace.json") as path:
            batches_of(there)
        ended = time.perf_counter_ns() / 1000
    spans = [
        each for each in json.loads(path.read_text())["traceEvents"] if each["ph"] == "X"
    ]
    elsewhere = [span for span in spans if span["pid"] != os.getpid()]
    assert {span["pid"] >> 22 for span in elsewhere} == {1}
    assert all(
        began <= span["ts"] <= span["ts"] + span["dur"] <= ended for span in elsewhere
    )


def test_large_batches_can_be_written_to():
    with loader(TcpPlacement(), Numbers(20), transform=large) as there:
        for batch in there:
            before = batch["bytes"][:, 0].clone()
            batch["bytes"] += 1
            assert torch.equal(batch["bytes"], (before + 1)[:, None].expand(5, 1_000_000))
            assert batch["empty"].shape == (5, 0, 3)


@pytest.mark.parametrize(
    ("engines", "whole_host"),
    [(1, False), (2, True)],
    ids=["the process", "a machine of two"],
)
def test_kill_loses_no_batch(expected, engines, whole_host):
    placement = TcpPlacement(engines)
    with (
        # most of the epoch is made after the kill
        loader(placement, SlowDataset(5 * BATCHES, 0.02)) as there,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        batches = iter(there)
        found = [next(batches) for _ in range(5)]
        host = psutil.Process(placement.started[0].process.pid)
        # The zygote's child is the engine.
        ((process,),) = [each.children() for each in host.children() if each.children()]
        (host if whole_host else process).kill()
        found += batches
    assert torch.equal(torch.stack(found), expected)
    lost = [str(each.message) for each in caught if "was lost" in str(each.message)]
    assert re.match(
        r"(the engine|engine 0 of 2) \(on node 127.0.0.1\) was lost: ", lost[0]
    )


def test_connection_without_the_token_is_closed(expected, monkeypatch):
    connect = TcpHost.connect
    tried = []

    async def try_others(self, port, token):
        for wrong in (b"", token[:-1], bytes(len(token))):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(wrong)
            writer.write_eof()
            tried.append(await reader.read())
            writer.close()
            await writer.wait_closed()
        await connect(self, port, token)

    monkeypatch.setattr(TcpHost, "connect", try_others)
    with loader(TcpPlacement()) as there:
        assert torch.equal(batches_of(there), expected)
    assert tried == [b"", b"", b""]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionError("no way to it"), "no way to it"),
        (None, "its process did not connect"),
    ],
    ids=["refused", "lost after the token"],
)
def test_host_that_never_connects_ends_the_epoch(monkeypatch, error, reason):
    async def connect(self, port, token):
        if error is not None:
            raise error

    monkeypatch.setattr(TcpHost, "connect", connect)
    monkeypatch.setattr(remote, "TOKEN_TIMEOUT", 0.05)
    with (
        loader(TcpPlacement()) as there,
        pytest.warns(RuntimeWarning, match="another is asked for"),
        pytest.raises(hr.errors.EngineDiedError, match=f"was lost: {reason}"),
    ):
        list(there)


def test_shared_memory_of_multiprocessing_cannot_leave_the_machine():
    dataset = SlowDataset(10, 0.0)
    dataset.value = multiprocessing.get_context("spawn").Value("i", 0)
    with (
        loader(TcpPlacement(), dataset) as there,
        pytest.raises(RuntimeError, match="only be shared between processes"),
    ):
        next(iter(there))


def test_arguments_that_exclude_each_other_are_refused():
    placement = TcpPlacement(engines=4)
    for options, reason in (
        ({"engines": 2}, r"use TcpPlacement\(engines=2"),
        ({"num_workers": "auto"}, "engines on this machine"),
    ):
        with pytest.raises(ValueError, match=reason):
            loader(placement, **options)

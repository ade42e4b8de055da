"""Checks of `device=`."""

import pytest
import torch

import headrace as hr

NONE_THERE = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="there is an accelerator"
)


@pytest.mark.parametrize(
    "device", [None, torch.device("cpu"), pytest.param("auto", marks=NONE_THERE)], ids=str
)
def test_host_memory_is_no_device(device):
    batch = next(iter(hr.DataLoader([1], device=device)))
    assert batch.device.type == "cpu"


@NONE_THERE
@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda")], ids=str)
def test_absent_device_is_an_error_at_construction(device):
    with pytest.raises(hr.errors.DeviceUnavailableError, match='device="auto"'):
        hr.DataLoader([1], device=device)


@pytest.mark.parametrize(
    ("device", "error", "says"),
    [("moon", RuntimeError, "moon"), (1.5, TypeError, "float")],
)
def test_invalid_device_is_refused(device, error, says):
    with pytest.raises(error, match=says):
        hr.DataLoader([1], device=device)


@pytest.mark.parametrize("name", ["device", "device_prefetch"])
def test_setting_an_option_of_the_device_later_warns_that_it_has_no_effect(name):
    with pytest.warns(RuntimeWarning, match=f"{name}= is read once"):
        setattr(hr.DataLoader([1]), name, None)

"""`hr.decode.audio` and `WavDataset` give what libsndfile decodes, whole or in windows, and refuse truncated files."""

import io

import numpy as np
import pytest
import soundfile
import torch

import headrace as hr
from headrace.errors import ShardError
from tests.unit.shards.resuming import in_memory

WAVE = np.random.default_rng(0).uniform(-1, 1, (40_000, 2)).astype(np.float32)


def written(format="WAV", subtype=None, wave=WAVE, rate=16_000):
    data = io.BytesIO()
    soundfile.write(data, wave, rate, format=format, subtype=subtype)
    return data.getvalue()


KINDS = [("WAV", "PCM_16"), ("RF64", "PCM_24"), ("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", None)]


@pytest.mark.parametrize(("format", "subtype"), KINDS)
def test_whole_files_are_decoded_as_by_soundfile_and_truncated_ones_refused(format, subtype):
    data = written(format, subtype)
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        wanted = file.read(dtype="float32", always_2d=True).T
    assert torch.equal(hr.decode.audio(16_000)(data), torch.from_numpy(wanted))
    for size in (len(data) // 2, len(data) * 9 // 10, 10, 0):
        with pytest.raises(ValueError):
            hr.decode.audio()(data[:size])


def test_label_is_kept_channels_are_averaged_and_another_rate_is_refused():
    sample = hr.types.ObjectSample("a.wav", memoryview(written(subtype="FLOAT")), 3)
    wave, label = hr.decode.audio(mono=True)(sample)
    assert label == 3
    assert torch.equal(wave, torch.from_numpy(WAVE).mean(1)[None])
    with pytest.raises(ValueError, match="16000 Hz, but sample_rate=8000"):
        hr.decode.audio(8000)(sample)


@pytest.mark.parametrize("format", ["WAV", "WAVEX", "RF64"])
@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24", "PCM_32", "FLOAT"])
def test_windows_have_the_samples_that_soundfile_reads(format, subtype):
    data = written(format, subtype)
    wanted = hr.decode.audio()(data)
    assert wanted.dtype == torch.float32
    windows = hr.WavDataset(in_memory({"a.wav": data}), samples=700, stride=500)
    assert (len(windows), windows.sample_rate) == ((40_000 - 700) // 500 + 1, 16_000)
    for index in (0, 1, 50, len(windows) - 1):
        assert torch.equal(windows[index], wanted[:, 500 * index :][:, :700])
        assert windows[index].dtype == torch.float32


def test_other_chunks_before_the_samples_and_after_are_passed_over():
    data = written(subtype="PCM_16")
    comment = b"LIST" + (9001).to_bytes(4, "little") + bytes(9002)
    windows = hr.WavDataset(in_memory({"a.wav": data[:12] + comment + data[12:] + comment}), samples=40_000)
    assert torch.equal(windows[0], hr.decode.audio()(data))
    assert (len(windows), windows.sample_key(0)) == (1, "a.wav[9054:169054]")


GOOD = written(subtype="PCM_16")


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (GOOD[:-1], "its samples end at"),
        (written("FLAC"), "not a WAV file"),
        (GOOD[:40] + bytes(4) + GOOD[44:], "not a WAV file whose header states its samples"),
        (GOOD[:40] + (1001).to_bytes(4, "little") + GOOD[44:], "not whole samples"),
        (written(subtype="ULAW"), "format 7"),
        (GOOD[:32] + b"\3" + GOOD[33:], "format 1 of 16 bits, 2 channels"),
    ],
)
def test_file_that_is_no_whole_wav_file_is_one_error_with_its_name(data, what):
    with pytest.raises(ShardError, match=rf"{what}.*a\.wav"):
        hr.WavDataset(in_memory({"a.wav": data}), samples=5)


def test_files_that_differ_and_invalid_arguments_are_refused():
    for other in (written(rate=8000), written(wave=WAVE[:, :1]), written(subtype="FLOAT")):
        with pytest.raises(ShardError, match=r"rate, channels, kind and bytes are .*b\.wav"):
            hr.WavDataset(in_memory({"a.wav": GOOD, "b.wav": other}), samples=5)
    for options in ({"samples": 0}, {"samples": 5, "stride": 0}, {"samples": 40_001}):
        with pytest.raises(ValueError, match="samples"):
            hr.WavDataset(in_memory({"a.wav": GOOD}), **options)

"""`hr.decode.audio` gives what libsndfile decodes, and refuses truncated files."""

import io

import numpy as np
import pytest
import soundfile
import torch

import headrace as hr

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

"""`hr.decode.audio` gives what libsndfile decodes, and refuses files that are truncated or partly read."""

import io
import struct

import av
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


KINDS = [
    ("WAV", "PCM_16"),
    ("FLAC", "PCM_16"),
    ("OGG", "VORBIS"),
    ("OGG", "OPUS"),
    ("MP3", None),
]


@pytest.mark.parametrize(("format", "subtype"), KINDS)
def test_whole_files_are_decoded_as_by_soundfile_and_truncated_ones_refused(
    format, subtype
):
    data = written(format, subtype)
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        wanted = file.read(dtype="float32", always_2d=True).T
    assert torch.equal(hr.decode.audio(16_000)(data), torch.from_numpy(wanted))
    least = 1200 if format == "MP3" else 5  # an MP3 may lack a frame
    for size in (len(data) - least, len(data) // 2, len(data) * 9 // 10, 10, 0):
        with pytest.raises(ValueError):
            hr.decode.audio()(data[:size])


def mp3(xing=0, rate=44_100, **options):
    """MP3 of PyAV, with or without a frame that states its length."""
    data = io.BytesIO()
    with av.open(
        data, "w", format="mp3", options={"write_xing": str(xing), "id3v2_version": "0"}
    ) as container:
        stream = container.add_stream(
            "libmp3lame", rate=rate, layout="mono", options=options
        )
        frame = av.AudioFrame.from_ndarray(
            WAVE[:, :1].T.copy(), format="fltp", layout="mono"
        )
        frame.sample_rate = rate
        for each in (frame, None):
            container.mux(stream.encode(each))
    return data.getvalue()


def decoded(*parts):
    return hr.decode.audio()(b"".join(parts))


STATED, UNSTATED = mp3(xing=1), mp3(b="64000")
TAG = b"TAG" + bytes(125)


@pytest.mark.parametrize("options", [{"b": "128000"}, {"b": "32000"}, {"q": "4"}])
def test_mp3_that_states_no_length_is_decoded_whole(options):
    data = mp3(**options)
    with av.open(io.BytesIO(data)) as container:
        count = sum(frame.samples for frame in container.decode(audio=0))
    assert decoded(data).shape == decoded(data, TAG).shape == (1, count)
    assert decoded(STATED, TAG).shape == decoded(STATED).shape


@pytest.mark.parametrize(
    "parts",
    [
        (STATED, STATED),
        (STATED, TAG, UNSTATED),
        (mp3(abr="1", b="96000"),),  # of the wrong estimate
        (UNSTATED, mp3(rate=22_050)),
        [written("OGG", "VORBIS"), written("OGG", "VORBIS", WAVE[:9000])],
        [written("OGG", "OPUS"), written("OGG", "OPUS")],
    ],
)
def test_a_file_that_libsndfile_reads_in_part_is_refused(parts):
    with pytest.raises(ValueError, match=r"joined|no stated length"):
        decoded(*parts)


def test_wrong_sizes_in_headers():
    data = written()
    riff, samples = struct.unpack_from("<I", data, 4)[0], decoded(data)
    for size, inner in (
        (riff + 8, None),
        (riff - 36, None),
        (0xFFFFFFFF, 0xFFFFFFFF),
    ):
        changed = bytearray(data)
        struct.pack_into("<I", changed, 4, size)
        struct.pack_into("<I", changed, 40, inner or len(data) - 44)
        assert torch.equal(decoded(bytes(changed)), samples)
    assert decoded(written(subtype="GSM610", wave=WAVE[:, 0], rate=8000)).shape == (
        1,
        40_320,
    )
    flac = written("FLAC")
    for claims in (
        # Unknown, as of a pipe.
        flac[:21] + bytes([flac[21] & 0xF0]) + bytes(4) + flac[26:],
        flac[:22] + b"\xff" * 4 + flac[26:],
        data[:40] + bytes(4) + data[44:],
    ):
        with pytest.raises(ValueError, match=r"truncated, empty|without its length"):
            decoded(claims)


def test_label_is_kept_channels_are_averaged_and_another_rate_is_refused():
    sample = hr.types.ObjectSample("a.wav", memoryview(written(subtype="FLOAT")), 3)
    wave, label = hr.decode.audio(mono=True)(sample)
    assert label == 3
    assert torch.equal(wave, torch.from_numpy(WAVE).mean(1)[None])
    with pytest.raises(ValueError, match="16000 Hz, but sample_rate=8000"):
        hr.decode.audio(8000)(sample)

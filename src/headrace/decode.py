"""Decoders of images, videos, audio and fields for `transform=`.

The decoders need ``headrace[image]``, ``headrace[video]`` or ``headrace[audio]``.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

import numpy as np
import torch

from headrace._extras import require

if TYPE_CHECKING:
    from PIL import Image
    from typing_extensions import Buffer

__all__ = ["audio", "fields", "image", "video"]

_Size = tuple[int, int] | None
_Pixels = np.ndarray[Any, Any]

_MODES = {"rgb": "RGB", "rgba": "RGBA", "gray": "L"}
# EXIF orientation to the Pillow `Transpose` that turns the image upright.
_TURNS = dict(zip(range(2, 9), (0, 3, 1, 5, 4, 6, 2), strict=True))
# Samples; for MP3 without a stated length, libsndfile estimates the length.
_MP3_FRAME = 1152
_TAG = 1024  # bytes; largest tag at the end of an MP3
# Wrong sizes in libsndfile's log. A wrong size of the whole file is frequent and harmless.
_SIZES = re.compile(r"^ *(?!RIF|Rif|FORM).*: (\d+) \(should be (\d+)\)", re.M)


class _DecodeFunction(Protocol):
    """A function of bytes, or of a sample with bytes and perhaps a label."""

    @overload
    def __call__(self, sample: Buffer, /) -> torch.Tensor: ...
    @overload
    def __call__(self, sample: Any, /) -> Any: ...


def image(
    size: int | tuple[int, int] | None = None,
    *,
    mode: Literal["rgb", "rgba", "gray"] = "rgb",
    dtype: torch.dtype = torch.uint8,
) -> _DecodeFunction:
    """Make a decoder of images.

    The decoder reads JPEG, PNG, WebP and all other formats of Pillow. The EXIF orientation is
    applied. JPEGs much larger than `size` are decoded at a half, a quarter or an eighth of the
    size. With simplejpeg installed, JPEGs take about half the time, with the same pixels.

    Args:
        size: height and width in pixels, or a single number for both. The image is scaled to cover
            `size`, and cropped around the centre. None: the size of the image.
        mode: ``"rgb"`` for 3 channels, ``"rgba"`` for 4, ``"gray"`` for 1.
        dtype: `torch.uint8`, or a floating dtype for values from 0 to 1.

    Returns:
        A function for `transform=`, or for calls in your own transform. From bytes, the function
        makes a tensor [C, H, W]. From an `ObjectSample` or `FileSample` with a label, the function
        makes ``(tensor, label)``. The function raises `OSError` if the bytes are no image, or end
        early.

    Raises:
        MissingExtraError: Pillow is not installed.
        ValueError: `size` is not positive, or `mode` or `dtype` is unknown.

    Example:
        >>> import io, headrace as hr
        >>> from PIL import Image
        >>> png = io.BytesIO(); Image.new("RGB", (40, 30), "red").save(png, "PNG")
        >>> hr.decode.image(size=(8, 16))(png.getvalue()).shape
        torch.Size([3, 8, 16])
    """
    require("PIL.Image", "headrace.decode.image", "pillow", "image")
    size = _checked(size)
    if mode not in _MODES:
        raise ValueError(
            f"mode must be one of {', '.join(map(repr, _MODES))}, but got {mode!r}"
        )
    if dtype != torch.uint8 and not dtype.is_floating_point:
        raise ValueError(
            f"dtype must be torch.uint8 or a floating dtype, but got {dtype}"
        )
    return partial(
        _decode_sample, size=size and (size[1], size[0]), mode=_MODES[mode], dtype=dtype
    )


def video(
    size: int | tuple[int, int] | None = None, *, frames: int | None = None
) -> _DecodeFunction:
    """Make a decoder of videos.

    The decoder uses PyAV, and reads whole files and the clips of a `headrace.VideoDataset`.

    Args:
        size: height and width in pixels, or a single number for both. Frames are turned upright,
            scaled to cover `size`, and cropped around the centre. None: the size of the frames.
        frames: number of frames to return, evenly spaced from the first to the last; None for all.

    Returns:
        A function as returned by `image`, for tensors [T, C, H, W] of uint8. The function raises
        `ValueError` if frames are missing, or if the codec notices damaged frames.

    Raises:
        MissingExtraError: PyAV is not installed.
        ValueError: `size` or `frames` is not positive.
    """
    require("av", "headrace.decode.video", "av", "video")
    if frames is not None and frames < 1:
        raise ValueError(f"frames must be positive, but got {frames}")
    return partial(_decode_video, size=_checked(size), count=frames)


def audio(sample_rate: int | None = None, *, mono: bool = False) -> _DecodeFunction:
    """Make a decoder of whole audio files.

    The decoder uses soundfile, and reads WAV, FLAC, Ogg, MP3 and others. libsndfile
    reads a single stream of a stated length. For MP3 without a stated length (no Xing frame),
    libsndfile estimates the length from the bit rate, which fits a constant bit rate. Joined MP3,
    chained Ogg, FLAC without a stated length, and MP3 with a wrong estimate are errors.

    Args:
        sample_rate: required sample rate of each file, in Hz; None for any rate. The decoder does
            not resample.
        mono: whether to average the channels.

    Returns:
        A function as returned by `image`, for float32 tensors [channels, samples] from -1 to 1. The
        function raises `ValueError` if a file has another rate, or is truncated, empty, no audio,
        or not of a single stream. An MP3 may lack a frame unnoticed.

    Raises:
        MissingExtraError: soundfile is not installed.
    """
    require("soundfile", "headrace.decode.audio", "soundfile", "audio")
    return partial(_decode_audio, rate=sample_rate, mono=mono)


def fields(
    **decoders: Callable[[Any], object],
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Make a decoder of dicts of bytes, as in tar shards.

    Args:
        decoders: for each field to keep, a function of the bytes, such as the result of `image`,
            `int`, `float` or `json.loads`. `str` decodes UTF-8. ``__key__=str`` keeps the name of
            the sample.

    Returns:
        A function for `transform=`, from a sample to a dict of the decoded fields. The function
        raises `KeyError` if a field is missing. Any other error has a note with the field's name.

    Example:
        >>> import headrace as hr
        >>> hr.decode.fields(txt=str, cls=int)({"__key__": "a", "txt": b"hello", "cls": b"3"})
        {'txt': 'hello', 'cls': 3}
    """
    return partial(_decode_fields, decoders={**decoders})


def _decode_fields(
    sample: Mapping[str, Any], decoders: Mapping[str, Callable[[Any], object]]
) -> dict[str, Any]:
    decoded: dict[str, Any] = {}
    for name, decoder in decoders.items():
        if name not in sample:
            raise KeyError(
                f"sample {sample.get('__key__')!r} has no field {name!r}, but {', '.join(sample)}"
            )
        try:
            value = sample[name]
            # `__key__` is a str already.
            if decoder is str and not isinstance(value, str):
                value = bytes(value).decode()
            decoded[name] = decoder(value)
        except Exception as error:
            error.add_note(f"decoding field {name!r} of sample {sample.get('__key__')!r}")
            raise
    return decoded


def _decode_sample(sample: Any, size: _Size, mode: str, dtype: torch.dtype) -> Any:
    from PIL import Image, ImageOps

    data = getattr(sample, "data", sample)
    with Image.open(io.BytesIO(data)) as picture:
        if picture.mode[0] in "IF":
            raise ValueError(
                f"an image of mode {picture.mode} has more than 8 bits a channel: "
                "decode it with Pillow"
            )
        turn = None
        with contextlib.suppress(Exception):  # damaged EXIF raises many kinds of errors
            # Remove the tag: otherwise Pillow turns TIFF images at loading.
            turn = _TURNS.get(picture.getexif().pop(0x0112, 1))
        if size is not None:
            # Twice the size leaves pixels for the resampling filter. The bound is a square because
            # EXIF may turn the image.
            picture.draft(mode, (2 * max(size), 2 * max(size)))
        upright = _by_simplejpeg(data, picture) or picture
        if turn is not None:
            upright = upright.transpose(Image.Transpose(turn))
        upright = upright.convert(mode)
        pixels = np.array(upright if size is None else ImageOps.fit(upright, size))
    tensor = (
        torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1))
        .permute(2, 0, 1)
        .contiguous()
    )
    if dtype != torch.uint8:
        tensor = tensor.to(dtype) / 255
    return _labelled(tensor, sample)


def _labelled(tensor: torch.Tensor, sample: Any) -> Any:
    label = getattr(sample, "label", None)
    return tensor if label is None else (tensor, label)


def _checked(size: int | tuple[int, int] | None) -> _Size:
    size = (size, size) if isinstance(size, int) else size
    if size is not None and min(size) < 1:
        raise ValueError(f"size must be positive, but got {size}")
    return size


def _decode_video(sample: Any, size: _Size, count: int | None) -> Any:
    import av

    with av.open(io.BytesIO(getattr(sample, "data", sample)), "r") as container:
        if not container.streams.video:
            raise ValueError(
                f"no video, but {[stream.type for stream in container.streams]}"
            )
        codec = container.streams.video[0].codec_context
        codec.thread_count = 1  # workers share the cores
        packets = [*container.demux(video=0)]
        shown = [frame for packet in packets for frame in packet.decode()]
        # The decoder may not notice a clip without a key frame at the beginning.
        if hasattr(sample, "times"):
            codec.flush_buffers()
            key = [*codec.decode(av.Packet(bytes(packets[0]))), *codec.decode(None)]
            if not key or key[0].pict_type not in (0, 1):  # unknown, intra
                raise ValueError(
                    "a clip without a key frame: "
                    "a video of periodic intra refresh is decoded whole only"
                )
    expected = len(getattr(sample, "times", shown))
    if not shown or len(shown) != expected or any(frame.is_corrupt for frame in shown):
        raise ValueError(
            f"a damaged video: {len(shown)} frames, where there should be {expected or 'some'}"
        )
    if count is not None:
        shown = [shown[round(place)] for place in np.linspace(0, len(shown) - 1, count)]
    return _labelled(
        torch.from_numpy(np.array([_upright(frame, size) for frame in shown])), sample
    )


def _upright(frame: Any, size: _Size) -> _Pixels:
    """Scale, crop and turn a decoded frame to pixels [3, H, W]."""
    quarters = round(frame.rotation / 90) % 4
    height, width = size or (frame.height, frame.width)
    if size is not None and quarters % 2:
        height, width = width, height
    scale = max(height / frame.height, width / frame.width)
    new = max(height, round(frame.height * scale)), max(width, round(frame.width * scale))
    pixels: _Pixels = frame.to_ndarray(format="rgb24", height=new[0], width=new[1])
    top, left = (new[0] - height) // 2, (new[1] - width) // 2
    return np.rot90(pixels[top : top + height, left : left + width], quarters).transpose(
        2, 0, 1
    )


def _decode_audio(sample: Any, rate: int | None, mono: bool) -> Any:
    import soundfile

    data = getattr(sample, "data", sample)
    source = io.BytesIO(data)
    try:
        with soundfile.SoundFile(source) as file:
            wave = file.read(file.frames, dtype="float32", always_2d=True).T
            log, unread = file.extra_info, len(data) - source.tell()
    except (soundfile.SoundFileError, MemoryError, ValueError) as error:
        # The header may state any length: the memory for the length may not exist.
        raise ValueError(f"no audio, damaged, or without its length: {error}") from None
    # If the file has less than the header states, libsndfile reads less and only logs the fact.
    less = any(int(a) > int(b) for a, b in _SIZES.findall(log) if a != "4294967295")
    less = less or wave.shape[1] + _MP3_FRAME < file.frames
    if (
        not wave.size
        or less
        or re.search("end-of-stream|junk after the last page", log, re.I)
    ):
        raise ValueError("truncated, empty, or joined of several streams")
    if file.format in ("MP3", "OGG") and unread > _TAG:
        raise ValueError(
            f"libsndfile leaves {unread:,} bytes at the end: joined streams, or no stated length"
        )
    if rate not in (None, file.samplerate):
        raise ValueError(f"{file.samplerate} Hz, but sample_rate={rate}: resample it")
    wave = wave.mean(0, keepdims=True) if mono else np.ascontiguousarray(wave)
    return _labelled(torch.from_numpy(wave), sample)


def _by_simplejpeg(data: Any, picture: Image.Image) -> Image.Image | None:
    """Decode a colour JPEG at the scale of `picture`.

    The result is None for other images, without simplejpeg, and for a damaged JPEG: Pillow then
    raises the error.
    """
    if picture.format != "JPEG" or picture.mode != "RGB":
        return None
    with contextlib.suppress(ImportError, ValueError):
        import PIL.Image
        import simplejpeg

        scale = {
            "min_height": picture.height,
            "min_width": picture.width,
            "min_factor": 1,
        }
        return PIL.Image.fromarray(simplejpeg.decode_jpeg(data, **scale))
    return None

"""Decoders of images and of the fields of tar shards."""

import io
import json
import pickle
import sys

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

import headrace as hr

ORIENTATION = 0x0112


def noise(width, height, mode="RGB"):
    pixels = np.random.default_rng(0).integers(
        0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8
    )
    return (
        Image.fromarray(pixels)
        .resize((width, height), Image.Resampling.BICUBIC)
        .convert(mode)
    )


def encoded(picture, kind="JPEG", **options):
    data = io.BytesIO()
    picture.save(data, kind, **options)
    return data.getvalue()


def pixels(picture):
    array = np.array(picture)
    return torch.from_numpy(array[..., None] if array.ndim == 2 else array).permute(
        2, 0, 1
    )


@pytest.mark.parametrize(
    ("mode", "pillow"), [("rgb", "RGB"), ("rgba", "RGBA"), ("gray", "L")]
)
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("stored", ["RGB", "L", "P", "CMYK", "RGBA", "1"])
def test_image_has_the_pixels_that_pillow_decodes(mode, pillow, kind, stored):
    picture = noise(50, 37).convert(stored)
    if (kind != "PNG" and stored in ("P", "1", "RGBA")) or (
        kind != "JPEG" and stored == "CMYK"
    ):
        picture = picture.convert("RGB")
    data = encoded(picture, kind)
    with Image.open(io.BytesIO(data)) as opened:
        right = pixels(opened.convert(pillow))
    found = hr.decode.image(mode=mode)(memoryview(data))
    assert found.is_contiguous()
    assert found.dtype == torch.uint8
    assert torch.equal(found, right)


def test_size_covers_and_crops_about_the_middle_without_distortion():
    picture = Image.new("RGB", (300, 100), "black")
    picture.paste("white", (100, 0, 200, 100))
    found = hr.decode.image(size=40)(encoded(picture, "PNG"))
    assert found.shape == (3, 40, 40)
    assert found[:, :, 2:-2].min() == 255
    assert hr.decode.image(size=(16, 48))(encoded(picture, "PNG")).shape == (3, 16, 48)


@pytest.mark.parametrize(
    ("width", "height"), [(1999, 1501), (333, 1777), (640, 480), (50, 40)]
)
@pytest.mark.parametrize("orientation", [None, 6])
def test_pixels_are_the_same_with_and_without_simplejpeg(
    monkeypatch, width, height, orientation
):
    exif = Image.Exif()
    if orientation:
        exif[ORIENTATION] = orientation
    data = encoded(noise(width, height), quality=90, exif=exif)
    decoders = [hr.decode.image(size=size) for size in (None, 100, (60, 200))]
    fast = [decode(data) for decode in decoders]
    assert "simplejpeg" in sys.modules
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    assert all(
        torch.equal(decode(data), each)
        for decode, each in zip(decoders, fast, strict=True)
    )


def test_large_jpeg_that_is_decoded_at_a_fraction_looks_as_one_that_is_scaled_down():
    data = encoded(noise(1600, 1200), quality=95)
    with Image.open(io.BytesIO(data)) as opened:
        right = pixels(ImageOps.fit(opened.convert("RGB"), (100, 100)))
    assert (hr.decode.image(size=100)(data).float() - right.float()).abs().mean() < 2.0


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_image_is_turned_upright_by_its_exif_tag(kind):
    picture = Image.new("RGB", (64, 32), "black")
    # the left half, which is the upper one when it is turned
    picture.paste("white", (0, 0, 32, 32))
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    found = hr.decode.image()(encoded(picture, kind, exif=exif))
    assert found.shape == (3, 64, 32)
    assert found[:, :28].min() > 250
    assert found[:, 36:].max() < 5


@pytest.mark.parametrize("exif", [b"garbage!", b"II*\0"])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_damaged_exif_does_not_turn_the_image(kind, exif):
    data = encoded(noise(64, 32), kind, exif=b"Exif\0\0" + exif)
    assert hr.decode.image()(data).shape == (3, 32, 64)


def test_floating_dtype_has_values_from_0_to_1():
    found = hr.decode.image(dtype=torch.float16)(
        encoded(Image.new("L", (2, 2), 51), "PNG")
    )
    assert found.dtype == torch.float16
    assert torch.allclose(found, torch.full((3, 2, 2), 0.2, dtype=torch.float16))


@pytest.mark.parametrize("cut", [100, 2000])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_truncated_image_is_an_error(cut, kind):
    with pytest.raises(OSError, match=r"truncated|cannot identify"):
        hr.decode.image(size=16)(encoded(noise(200, 200), kind)[:-cut])


def test_image_of_16_bits_is_an_error_and_not_clipped():
    data = encoded(Image.fromarray(np.full((4, 4), 4660, np.uint16)), "PNG")
    with pytest.raises(ValueError, match="mode I;16 has more than 8 bits"):
        hr.decode.image()(data)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": (8, -1)}, "size"),
        ({"mode": "RGB"}, "mode"),
        ({"dtype": torch.int64}, "dtype"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        hr.decode.image(**arguments)


@pytest.mark.parametrize("dataset", [hr.ObjectDataset, hr.FileDataset])
def test_folder_of_labelled_images_needs_no_code(tmp_path, dataset):
    for number, name in enumerate(["cat", "dog", "emu"]):
        (tmp_path / name).mkdir()
        for each in range(3):
            (tmp_path / name / f"{each}.png").write_bytes(
                encoded(Image.new("L", (20, 20), 10 * number), "PNG")
            )
    photos = dataset(tmp_path, suffix=".png", labels="folder")
    assert photos.classes == ("cat", "dog", "emu")
    with hr.DataLoader(
        photos, batch_size=4, num_workers=1, transform=hr.decode.image(size=8)
    ) as loader:
        images, labels = map(torch.cat, zip(*loader, strict=True))
    assert labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert images.shape == (9, 3, 8, 8)
    assert (images == 10 * labels[:, None, None, None]).all()
    unlabelled = dataset(tmp_path, suffix=".png")
    assert hr.decode.image()(unlabelled[0]).shape == (3, 20, 20)
    some = dataset(
        tmp_path,
        suffix=("1.png", "2.png"),
        labels="folder",
        classes=("emu", "fox", "dog", "cat"),
    )
    assert [some[index].label for index in (0, 2, 4)] == [3, 2, 0]
    assert pickle.loads(pickle.dumps(some, 5)).classes == ("emu", "fox", "dog", "cat")
    with pytest.raises(ValueError, match="same label means different classes"):
        hr.concat([torch.utils.data.Subset(photos, [0]), hr.concat([some])])
    assert hr.concat([some, some]).map(id)
    with pytest.raises(ValueError, match="classes= does not name the folder 'emu'"):
        dataset(tmp_path, suffix=".png", labels="folder", classes=["cat", "dog"])
    with pytest.raises(ValueError, match="classes= are the names"):
        dataset(tmp_path, suffix=".png", classes=["cat"])
    (tmp_path / "lost.png").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"in the folder of its class: 'lost\.png' is in none"
    ):
        dataset(tmp_path, suffix=".png", labels="folder")


def test_fields_are_decoded_by_their_functions():
    sample = {
        "__key__": "a",
        "png": encoded(Image.new("L", (4, 6)), "PNG"),
        "cls": b"7",
        "txt": "é".encode(),
        "x": b"",
    }
    decode = hr.decode.fields(
        __key__=str, png=hr.decode.image(), cls=int, txt=str, json=json.loads
    )
    found = decode(sample | {"json": b'{"a": [1]}'})
    assert found["png"].shape == (3, 6, 4)
    assert {name: value for name, value in found.items() if name != "png"} == {
        "__key__": "a",
        "cls": 7,
        "txt": "é",
        "json": {"a": [1]},
    }


def test_error_of_a_field_names_the_field_and_the_sample():
    with pytest.raises(ValueError, match="invalid literal") as caught:
        hr.decode.fields(cls=int)({"__key__": "a/7", "cls": b"seven"})
    assert caught.value.__notes__ == ["decoding field 'cls' of sample 'a/7'"]
    with pytest.raises(
        KeyError, match="sample 'a/7' has no field 'cls', but __key__, jpg"
    ):
        hr.decode.fields(cls=int)({"__key__": "a/7", "jpg": b""})

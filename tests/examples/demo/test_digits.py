"""The objects of the demo, and what workers make of them."""

from collections import Counter

import torch
from sklearn.datasets import load_digits

from demo.digits import HELD_OUT, TRAIN, decode, digit_objects, label_of
from headrace.datasets.objects import ObjectSample


def test_every_digit_is_an_object_and_a_fifth_of_each_label_is_held_out():
    parts = Counter((key.partition("/")[0], label_of(key)) for key in digit_objects())
    assert sum(parts.values()) == 1797
    for label in range(10):
        held_out, train = parts[HELD_OUT, label], parts[TRAIN, label]
        assert abs(held_out - (held_out + train) / 5) < 1


def test_an_object_is_the_digit_that_its_key_names():
    digits = load_digits()
    for key, data in list(digit_objects().items())[::100]:
        number = int(key.partition("/")[2].partition("-")[0])
        picture, label = decode(ObjectSample(key, memoryview(data), label_of(key)))
        assert label == digits.target[number]
        assert picture.shape == (1, 8, 8)
        assert picture.dtype == torch.float32
        levels = torch.from_numpy(digits.images[number])
        assert torch.allclose(picture[0].double() * 16, levels, atol=0.05)

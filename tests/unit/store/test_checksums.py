"""Given checksums are of a known form."""

import hashlib
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace._core.store.head import check_form, matches


@given(st.binary(max_size=100))
def test_each_algorithm_tells_its_own_bytes_from_others(data):
    for name in ("sha256", "sha1", "md5"):
        checksum = f"{name}:{hashlib.new(name, data).hexdigest()}"
        check_form(checksum)
        assert matches(memoryview(data), checksum)
        assert not matches(memoryview(data + b"x"), checksum)
    checksum = f"crc32:{zlib.crc32(data):08x}"
    check_form(checksum)
    assert matches(memoryview(data), checksum)
    assert not matches(memoryview(data + b"x"), checksum)


@pytest.mark.parametrize("wrong", ["", "abc", "md5:xyz", "md5:" + "0" * 31, "sha512:" + "0" * 128, "MD5:" + "0" * 32])
def test_a_checksum_of_another_form_is_refused(wrong):
    with pytest.raises(ValueError, match="algorithm:hexadecimal"):
        check_form(wrong)

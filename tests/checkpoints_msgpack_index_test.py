"""Tests of the msgpack reader: it agrees with the msgpack library."""

import io

import msgpack
import pytest

from specdec_jax.checkpoints import msgpack_index

NUMBERS = [
    0,
    127,
    128,
    255,
    256,
    65_535,
    65_536,
    2**32 - 1,
    2**32,
    2**64 - 1,
    -1,
    -32,
    -33,
    -128,
    -129,
    -32_768,
]
SIZES = [0, 1, 15, 16, 31, 32, 255, 256, 65_535, 65_536]  # on both sides of where the packing changes


@pytest.mark.parametrize(
    "values",
    [
        [*NUMBERS, -32_769, -(2**31), -(2**31) - 1, -(2**63)],
        [None, True, False, 0.1, -1e300],
        ["é" * size for size in SIZES],
        [b"x" * size for size in SIZES],
        [[1] * size for size in SIZES[:-2]],
        [{str(i): i for i in range(size)} for size in SIZES[:-2]],
    ],
    ids=["integers", "constants and floats", "strings", "bytes", "lists", "dicts"],
)
def test_msgpack_reader_agrees_with_the_library(values):
    for value in values:
        assert msgpack_index.read_tree(io.BytesIO(msgpack.packb(value))) == value


@pytest.mark.parametrize("packed", [b"\xdd\0\0\0\1\7", b"\xdf\0\0\0\1\xa1a\7"], ids=["list", "dict"])
def test_containers_with_sizes_of_32_bits(packed):
    assert msgpack_index.read_tree(io.BytesIO(packed)) == msgpack.unpackb(packed)


def test_msgpack_reader_passes_over_other_extensions():
    packed = msgpack.packb([msgpack.ExtType(9, b"x" * size) for size in (1, 2, 4, 8, 16, 3, 300)] + ["end"])
    assert msgpack_index.read_tree(io.BytesIO(packed)) == [None] * 7 + ["end"]

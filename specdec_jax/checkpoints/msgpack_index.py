"""Reads a Flax msgpack file without reading the arrays inside it.

The msgpack library has to hold a whole array in memory to step over it, so an index with the optimizer's
state inlined would cost its size. Here an array becomes an `Inlined`, the place where its bytes lie, and the
file is seeked past it.
"""

import io
import math
import struct
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

# First byte of a value -> how the length that follows is packed.
_STRINGS = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_BYTES = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I"}
_EXTENSIONS = {0xC7: ">B", 0xC8: ">H", 0xC9: ">I"}
_LISTS = {0xDC: ">H", 0xDD: ">I"}
_MAPS = {0xDE: ">H", 0xDF: ">I"}
_NUMBERS = {
    code: packing  # float32, float64, uint8 to uint64, int8 to int64
    for code, packing in enumerate((">f", ">d", ">B", ">H", ">I", ">Q", ">b", ">h", ">i", ">q"), start=0xCA)
}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_FIXED_EXTENSIONS = range(0xD4, 0xD9)  # of 1, 2, 4, 8 and 16 bytes
_FLAX_ARRAY, _FLAX_SCALAR = 1, 3  # Flax's extension types
_FLAX_CHUNKED = "__msgpack_chunked_array__"  # Flax cuts arrays of more than 1 GiB


class Inlined(NamedTuple):
    """An array inside a msgpack file.

    Attributes:
      shape: the array's shape.
      dtype: the array's dtype.
      pieces: (offset in the file, bytes) of each run of elements, in C order; one, unless Flax cut the array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: tuple[tuple[int, int], ...]


def read_tree(file: io.BufferedIOBase) -> Any:
    """The value a Flax msgpack file holds, with an `Inlined` for every array.

    Raises:
      ValueError: the file is not msgpack, or ends too early.
    """
    try:
        tree = _value(file)
    except (
        UnicodeDecodeError,
        RecursionError,
        TypeError,
        KeyError,
    ) as error:  # what reading noise as msgpack leads to
        raise ValueError(f"not msgpack ({error})") from error
    if file.tell() > file.seek(0, 2):  # an array was seeked past that is not all there
        raise ValueError("it ends in the middle of an array")
    return tree


def _take(file: io.BufferedIOBase, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise ValueError(f"it ends in the middle of a value, at byte {file.tell()}")
    return data


def _number(file: io.BufferedIOBase, packing: str) -> Any:
    return struct.unpack(packing, _take(file, struct.calcsize(packing)))[0]


def _value(file: io.BufferedIOBase) -> Any:
    code = _take(file, 1)[0]
    if code < 0x80:
        return code
    if code >= 0xE0:
        return code - 0x100
    if code < 0x90 or code in _MAPS:
        return _map(file, code & 0x0F if code < 0x90 else _number(file, _MAPS[code]))
    if code < 0xA0 or code in _LISTS:
        return [_value(file) for _ in range(code & 0x0F if code < 0xA0 else _number(file, _LISTS[code]))]
    if code < 0xC0 or code in _STRINGS:
        return _take(file, code & 0x1F if code < 0xC0 else _number(file, _STRINGS[code])).decode()
    if code in _BYTES:
        return _take(file, _number(file, _BYTES[code]))
    if code in _NUMBERS:
        return _number(file, _NUMBERS[code])
    if code in _CONSTANTS:
        return _CONSTANTS[code]
    if code in _EXTENSIONS:
        return _extension(file, _number(file, _EXTENSIONS[code]))
    if code in _FIXED_EXTENSIONS:
        return _extension(file, 1 << (code - 0xD4))
    raise ValueError(f"not msgpack (byte {code:#x} at {file.tell() - 1})")


def _map(file: io.BufferedIOBase, size: int) -> Any:
    tree = {_value(file): _value(file) for _ in range(size)}
    if _FLAX_CHUNKED not in tree:
        return tree
    chunks = [tree["chunks"][str(i)] for i in range(len(tree["chunks"]))]
    shape = tuple(tree["shape"][str(i)] for i in range(len(tree["shape"])))
    return Inlined(shape, chunks[0].dtype, tuple(piece for chunk in chunks for piece in chunk.pieces))


def _extension(file: io.BufferedIOBase, size: int) -> Inlined | None:
    """A Flax array, packed as (shape, dtype, elements); other extensions are passed over."""
    kind = _take(file, 1)[0]
    end = file.tell() + size
    array = None
    if kind in (_FLAX_ARRAY, _FLAX_SCALAR):
        if _take(file, 1)[0] != 0x93:  # a list of three
            raise ValueError(f"not an array at byte {file.tell() - 1}")
        shape, name = tuple(_value(file)), _value(file)
        dtype = jnp.dtype(name.decode() if isinstance(name, bytes) else name)
        nbytes = math.prod(shape) * dtype.itemsize
        if file.tell() + nbytes > end:
            raise ValueError(f"the array before byte {end} is shorter than its shape {shape}")
        array = Inlined(shape, dtype, ((end - nbytes, nbytes),))  # the elements come last
    file.seek(end)
    return array

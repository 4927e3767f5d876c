"""The safetensors file format: a length of 8 bytes, a JSON header of that length, then every tensor's bytes.

    {"shared.weight": {"dtype": "BF16", "shape": [32128, 512], "data_offsets": [0, 32899072]}, ...}

Offsets count from the header's end; tensors lie side by side, in C order, little-endian. Read and written here because
it is a page of code, and because the format's own library needs PyTorch for bfloat16.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax.checkpoints.t5x_index import CheckpointError

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
_NAMES = {name: key for key, name in _DTYPES.items()}
_ALIGNMENT = 8  # of the first tensor's bytes


class StoredTensor(NamedTuple):
    """A tensor whose place is known.

    Attributes:
      file: the file that holds it.
      dtype: its dtype as stored.
      shape: its shape.
      start: where in the file its bytes begin.
    """

    file: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Size as stored."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> np.ndarray:
        """Reads the tensor."""
        return np.fromfile(self.file, np.uint8, self.nbytes, offset=self.start).view(self.dtype).reshape(self.shape)


def read_header(path: str) -> dict[str, StoredTensor]:
    """The tensors of a file, by name; none of them is read.

    Raises:
      CheckpointError: this is no safetensors file, not all of one, or it holds other than floating-point numbers.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        start = 8 + int.from_bytes(prefix, "little")
        if prefix == b"version ":
            raise CheckpointError(f"{path}: this is a Git LFS pointer to the file, not the file; run: git lfs pull.")
        if len(prefix) < 8 or start > size:
            raise CheckpointError(f"{path}: this is no safetensors file, or is cut off; download or save it again.")
        try:
            header = json.loads(file.read(start - 8))
            header.pop("__metadata__", None)
            tensors = {name: _stored_tensor(path, name, entry, start) for name, entry in header.items()}
        except CheckpointError:
            raise
        except (ValueError, RecursionError, TypeError, AttributeError, KeyError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{path}: its safetensors header is damaged ({problem}).") from error
    end = max((tensor.start + tensor.nbytes for tensor in tensors.values()), default=start)
    if end != size:
        raise CheckpointError(
            f"{path}: has {size} bytes, where its header says {end}; it is cut off or damaged: download or save it "
            "again."
        )
    return tensors


def _stored_tensor(path: str, name: str, entry: Any, start: int) -> StoredTensor:
    if entry["dtype"] not in _DTYPES:
        raise CheckpointError(
            f"{path}: tensor {name} is {entry['dtype']}; only {', '.join(_DTYPES)} are read: save the model in float32 "
            "or bfloat16."
        )
    begin, end = entry["data_offsets"]
    dtype, shape = jnp.dtype(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
    tensor = StoredTensor(path, dtype, shape, start + begin)
    if not all(type(n) is int and n >= 0 for n in (begin, end, *shape)) or end - begin != tensor.nbytes:
        raise ValueError(f"tensor {name} of shape {list(shape)} at {[begin, end]}")
    return tensor


def write_file(path: str, arrays: Mapping[str, np.ndarray], dtype: Any, advance: Callable[[int], None]) -> None:
    """Writes a file as the format's own library does, for PyTorch to read.

    Args:
      path: the file, which is replaced.
      arrays: what to write, in whatever layout; a copy is made of one at a time.
      dtype: float32 or bfloat16, of all tensors; None keeps each array's own.
      advance: called with the number of bytes after each tensor.
    """
    # Wider types first, so that every tensor is aligned.
    dtypes = {name: jnp.dtype(dtype or array.dtype) for name, array in arrays.items()}
    names = sorted(arrays, key=lambda name: (-dtypes[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        begin, end = end, end + arrays[name].size * dtypes[name].itemsize
        shape = list(arrays[name].shape)
        header[name] = {"dtype": _NAMES[dtypes[name].name], "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in names:
            written = np.ascontiguousarray(arrays[name], dtypes[name]).view(np.uint8)
            file.write(written.data)
            advance(written.nbytes)

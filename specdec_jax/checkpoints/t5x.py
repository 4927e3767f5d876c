"""Reads and writes T5X checkpoints, without T5X.

    published = "gs://t5-data/pretrained_models/t5x/t5_1_1_small/checkpoint_1000000"
    params = load_params(published, dtype=jnp.bfloat16)
    save_checkpoint("/tmp/run", params, step=1000)  # writes /tmp/run/checkpoint_1000

Read are T5X's native format (that of the published checkpoints), Orbax's (what t5x.train writes) and older
Orbax's, with plain or scanned layers; see t5x_index.py and t5x_tree.py. Written is the native format.
"""

import math
import os
import secrets
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from flax import serialization

from specdec_jax.checkpoints import t5x_arrays, t5x_tree
from specdec_jax.checkpoints.t5x_index import CheckpointError, Index, list_steps, open_index, parse_path
from specdec_jax.types import Params

__all__ = ["CheckpointError", "list_steps", "load_params", "read_shapes", "save_checkpoint"]

_VERSION = 3  # of the native format: bfloat16 is stored as tensorstore's own type
_CHUNK_BYTES = 64 * 2**20  # T5X's limit


def load_params(
    path: str | os.PathLike[str], *, dtype: Any = None, expected: Params | None = None, progress: bool = True
) -> Params:
    """Reads a checkpoint's parameters; the optimizer's state is never read.

    Each chunk is cast as it arrives, so that peak memory is the size of the result plus less than 1 GiB.

    Args:
      path: a checkpoint_N directory, or its `checkpoint` file; local or gs://bucket/path.
      dtype: floating-point dtype of the result, such as jnp.bfloat16; None keeps each array's own.
      expected: nested dict of jax.ShapeDtypeStruct, from `T5(config).param_shapes()`. Names and shapes are
        checked against it before any array is read; its dtypes are not. None checks nothing.
      progress: show a progress bar on stderr if reading takes over two seconds.

    Returns:
      Nested dict of numpy arrays (bfloat16 is ml_dtypes'), named as T5X's plain T5 names them. numpy, not
      jax, so that the caller puts each array where it belongs and no second copy is held meanwhile. The
      layers of a scanned checkpoint share memory.

    Raises:
      ValueError: `dtype` is no floating-point type.
      CheckpointError: there is no checkpoint, it is damaged, or it is not the one expected.
    """
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype is {jnp.dtype(dtype).name}; parameters are read as float32 or bfloat16.")
    with open_index(path) as index:
        arrays, _ = _open(index, expected)
        t5x_arrays.check_chunks(arrays)

        leaves: dict[str, np.ndarray] = {}
        window = t5x_arrays.Window(t5x_arrays.MAX_BYTES_IN_FLIGHT)
        total = sum(array.nbytes for array in arrays)
        title = f"Reading {os.path.basename(os.path.normpath(path))}"
        with t5x_arrays.progress_bar(title, total, enabled=progress) as advance:
            for array in arrays:
                out, plain = t5x_tree.allocate(array.name, array.shape, jnp.dtype(dtype or array.dtype))
                t5x_arrays.read_array(array, out, index.file, window, advance)
                leaves |= plain
            window.finish()
    return t5x_tree.unflatten(leaves)


def read_shapes(path: str | os.PathLike[str], *, expected: Params | None = None) -> Params:
    """The tree that `load_params` would return, as float32 shapes; no array is read.

    Raises:
      CheckpointError: there is no checkpoint, its index is damaged, or it is not the one expected.
    """
    with open_index(path) as index:
        _, shapes = _open(index, expected)
    return t5x_tree.unflatten({name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()})


def _open(index: Index, expected: Params | None) -> tuple[list[t5x_arrays.StoredArray], dict[str, t5x_tree.Shape]]:
    """A checkpoint's arrays, and the shapes that they have in the plain tree, which are those expected."""
    arrays = t5x_arrays.open_arrays(index.parameters)
    t5x_tree.check_stacks({array.name: array.shape for array in arrays}, index.path)
    plain = [t5x_tree.plain_shapes(array.name, array.shape) for array in arrays]
    shapes = {name: shape for some in plain for name, shape in some.items()}
    if expected is not None:
        wanted = {name: tuple(leaf.shape) for name, leaf in t5x_tree.flatten(expected).items()}
        t5x_tree.check_expected(shapes, wanted, index.path)
    return arrays, shapes


def save_checkpoint(directory: str | os.PathLike[str], params: Params, *, step: int, progress: bool = True) -> str:
    """Writes parameters in T5X's native format, as T5X's Checkpointer writes an inference state.

    The index has no `param_states`: there is no optimizer. The checkpoint gets its name only once complete.

    Args:
      directory: local run directory; created if need be.
      params: nested dict of float32 or bfloat16 arrays (numpy or jax).
      step: the step, which names the checkpoint.
      progress: show a progress bar on stderr if writing takes over two seconds.

    Returns:
      The path of the checkpoint, directory/checkpoint_<step>.

    Raises:
      CheckpointError: the directory is remote, the checkpoint exists, or a parameter has another dtype.
      ValueError: `step` is negative.
    """
    place = parse_path(directory)
    if place.bucket is not None:
        raise CheckpointError(f"{place}: writing to a bucket is not supported; write to a local directory and copy it.")
    if step < 0:
        raise ValueError(f"step is {step}; it must be 0 or more.")
    final = str(place / f"checkpoint_{step}")
    if os.path.exists(final):
        raise CheckpointError(f"{final}: already exists; remove it or choose another step.")
    leaves = t5x_tree.flatten(params)
    for name, leaf in leaves.items():
        if leaf.dtype not in (jnp.float32, jnp.bfloat16):
            raise CheckpointError(f"{final}: parameter {name} is {leaf.dtype}; only float32 and bfloat16 are written.")

    temporary = f"{final}.tmp-{secrets.token_hex(4)}"
    os.makedirs(temporary)
    try:
        specs = _write_arrays(temporary, leaves, f"Writing checkpoint_{step}", progress)
        state = {"step": np.asarray(step, np.int32)}
        index = {"version": _VERSION, "optimizer": {"state": state, "target": t5x_tree.unflatten(specs)}}
        with open(os.path.join(temporary, "checkpoint"), "wb") as file:
            file.write(serialization.msgpack_serialize(index, in_place=True))  # keeps the order of keys
        os.rename(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def _write_arrays(
    directory: str, leaves: dict[str, np.ndarray | jax.Array], title: str, progress: bool
) -> dict[str, dict[str, Any]]:
    """Writes each parameter to a directory of its own; returns their specs for the index."""
    specs = {}
    window = t5x_arrays.Window(t5x_arrays.MAX_BYTES_IN_FLIGHT)
    total = sum(leaf.nbytes for leaf in leaves.values())
    with t5x_arrays.progress_bar(title, total, enabled=progress) as advance:
        for name, leaf in leaves.items():
            array = np.asarray(leaf)
            specs[name], store = _create_array(directory, f"target.{name.replace('/', '.')}", array)
            window.make_room(array.nbytes)

            def finish(future: Any, nbytes: int = array.nbytes) -> None:
                future.result()
                advance(nbytes)

            window.add(store.write(array), array.nbytes, finish)
        window.finish()
    return specs


def _create_array(directory: str, name: str, array: np.ndarray) -> tuple[dict[str, Any], ts.TensorStore]:
    """Creates the still empty zarr array directory/name; returns its spec for the index, and the array.

    The spec's path is relative to the checkpoint, so that a checkpoint can be moved.
    """
    spec = {
        "driver": "zarr",
        "dtype": array.dtype.name,
        "kvstore": {"driver": "file", "path": name},
        "metadata": {
            "compressor": {"id": "gzip"},
            "shape": list(array.shape),
            "chunks": _chunk_shape(array.shape, _CHUNK_BYTES // array.dtype.itemsize),
        },
    }
    place = {"driver": "file", "path": f"{directory}/{name}"}
    return ts.Spec(spec).to_json(), ts.open(spec | {"kvstore": place}, create=True).result()


def _chunk_shape(shape: tuple[int, ...], max_elements: int) -> list[int]:
    """Cuts whichever axis is largest into one more equal part until a chunk is small enough."""
    chunk = list(shape)
    while math.prod(chunk) > max_elements:
        axis = max(range(len(chunk)), key=chunk.__getitem__)
        chunk[axis] = next(size for size in range(chunk[axis] - 1, 0, -1) if shape[axis] % size == 0)
    return chunk

"""Reads the arrays of a T5X checkpoint: concurrently, and with little memory besides the result.

An array is read chunk by chunk. Each chunk is cast on its own and copied to its place in the result, and
chunks are requested only while those not yet copied stay below `MAX_BYTES_IN_FLIGHT`.
"""

import collections
import contextlib
import io
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from specdec_jax.checkpoints.msgpack_index import Inlined
from specdec_jax.checkpoints.t5x_index import CheckpointError, Stored, first_line, refuse_uint16

MAX_BYTES_IN_FLIGHT = 192 * 2**20
"""Decoded bytes of chunks under way; what tensorstore needs besides makes it up to three times that.

A single chunk above this is let in alone. T5X and `save_checkpoint` keep chunks to 64 MiB."""

_PIECE_BYTES = 64 * 2**20  # an array in the index is read in pieces of this size
_SECONDS_WITHOUT_BAR = 2.0


class StoredArray(NamedTuple):
    """A parameter whose metadata is read and checked, ready to be read itself.

    Attributes:
      name: the parameter.
      file: the file or directory that holds it, for messages.
      source: an open TensorStore, or the place inside the index.
      shape: its shape as stored.
      dtype: its dtype as stored.
    """

    name: str
    file: str
    source: ts.TensorStore | Inlined
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Decoded size, as stored."""
        return math.prod(self.shape) * self.dtype.itemsize


def open_arrays(parameters: Mapping[str, Stored]) -> list[StoredArray]:
    """Reads the metadata of every array, all at once.

    Raises:
      CheckpointError: an array is missing, its metadata is damaged or contradicts the index, or it is not of
        floating-point numbers.
    """
    context = ts.Context({"file_io_concurrency": {"limit": 128}})
    stores = {
        name: ts.open(stored.source, read=True, context=context)
        for name, stored in parameters.items()
        if isinstance(stored.source, dict)
    }
    return [_check_metadata(name, stored, stores.get(name)) for name, stored in parameters.items()]


def _check_metadata(name: str, stored: Stored, future: Any) -> StoredArray:
    where = f"{stored.file}: parameter {name}"
    if isinstance(stored.source, Inlined):
        array = StoredArray(name, stored.file, stored.source, stored.source.shape, stored.source.dtype)
    else:
        store = _opened(future, where, stored.source["kvstore"]["driver"])
        array = StoredArray(name, stored.file, store, tuple(store.shape), store.dtype.numpy_dtype)
    if stored.shape is not None and stored.shape != array.shape:
        raise CheckpointError(f"{where} has shape {list(array.shape)}, where the index says {list(stored.shape)}.")
    refuse_uint16(where, array.dtype.name)
    if array.dtype.name not in ("float32", "bfloat16", "float16", "float64"):
        raise CheckpointError(f"{where} is {array.dtype.name}, which is no floating-point type.")
    return array


def _opened(future: Any, where: str, driver: str) -> ts.TensorStore:
    try:
        return future.result()
    except ValueError as error:
        if not str(error).startswith("NOT_FOUND"):
            raise CheckpointError(f"{where}: the array cannot be opened: {first_line(error)}.") from error
        place = "the OCDBT store" if driver == "ocdbt" else "the checkpoint (no such directory, or no .zarray)"
        raise CheckpointError(f"{where}: the array is missing from {place}.") from error


def check_chunks(arrays: list[StoredArray]) -> None:
    """Checks that every chunk exists, because tensorstore reads a chunk that does not as zeros, silently.

    An array with a declared fill value may leave out chunks that consist of it; T5X and Orbax declare none.

    Raises:
      CheckpointError: a chunk is missing, or the chunks cannot be listed.
    """
    stores = [(array, array.source) for array in arrays if not isinstance(array.source, Inlined)]
    queries = [
        (array, store, store.storage_statistics(query_fully_stored=True))  # all at once
        for array, store in stores
        if store.fill_value is None
    ]
    for array, store, future in queries:
        where = f"{array.file}: parameter {array.name}"
        try:
            missing = [] if future.result().fully_stored else _missing_chunks(store)
        except ValueError as error:
            raise CheckpointError(f"{where}: its chunks cannot be listed: {first_line(error)}.") from error
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(f"{where}: chunk {missing[0]}{more} is missing; the checkpoint is incomplete.")


def _missing_chunks(store: ts.TensorStore) -> list[str]:
    """Keys of an incomplete array's missing chunks; "?" for zarr version 3, which names them otherwise."""
    spec = store.spec().to_json()
    metadata = spec["metadata"]
    if metadata.get("zarr_format") != 2:
        return ["?"]
    present = {key.decode() for key in ts.KvStore.open(spec["kvstore"]).result().list().result()}
    sizes = zip(metadata["shape"], metadata["chunks"], strict=True)
    grid = itertools.product(*(range(-(-size // chunk)) for size, chunk in sizes))
    keys = (metadata["dimension_separator"].join(map(str, place)) or "0" for place in grid)  # "0": a scalar's
    return [key for key in keys if key not in present]


def read_array(
    array: StoredArray,
    out: np.ndarray,
    index_file: io.BufferedIOBase,
    window: "Window",
    advance: Callable[[int], None],
) -> None:
    """Reads one array into `out`, cast to out's dtype; chunks may still be on their way when this returns.

    Args:
      array: what to read.
      out: array of the stored shape to read into, not necessarily contiguous.
      index_file: the open index, which holds the arrays inlined in it.
      window: bounds the bytes in flight; `out` is complete after its `finish`.
      advance: called with the number of decoded bytes after each chunk.

    Raises:
      CheckpointError: a chunk is damaged.
    """
    if isinstance(array.source, Inlined):
        _read_inlined(array, array.source, out, index_file, advance)
        return
    cast = ts.cast(array.source, ts.dtype(out.dtype))
    for region in _chunks(array.shape, array.source.chunk_layout.read_chunk_template.shape):
        nbytes = math.prod(part.stop - part.start for part in region) * array.dtype.itemsize
        window.make_room(nbytes)

        def finish(future: Any, region: tuple[slice, ...] = region, nbytes: int = nbytes) -> None:
            try:
                out[region] = future.result()
            except ValueError as error:
                raise CheckpointError(
                    f"{array.file}: parameter {array.name}: a chunk cannot be read: {first_line(error)}."
                ) from error
            advance(nbytes)

        window.add(cast[region].read(), nbytes, finish)


def _chunks(shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """The slices of all chunks, in C order; one empty tuple for a scalar."""
    starts = (range(0, size, chunk) for size, chunk in zip(shape, chunk_shape, strict=True))
    for place in itertools.product(*starts):
        yield tuple(
            slice(start, min(start + chunk, size)) for start, chunk, size in zip(place, chunk_shape, shape, strict=True)
        )


def _read_inlined(
    array: StoredArray,
    place: Inlined,
    out: np.ndarray,
    file: io.BufferedIOBase,
    advance: Callable[[int], None],
) -> None:
    """Reads an array that lies in the index, piece by piece."""
    flat = out.reshape(-1) if out.flags.c_contiguous else np.empty(out.size, out.dtype)
    done = 0
    for offset, nbytes in place.pieces:
        file.seek(offset)
        for start in range(0, nbytes, _PIECE_BYTES):
            piece = np.frombuffer(file.read(min(_PIECE_BYTES, nbytes - start)), place.dtype)
            flat[done : done + piece.size] = piece
            done += piece.size
            advance(piece.nbytes)
    if done != out.size:
        raise CheckpointError(f"{array.file}: parameter {array.name} has {done} elements, not {out.size}.")
    if not out.flags.c_contiguous:
        out[...] = flat.reshape(out.shape)


class Window:
    """Requests under way, oldest first, bounded by their bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._pending: collections.deque[tuple[Any, int, Callable[[Any], None]]] = collections.deque()

    def make_room(self, nbytes: int) -> None:
        """Finishes the oldest until `nbytes` more fit; more than the bound are let in alone."""
        while self._pending and self._bytes + nbytes > self._max_bytes:
            self._finish_oldest()

    def add(self, future: Any, nbytes: int, finish: Callable[[Any], None]) -> None:
        """Adds a request; `finish` is called with its future when its turn comes."""
        self._pending.append((future, nbytes, finish))
        self._bytes += nbytes

    def finish(self) -> None:
        """Finishes everything."""
        while self._pending:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        future, nbytes, finish = self._pending.popleft()
        finish(future)
        self._bytes -= nbytes


@contextlib.contextmanager
def progress_bar(title: str, total: int, *, enabled: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar in bytes on stderr, which appears if the work takes over two seconds.

    Args:
      title: what is being done.
      total: bytes in all.
      enabled: False to show nothing.

    Yields:
      A function to call with the bytes done since its last call.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task(title, total=total)
    begin = time.monotonic()
    is_shown = False

    def advance(nbytes: int) -> None:
        nonlocal is_shown
        bar.advance(task, nbytes)
        if enabled and not is_shown and time.monotonic() - begin > _SECONDS_WITHOUT_BAR:
            bar.start()
            is_shown = True

    try:
        yield advance
    finally:
        if is_shown:
            bar.stop()

"""Finds a T5X checkpoint's index, in whichever of its forms, and says where each parameter is stored.

    checkpoint_N/checkpoint        native: msgpack; its leaves are tensorstore specs or the arrays themselves
    checkpoint_N/state/_METADATA   Orbax: JSON, beside an OCDBT store (or one zarr directory per array)
    checkpoint_N/state/checkpoint  older Orbax: msgpack; its leaves are "PLACEHOLDER://name"

Only names, shapes and places are read here.
"""

import contextlib
import io
import json
import os
import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import tensorstore as ts

from specdec_jax.checkpoints import msgpack_index
from specdec_jax.checkpoints.msgpack_index import Inlined

_INDEX_FILES = ("state/_METADATA", "state/checkpoint", "checkpoint", "_METADATA")
_PLACEHOLDER = "PLACEHOLDER://"
_RETRIES = 4  # of finding the index in a bucket: about 15 s, where tensorstore's own limit is many minutes


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written; the message, of one line, names the file and what is wrong."""


class Directory(NamedTuple):
    """A local directory, or one in a Cloud Storage bucket.

    Attributes:
      path: the path, inside the bucket if there is one.
      bucket: name of the bucket, None for a local directory.
    """

    path: str
    bucket: str | None = None

    def __str__(self) -> str:  # as the caller wrote it
        return self.path if self.bucket is None else f"gs://{self.bucket}/{self.path}"

    def __truediv__(self, name: str) -> "Directory":
        return self._replace(path=posixpath.join(self.path, name).rstrip("/"))

    def kvstore(self) -> dict[str, Any]:
        """The tensorstore key-value store whose keys are the names of this directory's files."""
        path = self.path.rstrip("/") + "/"
        if self.bucket is None:
            return {"driver": "file", "path": path}
        return {"driver": "gcs", "bucket": self.bucket, "path": path.lstrip("/")}


class Stored(NamedTuple):
    """Where one parameter is.

    Attributes:
      file: the file or directory that holds it, for messages.
      source: a tensorstore spec, or the place inside the index.
      shape: the shape the index gives, None if it gives none (Orbax).
    """

    file: str
    source: dict[str, Any] | Inlined
    shape: tuple[int, ...] | None


class Index(NamedTuple):
    """What a checkpoint holds.

    Attributes:
      path: the index file, for messages.
      file: the index file, open.
      parameters: where each parameter of `target` is, by its name ("encoder/layers_0/mlp/wo/kernel").
    """

    path: str
    file: io.BufferedIOBase
    parameters: dict[str, Stored]


def parse_path(path: str | os.PathLike[str]) -> Directory:
    """A path, local or gs://bucket/path, as a Directory."""
    text = os.fspath(path)
    remote = re.fullmatch(r"gs://([^/]+)/*(.*)", text, re.DOTALL)
    if remote:
        return Directory(remote[2].rstrip("/"), remote[1])
    return Directory(os.path.abspath(os.path.expanduser(text)))


def list_steps(directory: str | os.PathLike[str]) -> list[int]:
    """The steps of the finished checkpoints in a run directory, in ascending order.

    Args:
      directory: the directory that holds checkpoint_<step> directories, local or gs://bucket/path.

    Raises:
      CheckpointError: the directory does not exist, or its bucket cannot be listed.
    """
    place = parse_path(directory)
    if place.bucket is None:
        try:
            names = [entry.name for entry in os.scandir(place.path) if entry.is_dir()]
        except OSError as error:
            raise CheckpointError(f"{place}: no such directory ({error.strerror}).") from error
    else:
        with _readable(place):
            names = [key.decode().split("/")[0] for key in ts.KvStore.open(place.kvstore()).result().list().result()]
    steps = (re.fullmatch(r"checkpoint_(\d+)", name) for name in set(names))
    return sorted(int(step[1]) for step in steps if step)


@contextlib.contextmanager
def open_index(path: str | os.PathLike[str]) -> Iterator[Index]:
    """Opens a checkpoint's index; the file stays open inside the `with`, for the arrays inlined in it.

    Args:
      path: checkpoint_N, its `state` directory, or the index file itself; local or gs://bucket/path.

    Raises:
      CheckpointError: there is no checkpoint at `path`, or its index is damaged or of an unknown kind.
    """
    directory, name, file = _find_index(path)
    with file:
        is_json = posixpath.basename(name) == "_METADATA"
        index_path = str(directory / name)
        directory = directory / posixpath.dirname(name)
        try:
            tree = json.loads(file.read()) if is_json else msgpack_index.read_tree(file)
            if not isinstance(tree, dict):
                raise ValueError("it holds no dict")
        except ValueError as error:
            kind = "JSON" if is_json else "msgpack"
            file.seek(0)
            if file.read(22) == b"model_checkpoint_path:":
                kind = "msgpack but that of a TensorFlow checkpoint; convert it with T5X first"
            raise CheckpointError(f"{index_path}: the index is not {kind}: {error}.") from error
        parameters = _orbax(tree, directory, index_path) if is_json else _msgpack(tree, directory, index_path)
        if not parameters:
            raise CheckpointError(f"{index_path}: its 'target' holds no parameters.")
        yield Index(index_path, file, parameters)


def _find_index(path: str | os.PathLike[str]) -> tuple[Directory, str, io.BufferedIOBase]:
    """The directory, the index file's name in it, and that file, open."""
    place = parse_path(path)
    names = _INDEX_FILES
    is_file = os.path.isfile(place.path) if place.bucket is None else place.path.endswith(("/checkpoint", "_METADATA"))
    if is_file:
        names, place = (posixpath.basename(place.path),), place._replace(path=posixpath.dirname(place.path))
    elif place.bucket is None and not os.path.isdir(place.path):
        raise CheckpointError(f"{place}: no such directory.")
    for name in names:
        file = _open_file(place, name)
        if file is not None:
            return place, name, file
    if is_file:
        raise CheckpointError(f"{place / names[0]}: no such file.")
    if steps := list_steps(str(place)):
        raise CheckpointError(
            f"{place}: this is a run directory with the steps {steps}, not a checkpoint; pass one of its "
            f"checkpoints, such as {place}/checkpoint_{steps[-1]}."
        )
    raise CheckpointError(f"{place}: no checkpoint here; neither {' nor '.join(_INDEX_FILES)} exists.")


def _open_file(directory: Directory, name: str) -> io.BufferedIOBase | None:
    """The file, open for reading; None if there is no such file."""
    if directory.bucket is None:
        path = posixpath.join(directory.path, name)
        return open(path, "rb") if os.path.isfile(path) else None
    spec = directory.kvstore() | {"gcs_request_retries": {"max_retries": _RETRIES}}
    with _readable(directory):
        result = ts.KvStore.open(spec).result().read(name).result()
    return io.BytesIO(result.value) if result.state == "value" else None


@contextlib.contextmanager
def _readable(place: Directory) -> Iterator[None]:
    """Turns tensorstore's errors, all of which are ValueErrors, into a CheckpointError."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(f"{place}: cannot be read: {first_line(error)}.") from error


def first_line(error: Exception) -> str:
    """What tensorstore's message says, without the specs and source locations it appends."""
    return re.split(r" \[(?:tensorstore_spec|source)|\n", str(error))[0].rstrip(".")


def _msgpack(tree: Mapping[str, Any], directory: Directory, index_path: str) -> dict[str, Stored]:
    """The parameters of a msgpack index: T5X's native one, or older Orbax's."""
    version = tree.get("version", 3)
    if version not in (2, 3):
        raise CheckpointError(f"{index_path}: the index has version {version}; only versions 2 and 3 are known.")
    roots = (tree, tree.get("optimizer"), tree.get("_optimizer"))
    targets = [root["target"] for root in roots if isinstance(root, dict) and isinstance(root.get("target"), dict)]
    if not targets:
        raise CheckpointError(f"{index_path}: the index has no 'target' among its keys {sorted(map(str, tree))}.")
    is_ocdbt = _is_ocdbt(directory)
    parameters = {}
    for name, leaf in _flatten(targets[0]):
        if isinstance(leaf, Inlined):
            refuse_uint16(f"{index_path}: parameter {name}", leaf.dtype.name)
            parameters[name] = Stored(index_path, leaf, leaf.shape)
        elif isinstance(leaf, str) and leaf.startswith(_PLACEHOLDER):
            parameters[name] = _orbax_array(directory, leaf.removeprefix(_PLACEHOLDER), "zarr", is_ocdbt)
        elif isinstance(leaf, dict):
            parameters[name] = _native_array(directory, leaf, f"{index_path}: parameter {name}")
        else:
            raise CheckpointError(f"{index_path}: parameter {name} is {str(leaf)[:40]!r}, which is no array.")
    return parameters


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name, leaf) of a nested dict; a tensorstore spec, which is a dict too, is a leaf."""
    for key, value in tree.items():
        if isinstance(value, dict) and "kvstore" not in value:
            yield from _flatten(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def _native_array(directory: Directory, spec: Mapping[str, Any], where: str) -> Stored:
    """An array behind a tensorstore spec, whose path is relative to the checkpoint.

    The spec's kvstore driver says where the checkpoint was written, not where it is now, so it is replaced;
    chunks and compressor are read from the array's own metadata.
    """
    kvstore, metadata = spec["kvstore"], spec.get("metadata", {})
    driver = kvstore.get("driver")
    if spec.get("driver") != "zarr" or driver not in ("file", "gfile", "gcs"):
        raise CheckpointError(
            f"{where} is stored by the driver {spec.get('driver')!r} in {driver!r}; known are 'zarr' in "
            "'file', 'gfile' and 'gcs'."
        )
    refuse_uint16(where, spec.get("dtype"), metadata.get("dtype"))
    path = kvstore.get("path", spec.get("path"))  # tensorstore before 0.1.14 has it at the top level
    if path is None:
        raise CheckpointError(f"{where} has no 'path' in its tensorstore spec.")
    place = directory / path
    shape = tuple(metadata["shape"]) if "shape" in metadata else None
    return Stored(str(place), {"driver": "zarr", "kvstore": place.kvstore()}, shape)


def refuse_uint16(where: str, *dtypes: str | None) -> None:
    """Raises a CheckpointError if one of the dtypes of the parameter `where` is uint16."""
    if {"uint16", "<u2"} & set(dtypes):
        raise CheckpointError(
            f"{where} is uint16: version 2 of the format kept bfloat16 that way, which T5X refuses too; use "
            "a checkpoint saved in float32, or one saved again as version 3."
        )


def _orbax(tree: Mapping[str, Any], directory: Directory, index_path: str) -> dict[str, Stored]:
    """The parameters of an Orbax `_METADATA`."""
    is_ocdbt = _is_ocdbt(directory)
    parameters = {}
    try:
        driver = "zarr3" if tree.get("use_zarr3") else "zarr"
        for entry in tree["tree_metadata"].values():
            keys = [str(part["key"]) for part in entry["key_metadata"]]
            is_array = entry["value_metadata"]["value_type"] in (
                "jax.Array",
                "np.ndarray",
            )  # else an empty subtree
            if keys[0] == "target" and is_array:
                parameters["/".join(keys[1:])] = _orbax_array(directory, ".".join(keys), driver, is_ocdbt)
    except (KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{index_path}: this is not Orbax's metadata ({type(error).__name__}: {error})."
        ) from error
    return parameters


def _is_ocdbt(directory: Directory) -> bool:
    """Whether Orbax keeps all arrays of this directory in one OCDBT store."""
    manifest = _open_file(directory, "manifest.ocdbt")
    if manifest is not None:
        manifest.close()
    return manifest is not None


def _orbax_array(directory: Directory, name: str, driver: str, is_ocdbt: bool) -> Stored:
    """An array in the directory's OCDBT store, or in a directory of its own."""
    place = directory / name
    kvstore = place.kvstore()
    if is_ocdbt:
        kvstore = {"driver": "ocdbt", "base": directory.kvstore(), "path": f"{name}/"}
    return Stored(str(place), {"driver": driver, "kvstore": kvstore}, None)

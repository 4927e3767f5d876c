"""Reads and writes T5 checkpoints of Hugging Face's transformers, without transformers and PyTorch.

    params = load_params("flan-t5-small", dtype=jnp.bfloat16)  # a directory: config.json, model.safetensors
    model = T5(read_config("flan-t5-small"))
    save_checkpoint("/tmp/t5", params, model.config)

T5 1.0, T5 1.1, Flan-T5, ByT5 and mT5; weights as safetensors, in one file or in shards with an index. Vocabularies
are none of its business: what is written has no tokenizer files, and a spiece.model found is left alone.
"""

import dataclasses
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.checkpoints import huggingface_config, huggingface_tree, safetensors_format, t5x_arrays, t5x_tree
from specdec_jax.checkpoints.safetensors_format import StoredTensor
from specdec_jax.checkpoints.t5x_index import CheckpointError, parse_path
from specdec_jax.models.t5_config import T5Config
from specdec_jax.types import Params

__all__ = ["CheckpointError", "is_checkpoint", "load_params", "read_config", "save_checkpoint"]

_WEIGHTS = "model.safetensors"
_INDEX = f"{_WEIGHTS}.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")  # not read: unpickling runs whatever is in a file


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a local directory with the files of a Hugging Face checkpoint, be they whole or not."""
    place = parse_path(path)
    names = (huggingface_config.CONFIG, _WEIGHTS, _INDEX, *_PICKLED)
    return place.bucket is None and any(os.path.isfile(os.path.join(place.path, name)) for name in names)


def read_config(directory: str | os.PathLike[str], *, expected: T5Config | None = None) -> T5Config:
    """Reads a checkpoint's sizes from its config.json.

    Args:
      directory: the checkpoint, a local directory.
      expected: what they have to be, dtype apart; None checks nothing.

    Returns:
      The sizes; the dtype is T5Config's default, whatever the weights are stored as.

    Raises:
      CheckpointError: there is no checkpoint, its config.json is damaged or not that of a T5 that this package knows,
        or it is not what is expected.
    """
    place = _find(directory)
    config = huggingface_config.read(place).config
    for field in dataclasses.fields(config) if expected is not None else ():
        found, wanted = getattr(config, field.name), getattr(expected, field.name)
        if found != wanted and field.name != "dtype":
            raise CheckpointError(
                f"{place}: config.json says that {field.name} is {found}, where {wanted} is expected."
            )
    return config


def load_params(
    directory: str | os.PathLike[str], *, dtype: Any = None, expected: Params | None = None, progress: bool = True
) -> Params:
    """Reads a checkpoint's parameters.

    They are read one by one, so that peak memory is the size of the result plus the largest of them.

    Args:
      directory: the checkpoint, a local directory.
      dtype: floating-point dtype of the result, such as jnp.bfloat16; None keeps each tensor's own, but reads float16
        as float32, since a T5 overflows in float16.
      expected: nested dict of jax.ShapeDtypeStruct, from `T5(config).param_shapes()`. Names and shapes are
        checked against it before any tensor is read; its dtypes are not. Those that config.json implies are checked
        in any case.
      progress: show a progress bar on stderr if reading takes over two seconds.

    Returns:
      Nested dict of numpy arrays (bfloat16 is ml_dtypes'), named and shaped as `t5x.load_params` returns them.

    Raises:
      ValueError: `dtype` is no floating-point type.
      CheckpointError: there is no checkpoint, it is damaged, has no safetensors, or is not the one expected.
    """
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype is {jnp.dtype(dtype).name}; parameters are read as float32 or bfloat16.")
    place = _find(directory)
    config, may_tie_logits = huggingface_config.read(place)
    tensors = huggingface_tree.tensors(config)
    stored = huggingface_tree.untie(_list_tensors(place), config, place, may_tie_logits=may_tie_logits)
    huggingface_tree.check_tensors(stored, tensors.values(), place)
    if expected is not None:
        shapes = {name: tuple(leaf.shape) for name, leaf in t5x_tree.flatten(expected).items()}
        t5x_tree.check_expected({name: tensor.shape for name, tensor in tensors.items()}, shapes, place)

    leaves: dict[str, np.ndarray] = {}
    total = sum(tensor.nbytes for tensor in stored.values())
    with t5x_arrays.progress_bar(f"Reading {os.path.basename(place)}", total, enabled=progress) as advance:
        for name, tensor in tensors.items():
            array = stored[tensor.name].read()
            own = jnp.float32 if array.dtype == jnp.float16 else array.dtype
            leaves[name] = np.ascontiguousarray(array.T if tensor.is_transposed else array, jnp.dtype(dtype or own))
            advance(array.nbytes)
    return t5x_tree.unflatten(leaves)


def _find(directory: str | os.PathLike[str]) -> str:
    """The checkpoint's path, once it is a directory with a config.json."""
    place = parse_path(directory)
    if place.bucket is not None:
        raise CheckpointError(f"{place}: Hugging Face checkpoints are not read from a bucket; copy it to a directory.")
    if not os.path.isdir(place.path):
        raise CheckpointError(
            f"{place}: no such directory; download a model of the Hugging Face Hub first: hf download NAME --local-dir "
            "DIRECTORY."
        )
    if not os.path.isfile(os.path.join(place.path, huggingface_config.CONFIG)):
        raise CheckpointError(
            f"{place}: there is no config.json here; pass the directory of a Hugging Face checkpoint."
        )
    return place.path


def _list_tensors(place: str) -> dict[str, StoredTensor]:
    """Where every tensor of a checkpoint is; like transformers, looks for a single file first."""
    weights, index = os.path.join(place, _WEIGHTS), os.path.join(place, _INDEX)
    if os.path.isfile(weights):
        return safetensors_format.read_header(weights)
    if not os.path.isfile(index):
        hint = ""
        if any(os.path.isfile(os.path.join(place, name)) for name in _PICKLED):
            hint = (
                " There is a pytorch_model.bin, which is not read; save it as safetensors: "
                "model.save_pretrained(dir, safe_serialization=True)."
            )
        raise CheckpointError(f"{place}: neither {_WEIGHTS} nor {_INDEX} is here.{hint}")
    places = _read_index(index)
    shards = {}
    for file in sorted(set(places.values())):
        path = os.path.join(place, file)
        if not os.path.isfile(path):
            raise CheckpointError(f"{path}: this shard, which {_INDEX} names, is missing; download it again.")
        shards[file] = safetensors_format.read_header(path)
    for name, file in places.items():
        if name not in shards[file]:
            raise CheckpointError(f"{os.path.join(place, file)}: has no tensor {name}, which {_INDEX} says is there.")
    return {name: shards[file][name] for name, file in places.items()}


def _read_index(path: str) -> dict[str, str]:
    """The shard of every tensor."""
    try:
        with open(path, encoding="utf-8") as file:
            places = json.load(file)["weight_map"]
        if not all(isinstance(file, str) for file in places.values()):
            raise TypeError("weight_map has to hold names of files")
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: the index is damaged ({type(error).__name__}: {error}).") from error
    return places


def save_checkpoint(
    directory: str | os.PathLike[str],
    params: Params,
    config: T5Config,
    *,
    dtype: Any = None,
    max_shard_bytes: int = 5 * 10**9,
    eos_id: int = 1,
    progress: bool = True,
) -> str:
    """Writes a checkpoint that transformers' T5ForConditionalGeneration.from_pretrained reads.

    The checkpoint gets its name only once complete. It has no tokenizer files; to use AutoTokenizer, add those of the
    model's vocabulary.

    Args:
      directory: the checkpoint, a local directory that is not there yet.
      params: nested dict of float32 or bfloat16 arrays (numpy or jax), as T5X's plain T5 names them.
      config: the model; its dtype is not used.
      dtype: float32 or bfloat16, what to write them as; None keeps each array's own.
      max_shard_bytes: parameters beyond this are written to several files, each at most this large unless a single
        parameter is larger.
      eos_id: the end-of-sequence token; the padding is 0, and the decoder's start token config.start_id.
      progress: show a progress bar on stderr if writing takes over two seconds.

    Returns:
      The path of the checkpoint.

    Raises:
      CheckpointError: the directory is remote or exists, the parameters are not those of `config`, a parameter has
        another dtype, or Hugging Face's T5 has nothing like this model.
      ValueError: `dtype`, `max_shard_bytes` or `eos_id` is out of range.
    """
    place = parse_path(directory)
    if place.bucket is not None:
        raise CheckpointError(f"{place}: writing to a bucket is not supported; write to a local directory and copy it.")
    final = place.path
    if os.path.lexists(final):
        raise CheckpointError(f"{final}: already exists; remove it or choose another directory.")
    if dtype is not None and jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"dtype is {jnp.dtype(dtype).name}; parameters are written as float32 or bfloat16.")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes}; it must be 1 or more.")
    if not 0 <= eos_id < config.vocab_size:
        raise ValueError(f"eos_id is {eos_id}; it must be an id of the vocabulary, 0 to {config.vocab_size - 1}.")
    leaves = t5x_tree.flatten(params)
    tensors = _check_writable(leaves, config, final)

    sources = {tensor.name: (leaves[name], tensor.is_transposed) for name, tensor in tensors.items()}
    dtypes = {name: jnp.dtype(dtype or leaf.dtype) for name, (leaf, _) in sources.items()}
    nbytes = {name: sources[name][0].size * dtypes[name].itemsize for name in sorted(sources)}
    shards = _split(nbytes, max_shard_bytes)
    common = dtypes[huggingface_tree.EMBEDDING].name if len(set(dtypes.values())) == 1 else "float32"

    temporary = f"{final}.tmp-{secrets.token_hex(4)}"
    os.makedirs(temporary)
    try:
        huggingface_config.write(temporary, config, dtype=common, eos_id=eos_id)
        title = f"Writing {os.path.basename(final)}"
        with t5x_arrays.progress_bar(title, sum(nbytes.values()), enabled=progress) as advance:
            for file, names in shards.items():
                arrays = {name: _as_stored(*sources[name]) for name in names}
                safetensors_format.write_file(os.path.join(temporary, file), arrays, dtype, advance)
        if len(shards) > 1:
            _write_index(os.path.join(temporary, _INDEX), shards, sum(nbytes.values()))
        os.rename(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def _check_writable(leaves: Mapping[str, Any], config: T5Config, path: str) -> dict[str, huggingface_tree.Tensor]:
    """Checks that Hugging Face's T5 can be given these parameters; returns what it calls them."""
    if config.relpos_per_layer:
        raise CheckpointError(
            f"{path}: the model has a relative position bias per layer (scalable_t5; relpos_per_layer=True), which "
            "Hugging Face's T5 has not; write it in T5X's format."
        )
    try:
        huggingface_config.projection(config)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    tensors = huggingface_tree.tensors(config)
    expected = {name: tensor.shape for name, tensor in tensors.items()}
    t5x_tree.check_expected({name: tuple(leaf.shape) for name, leaf in leaves.items()}, expected, path)
    for name, leaf in leaves.items():
        if leaf.dtype not in (jnp.float32, jnp.bfloat16):
            raise CheckpointError(f"{path}: parameter {name} is {leaf.dtype}; only float32 and bfloat16 are written.")
    return tensors


def _split(nbytes: Mapping[str, int], max_bytes: int) -> dict[str, list[str]]:
    """The names in each file, in order, a new file being begun where the last one would become too large."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, more in nbytes.items():
        if shards[-1] and size + more > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += more
    if len(shards) == 1:
        return {_WEIGHTS: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, start=1)}


def _as_stored(leaf: np.ndarray | jax.Array, is_transposed: bool) -> np.ndarray:
    """A parameter the other way round if need be; of a numpy array, a view."""
    return np.asarray(leaf).T if is_transposed else np.asarray(leaf)


def _write_index(path: str, shards: Mapping[str, list[str]], total: int) -> None:
    places = {name: file for file, names in shards.items() for name in names}
    with open(path, "w", encoding="utf-8") as out:
        out.write(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n")

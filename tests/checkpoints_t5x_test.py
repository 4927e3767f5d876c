"""Tests of loading and saving: all formats give the same bits, and what is written is what T5X writes."""

import gzip
import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from flax import serialization
from t5x_checkpoints import (
    DRAFT,
    DRAFT_BF16,
    DRAFT_ORBAX,
    FIXTURES,
    QUERY,
    QUERY_DIRECTORY,
    SCALABLE,
    assert_same,
    copy,
    draft,
)

from specdec_jax.checkpoints import t5x, t5x_arrays
from specdec_jax.checkpoints.t5x import (
    CheckpointError,
    list_steps,
    load_params,
    save_checkpoint,
)
from specdec_jax.checkpoints.t5x_tree import flatten, unflatten


@pytest.mark.parametrize("model", ["mini_target", "mini_draft"])
def test_native_orbax_and_bfloat16_agree(model):
    directory = FIXTURES / model
    native = flatten(load_params(directory / "legacy_f32/checkpoint_1500"))
    assert {array.dtype.name for array in native.values()} == {"float32"}
    assert_same(flatten(load_params(directory / "orbax_f32/checkpoint_1500")), native)
    rounded = {name: array.astype(jnp.bfloat16) for name, array in native.items()}
    assert_same(flatten(load_params(directory / "legacy_bf16/checkpoint_1500")), rounded)
    assert_same(flatten(load_params(directory / "legacy_f32/checkpoint_1500", dtype=jnp.bfloat16)), rounded)
    assert_same(flatten(load_params(directory / "orbax_f32/checkpoint_1500", dtype="bfloat16")), rounded)


@pytest.mark.parametrize("path", [DRAFT, DRAFT_ORBAX, SCALABLE])
def test_shapes_are_those_of_what_is_read(path):
    shapes, arrays = flatten(t5x.read_shapes(path)), flatten(load_params(path))
    assert {name: leaf.shape for name, leaf in shapes.items()} == {name: leaf.shape for name, leaf in arrays.items()}
    with pytest.raises(CheckpointError, match="this is a T5 1.1 tree"):
        t5x.read_shapes(path, expected={"decoder": {"mlp": {"wi": {"kernel": np.zeros((1, 1))}}}})


def test_values_are_those_tensorstore_reads():
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(DRAFT / QUERY_DIRECTORY)}}
    np.testing.assert_array_equal(draft()[QUERY], ts.open(spec).result().read().result())
    assert np.std(draft()[QUERY]) > 0.01


@pytest.mark.parametrize(
    "path",
    [f"{DRAFT}/", DRAFT / "checkpoint", DRAFT_ORBAX, DRAFT_ORBAX / "state", DRAFT_ORBAX / "state/_METADATA"],
)
def test_ways_to_name_a_checkpoint(path):
    assert_same(flatten(load_params(path)), draft())


def test_optimizer_state_is_never_read(tmp_path):
    checkpoint = copy(tmp_path, SCALABLE)
    state = list(checkpoint.glob("state.*"))
    assert len(state) > 10
    for directory in state:
        shutil.rmtree(directory)
    assert_same(flatten(load_params(checkpoint)), flatten(load_params(SCALABLE)))


def test_dtype_that_is_no_float():
    with pytest.raises(ValueError, match="dtype is int8; parameters are read as float32 or bfloat16"):
        load_params(DRAFT, dtype=jnp.int8)


@pytest.mark.parametrize("source", [DRAFT, DRAFT_BF16, FIXTURES / "mini_target/legacy_bf16/checkpoint_1500"])
def test_written_as_t5x_writes_it(tmp_path, source):
    params = load_params(source)
    backwards = unflatten(dict(reversed(flatten(params).items())))
    path = Path(save_checkpoint(tmp_path / "run", backwards, step=1500))
    assert path == tmp_path / "run/checkpoint_1500"
    assert os.listdir(tmp_path / "run") == ["checkpoint_1500"]
    files = sorted(file.relative_to(source) for file in source.rglob("*") if file.is_file())
    assert sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file()) == files
    for file in files:
        written, reference = (path / file).read_bytes(), (source / file).read_bytes()
        if file.name not in ("checkpoint", ".zarray"):  # zlib versions differ in the compressed bytes
            written, reference = gzip.decompress(written), gzip.decompress(reference)
        assert written == reference, file


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_round_trip_in_many_chunks(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(t5x, "_CHUNK_BYTES", 500)
    monkeypatch.setattr(t5x_arrays, "MAX_BYTES_IN_FLIGHT", 1500)
    params = {name: jnp.asarray(array, dtype) for name, array in draft().items()}
    params["zeros"] = jnp.zeros((30, 30), dtype)  # every chunk of which has to be there
    path = Path(save_checkpoint(tmp_path, unflatten(params), step=3))
    assert len(list(path.glob("target.decoder.logits_dense.kernel/*.*"))) > 50
    assert_same(flatten(load_params(path)), {name: np.asarray(array) for name, array in params.items()})


def test_chunks_are_even_and_at_most_64_mib():
    assert t5x._chunk_shape((32, 48), 10_000) == [32, 48]
    assert t5x._chunk_shape((32128, 1024), 2**24) == [16064, 1024]  # 128 MiB of float32
    assert t5x._chunk_shape((250112, 4096), 2**24) == [3908, 4096]
    assert t5x._chunk_shape((7,), 6) == [1]
    assert t5x._chunk_shape((), 6) == []
    assert t5x._CHUNK_BYTES == 64 * 2**20


def test_existing_checkpoint_is_not_overwritten(tmp_path):
    params = {"a": np.ones(3, np.float32)}
    save_checkpoint(tmp_path, params, step=2)
    with pytest.raises(CheckpointError, match=r"checkpoint_2: already exists; remove it or choose another"):
        save_checkpoint(tmp_path, params, step=2)
    save_checkpoint(tmp_path, params, step=10)
    assert list_steps(tmp_path) == [2, 10]


def test_failed_write_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        assert [name.startswith("checkpoint_2.tmp-") for name in os.listdir(tmp_path)] == [True]
        raise OSError("disk full")

    monkeypatch.setattr(serialization, "msgpack_serialize", fail)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path, {"a": np.ones(3, np.float32)}, step=2)
    assert os.listdir(tmp_path) == []


def test_what_is_not_written(tmp_path):
    with pytest.raises(CheckpointError, match=r"checkpoint_2: parameter a/b is int32; only float32 and bfloat16"):
        save_checkpoint(tmp_path, {"a": {"b": np.ones(3, np.int32)}}, step=2)
    with pytest.raises(CheckpointError, match=r"gs://b/x: writing to a bucket is not supported"):
        save_checkpoint("gs://b/x", {"a": np.ones(3, np.float32)}, step=2)
    with pytest.raises(ValueError, match="step is -1"):
        save_checkpoint(tmp_path, {"a": np.ones(3, np.float32)}, step=-1)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("seconds", "progress", "is_shown"), [(-1, True, True), (60, True, False), (-1, False, False)])
def test_progress_goes_to_stderr(tmp_path, monkeypatch, capsys, seconds, progress, is_shown):
    monkeypatch.setattr(t5x_arrays, "_SECONDS_WITHOUT_BAR", seconds)
    save_checkpoint(tmp_path, unflatten(draft()), step=4, progress=progress)
    load_params(tmp_path / "checkpoint_4", progress=progress)
    output = capsys.readouterr()
    assert output.out == ""
    assert ("Writing checkpoint_4" in output.err) == is_shown
    assert ("Reading checkpoint_4" in output.err) == is_shown
    if not is_shown:
        assert output.err == ""

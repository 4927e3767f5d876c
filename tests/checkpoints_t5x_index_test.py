"""Tests of the index in all its forms: native and Orbax, old and new, local and in a bucket, and damaged."""

import io
import json
import os
import shutil

import jax.numpy as jnp
import pytest
import tensorstore as ts
from flax import serialization
from t5x_checkpoints import (
    DRAFT,
    DRAFT_ORBAX,
    QUERY,
    QUERY_DIRECTORY,
    assert_same,
    copy,
    draft,
    edit_index,
    message,
    single_file,
    specs_of,
)

from specdec_jax.checkpoints import t5x_arrays, t5x_index
from specdec_jax.checkpoints.t5x import CheckpointError, list_steps, load_params
from specdec_jax.checkpoints.t5x_tree import flatten, unflatten


def _gfile(spec):
    spec["kvstore"]["driver"] = "gfile"


def _gcs(spec):
    spec["kvstore"] |= {"driver": "gcs", "bucket": "t5x-dummy-bucket"}


def _path_at_top_level(spec):
    spec["path"] = spec["kvstore"].pop("path")


@pytest.mark.parametrize("change", [_gfile, _gcs, _path_at_top_level])
def test_spec_variants(tmp_path, change):
    checkpoint = copy(tmp_path)

    def edit(index):
        for spec in specs_of(index):
            change(spec)

    edit_index(checkpoint, edit)
    assert_same(flatten(load_params(checkpoint)), draft())


def test_version_2_of_float32(tmp_path):
    checkpoint = copy(tmp_path)
    edit_index(checkpoint, lambda index: index | {"version": 2})
    assert_same(flatten(load_params(checkpoint)), draft())


def test_some_arrays_inlined(tmp_path):
    checkpoint = copy(tmp_path)
    inlined = [name for name in draft() if name.endswith("scale")]

    def edit(index):
        for name in inlined:
            *parents, last = name.split("/")
            node = index["optimizer"]["target"]
            for parent in parents:
                node = node[parent]
            node[last] = draft()[name]
            shutil.rmtree(checkpoint / f"target.{name.replace('/', '.')}")

    assert inlined
    edit_index(checkpoint, edit)
    assert_same(flatten(load_params(checkpoint)), draft())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("wrap", [True, False])
def test_single_file(tmp_path, dtype, wrap):
    params = {name: array.astype(dtype) for name, array in draft().items()}
    single_file(tmp_path / "checkpoint", params, wrap)
    assert_same(flatten(load_params(tmp_path)), params)
    os.rename(tmp_path / "checkpoint", tmp_path / "small.checkpoint_0")
    assert_same(flatten(load_params(tmp_path / "small.checkpoint_0")), params)
    rounded = {name: array.astype(jnp.bfloat16) for name, array in params.items()}
    assert_same(flatten(load_params(tmp_path / "small.checkpoint_0", dtype=jnp.bfloat16)), rounded)


def test_arrays_that_flax_cut_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 1000)
    monkeypatch.setattr(t5x_arrays, "_PIECE_BYTES", 400)
    single_file(tmp_path / "checkpoint", draft())
    assert b"__msgpack_chunked_array__" in (tmp_path / "checkpoint").read_bytes()
    assert_same(flatten(load_params(tmp_path)), draft())


def orbax_stores(checkpoint):
    """Rewrites an OCDBT store as one zarr directory per array."""
    state = checkpoint / "state"
    ocdbt = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{state}/"}).result()
    files = {key.decode(): ocdbt.read(key).result().value for key in ocdbt.list().result()}
    for name in ["d", "ocdbt.process_0"]:
        shutil.rmtree(state / name)
    (state / "manifest.ocdbt").unlink()
    for name, content in files.items():
        (state / name).parent.mkdir(exist_ok=True)
        (state / name).write_bytes(content)


def placeholders():
    """The index of an older Orbax checkpoint."""
    names = {name: f"PLACEHOLDER://target.{name.replace('/', '.')}" for name in draft()}
    state = {"step": "PLACEHOLDER://state.step", "param_states": {}}
    return serialization.msgpack_serialize({"state": state, "target": unflatten(names), "flax_mutables": None})


def test_orbax_without_ocdbt(tmp_path):
    checkpoint = copy(tmp_path, DRAFT_ORBAX)
    orbax_stores(checkpoint)
    assert_same(flatten(load_params(checkpoint)), draft())


@pytest.mark.parametrize("is_ocdbt", [True, False])
def test_older_orbax(tmp_path, is_ocdbt):
    checkpoint = copy(tmp_path, DRAFT_ORBAX)
    if not is_ocdbt:
        orbax_stores(checkpoint)
    (checkpoint / "state/_METADATA").unlink()
    (checkpoint / "state/checkpoint").write_bytes(placeholders())
    assert_same(flatten(load_params(checkpoint)), draft())
    assert_same(flatten(load_params(checkpoint / "state")), draft())


def test_orbax_with_zarr_version_3(tmp_path):
    checkpoint = copy(tmp_path, DRAFT_ORBAX)
    metadata = json.loads((checkpoint / "state/_METADATA").read_text())
    (checkpoint / "state/_METADATA").write_text(json.dumps(metadata | {"use_zarr3": True}))
    for name in ["d", "ocdbt.process_0"]:
        shutil.rmtree(checkpoint / "state" / name)
    (checkpoint / "state/manifest.ocdbt").unlink()
    for name, array in draft().items():
        place = f"{checkpoint}/state/target.{name.replace('/', '.')}"
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": place}}
        store = ts.open(spec, create=True, dtype=ts.float32, shape=array.shape).result()
        store.write(array).result()
    assert_same(flatten(load_params(checkpoint)), draft())


@pytest.mark.parametrize("path", ["gs://b-1/runs/x/checkpoint_7", "gs://b-1/runs/x/checkpoint_7/checkpoint"])
def test_specs_of_a_bucket(monkeypatch, path):
    files = {"runs/x/checkpoint_7/checkpoint": (DRAFT / "checkpoint").read_bytes()}

    def open_file(directory, name):
        assert directory.bucket == "b-1"
        content = files.get(f"{directory.path}/{name}")
        return None if content is None else io.BytesIO(content)

    monkeypatch.setattr(t5x_index, "_open_file", open_file)
    with t5x_index.open_index(path) as index:
        stored = index.parameters[QUERY]
    kvstore = {"driver": "gcs", "bucket": "b-1", "path": f"runs/x/checkpoint_7/{QUERY_DIRECTORY}/"}
    assert stored.source == {"driver": "zarr", "kvstore": kvstore}
    assert ts.Spec(stored.source).to_json() == stored.source
    assert stored.shape == (32, 32)
    assert stored.file == f"gs://b-1/runs/x/checkpoint_7/{QUERY_DIRECTORY}"


def test_orbax_specs_of_a_bucket(monkeypatch):
    names = {"_METADATA", "manifest.ocdbt"}
    state = DRAFT_ORBAX / "state"

    def open_file(directory, name):
        name = os.path.relpath(f"{directory.path}/{name}", "runs/checkpoint_7/state")
        return io.BytesIO((state / name).read_bytes()) if name in names else None

    monkeypatch.setattr(t5x_index, "_open_file", open_file)
    with t5x_index.open_index("gs://b-1/runs/checkpoint_7/") as index:
        source = index.parameters[QUERY].source
    base = {"driver": "gcs", "bucket": "b-1", "path": "runs/checkpoint_7/state/"}
    assert source["kvstore"] == {"driver": "ocdbt", "base": base, "path": f"{QUERY_DIRECTORY}/"}


def test_a_bucket_that_does_not_answer(monkeypatch):
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "token")
    monkeypatch.setattr(t5x_index, "_RETRIES", 0)
    message = "gs://b-1/runs/checkpoint_7: cannot be read: ABORTED: All 0 retry attempts failed: .*Could not connect"
    with pytest.raises(CheckpointError, match=message):
        load_params("gs://b-1/runs/checkpoint_7")


def test_no_such_directory(tmp_path):
    assert "no such directory" in message(tmp_path / "checkpoint_3")


def test_a_directory_without_a_checkpoint(tmp_path):
    (tmp_path / "events").mkdir()
    (tmp_path / "checkpoint_9.tmp-123").mkdir()
    assert "no checkpoint here" in message(tmp_path)


def test_a_run_directory(tmp_path):
    for name in ["checkpoint_200", "checkpoint_1000", "checkpoint_5000.tmp-8", "train"]:
        (tmp_path / name).mkdir()
    assert list_steps(tmp_path) == [200, 1000]
    text = message(tmp_path)
    assert "run directory with the steps [200, 1000]" in text
    assert f"such as {tmp_path}/checkpoint_1000." in text


def test_list_steps_of_no_directory(tmp_path):
    with pytest.raises(CheckpointError, match="no such directory"):
        list_steps(tmp_path / "nothing")


@pytest.mark.parametrize("content", [b"", b"hello world", b"\x93\x01\x02\x03", b"\xc1", b"\x91" * 5000, b"\x81\xa1"])
def test_index_that_is_not_msgpack(tmp_path, content):
    checkpoint = copy(tmp_path)
    (checkpoint / "checkpoint").write_bytes(content)
    assert "checkpoint: the index is not msgpack" in message(checkpoint)


def test_index_of_tensorflow(tmp_path):
    checkpoint = copy(tmp_path)
    (checkpoint / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-0"\n')
    assert "TensorFlow checkpoint" in message(checkpoint)


@pytest.mark.parametrize("keep", [0.01, 0.3, 0.999])
def test_truncated_index(tmp_path, keep):
    checkpoint = copy(tmp_path)
    content = (checkpoint / "checkpoint").read_bytes()
    (checkpoint / "checkpoint").write_bytes(content[: int(len(content) * keep)])
    assert "it ends in the middle" in message(checkpoint)
    single_file(tmp_path / "checkpoint", draft())
    content = (tmp_path / "checkpoint").read_bytes()
    (tmp_path / "checkpoint").write_bytes(content[: int(len(content) * keep)])
    assert "it ends in the middle" in message(tmp_path)


def test_index_without_parameters(tmp_path):
    checkpoint = copy(tmp_path)
    edit_index(checkpoint, lambda index: {"version": 3, "optimizer": {"state": {}}})
    assert "no 'target' among its keys ['optimizer', 'version']" in message(checkpoint)
    edit_index(checkpoint, lambda index: {"version": 3, "optimizer": {"target": {}}})
    assert "holds no parameters" in message(checkpoint)


@pytest.mark.parametrize("version", [1, 4])
def test_unknown_version(tmp_path, version):
    checkpoint = copy(tmp_path)
    edit_index(checkpoint, lambda index: index | {"version": version})
    assert f"version {version}; only versions 2 and 3" in message(checkpoint)


def test_unknown_driver(tmp_path):
    checkpoint = copy(tmp_path)

    def edit(index):
        for spec in specs_of(index):
            spec["kvstore"]["driver"] = "s3"

    edit_index(checkpoint, edit)
    assert "'zarr' in 's3'" in message(checkpoint)


def test_damaged_orbax_metadata(tmp_path):
    checkpoint = copy(tmp_path, DRAFT_ORBAX)
    os.truncate(checkpoint / "state/_METADATA", 500)
    assert "_METADATA: the index is not JSON" in message(checkpoint)
    (checkpoint / "state/_METADATA").write_text("[1]")
    assert "_METADATA: the index is not JSON: it holds no dict" in message(checkpoint)
    (checkpoint / "state/_METADATA").write_text('{"tree_metadata": {"a": {"key_metadata": 3}}}')
    assert "_METADATA: this is not Orbax's metadata" in message(checkpoint)

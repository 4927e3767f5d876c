"""What the tests of checkpoints share: the fixtures' places, and ways to copy, change and compare them."""

import functools
import shutil
from pathlib import Path

import numpy as np
import pytest
from flax import serialization

from specdec_jax.checkpoints import t5x_index
from specdec_jax.checkpoints.t5x import CheckpointError, load_params
from specdec_jax.checkpoints.t5x_tree import flatten, unflatten

FIXTURES = Path(__file__).parent / "fixtures"
DRAFT = FIXTURES / "mini_draft/legacy_f32/checkpoint_1500"
DRAFT_BF16 = FIXTURES / "mini_draft/legacy_bf16/checkpoint_1500"
DRAFT_ORBAX = FIXTURES / "mini_draft/orbax_f32/checkpoint_1500"
SCALABLE = FIXTURES / "scalable_tiny_legacy_bf16_checkpoint_2"
QUERY = "decoder/layers_0/self_attention/query/kernel"
QUERY_DIRECTORY = "target.decoder.layers_0.self_attention.query.kernel"


@functools.cache
def draft():
    """The draft model's parameters, flat, as float32."""
    return flatten(load_params(DRAFT))


def copy(tmp_path, checkpoint=DRAFT):
    """Copies a checkpoint to where it may be changed."""
    return Path(shutil.copytree(checkpoint, tmp_path / "checkpoint_7"))


def bits(array):
    """The array's bytes, for comparisons to the bit."""
    return np.ascontiguousarray(array).view(np.uint8)


def assert_same(found, expected):
    """Checks that two flat trees are equal to the bit."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].shape == array.shape, name
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(bits(found[name]), bits(array), err_msg=name)


def edit_index(checkpoint, edit):
    """Rewrites a native index with `edit`, which returns the new one or changes it and returns None."""
    path = checkpoint / "checkpoint"
    index = serialization.msgpack_restore(path.read_bytes())
    index = edit(index) or index
    path.write_bytes(serialization.msgpack_serialize(index, in_place=True))


def specs_of(index):
    """The tensorstore specs in a native index."""
    return [spec for _, spec in t5x_index._flatten(index["optimizer"]["target"])]


def message(path, **kwargs):
    """The message of the CheckpointError that loading raises, which has to be one line and name the file."""
    with pytest.raises(CheckpointError) as error:
        load_params(path, **kwargs)
    text = str(error.value)
    assert "\n" not in text
    assert text.startswith(str(path))
    return text


def single_file(path, params, wrap=True):
    """Writes a checkpoint of one msgpack file, with an optimizer state that is not to be read."""
    slots = {"w": {"v": np.full(70_000, 3.0, np.float32)}}
    state = {"state": {"param_states": slots, "step": np.int32(7)}, "target": unflatten(params)}
    path.write_bytes(serialization.to_bytes({"version": 3, "optimizer": state} if wrap else state))

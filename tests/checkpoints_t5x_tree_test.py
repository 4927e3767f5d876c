"""Tests of scanned layers, and of what is said when a checkpoint is not the one expected."""

import jax
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
    SCALABLE,
    assert_same,
    bits,
    copy,
    draft,
    edit_index,
    message,
    single_file,
)

from specdec_jax.checkpoints import t5x_index
from specdec_jax.checkpoints.t5x import load_params, save_checkpoint
from specdec_jax.checkpoints.t5x_tree import flatten
from specdec_jax.models.t5 import T5, T5Config


def test_scanned_layers_become_plain_ones():
    params = flatten(load_params(SCALABLE))
    assert {array.dtype.name for array in params.values()} == {"bfloat16"}

    def stored(name):
        kvstore = {"driver": "file", "path": str(SCALABLE / f"target.{name.replace('/', '.')}")}
        return ts.open({"driver": "zarr", "kvstore": kvstore}).result().read().result()

    decoder = {
        "self_attention/query/kernel": (8, 12),  # stored [E, L, H, D]
        "encoder_decoder_attention/out/kernel": (12, 8),  # stored [H, L, D, E]
        "mlp/wi_0/kernel": (8, 16),
        "mlp/wo/kernel": (16, 8),
        "pre_mlp_layer_norm/scale": (8,),
        "relpos_bias/rel_embedding": (4, 32),
    }
    for name, shape in decoder.items():
        stacked = stored(f"decoder/decoder/{name}")
        for layer in range(2):
            expected = stacked[:, layer].reshape(shape)
            np.testing.assert_array_equal(bits(params[f"decoder/layers_{layer}/{name}"]), bits(expected))
    assert "decoder/relpos_bias/rel_embedding" not in params
    assert not any(name.startswith(("decoder/decoder/", "encoder/encoder/")) for name in params)
    biases = [params[f"encoder/layers_{i}/relpos_bias/rel_embedding"] for i in range(2)]
    assert np.any(biases[0] != biases[1])  # which is why one bias per stack would not do
    for array in params.values():
        assert array.flags.c_contiguous


def test_scanned_layers_give_the_reference_logits():
    params = load_params(SCALABLE, dtype=jnp.float32)
    golden = np.load(FIXTURES / "golden/scalable_tiny_bf16.npz")
    model = T5(T5Config.from_params(params))
    logits = model.forward(
        params, jnp.asarray(golden["encoder_input_tokens"]), jnp.asarray(golden["decoder_input_tokens"])
    )
    is_text = golden["decoder_target_tokens"] > 0  # T5X masks what comes after the target's end
    reference = golden["teacher_forced_logits"][is_text]
    # 0.010, as the reference has bfloat16 activations; 0.18 with the two layers' position biases exchanged.
    assert np.abs(logits[is_text] - reference).mean() < 0.02


def test_scanned_layers_inlined(tmp_path):
    index = serialization.msgpack_restore((SCALABLE / "checkpoint").read_bytes())
    stacked = {}
    for name, spec in t5x_index._flatten(index["optimizer"]["target"]):
        spec["kvstore"]["path"] = str(SCALABLE / spec["kvstore"]["path"])
        stacked[name] = ts.open(spec).result().read().result()
    single_file(tmp_path / "checkpoint", stacked)
    assert_same(flatten(load_params(tmp_path)), flatten(load_params(SCALABLE)))


def test_layers_scanned_on_another_axis_are_refused(tmp_path):
    checkpoint = copy(tmp_path, SCALABLE)

    def edit(index):
        del index["optimizer"]["target"]["encoder"]["encoder"]["mlp"]["wo"]["kernel"]
        wo = np.zeros((2, 16, 8), np.float32)
        index["optimizer"]["target"]["encoder"]["encoder"]["mlp"]["wo"]["kernel"] = wo

    edit_index(checkpoint, edit)
    text = message(checkpoint)
    assert "encoder/encoder/mlp/wo/kernel [2, 16, 8]" in text
    assert "stacked on axis 1" in text


DRAFT_CONFIG = {
    "vocab_size": 384,
    "emb_dim": 32,
    "num_heads": 2,
    "head_dim": 16,
    "mlp_dim": 64,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
}


def shapes(**changes):
    """The tree of shapes that the draft model has, with changes to its config."""
    return T5(T5Config(**DRAFT_CONFIG | changes)).param_shapes()


@pytest.mark.parametrize("path", [DRAFT, DRAFT_BF16, DRAFT_ORBAX])
def test_expected_accepts_the_right_model(path):
    assert flatten(load_params(path, expected=shapes())).keys() == draft().keys()


def test_expected_accepts_scanned_layers():
    params = load_params(SCALABLE)
    config = T5Config.from_params(params)
    assert config.relpos_per_layer
    load_params(SCALABLE, expected=T5(config).param_shapes())


@pytest.mark.parametrize("path", [DRAFT, DRAFT_ORBAX])
def test_wrong_shape(path):
    text = message(path, expected=shapes(mlp_dim=80))
    assert "decoder/layers_0/mlp/wi_0/kernel has shape [32, 64], where [32, 80] is expected" in text


def test_missing_and_unexpected_parameters():
    text = message(DRAFT, expected=shapes(num_encoder_layers=2))
    assert "missing encoder/layers_1/attention/key/kernel" in text
    assert "and 6 more" in text
    assert "unexpected" not in text
    target = FIXTURES / "mini_target/legacy_f32/checkpoint_1500"
    text = message(target, expected=shapes())
    assert "unexpected decoder/layers_1/" in text
    assert "missing" not in text


def test_wrong_family():
    t5_1_0 = shapes(mlp_activations=("relu",), logits_via_embedding=True)
    text = message(DRAFT, expected=t5_1_0)
    assert "this is a T5 1.1 tree" in text
    assert "where a T5 1.0 tree" in text


def test_wrong_family_reversed(tmp_path):
    t5_1_0 = shapes(mlp_activations=("relu",), logits_via_embedding=True)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), t5_1_0)
    path = save_checkpoint(tmp_path, params, step=0)
    text = message(path, expected=shapes())
    assert "this is a T5 1.0 tree" in text
    assert "where a T5 1.1 tree" in text


def test_wrong_logits_and_position_bias():
    text = message(DRAFT, expected=shapes(logits_via_embedding=True))
    assert "with decoder/logits_dense (logits_via_embedding=False), where" in text
    text = message(SCALABLE, expected=shapes())
    assert "position bias per layer (scalable_t5; relpos_per_layer=True), where" in text


def test_expected_is_checked_before_anything_is_read(tmp_path):
    checkpoint = copy(tmp_path)
    for file in checkpoint.glob("target.*/0*"):
        file.write_bytes(b"")
    assert "is expected" in message(checkpoint, expected=shapes(mlp_dim=80))

"""Decoding on a mesh of devices is decoding on one; meshes that do not fit are refused or worked around, and said."""

import functools
import json
import logging
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import mini_pair
import numpy as np
import pytest
import tiny
from jax.sharding import AbstractMesh, PartitionSpec

from specdec_jax import sharding
from specdec_jax.checkpoints import t5x
from specdec_jax.models.axes import param_axes
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.sampling import make_sampling
from specdec_jax.settings import Settings
from specdec_jax.types import Inputs

GRID = tuple(
    f"{mesh}-{how}"
    for mesh in ("mini-2-4", "mini-8-1", "eight-1-8", "eight-2-4", "shared-2-4")
    for how in ("block-greedy", "token-drawn", "block-drawn", "coupled-drawn")
) + tuple(
    f"mini-2-4-{how}-{drafter}"
    for how in ("block-greedy", "token-drawn", "coupled-drawn")
    for drafter in ("adaptive", "bigram", "copy", "one_shot", "mixture", "hierarchical", "random")
)


@functools.cache
def decodes(cases):
    """What sharded_decodes.py found, in a process with 8 devices."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    script = pathlib.Path(__file__).with_name("sharded_decodes.py")
    run = subprocess.run(
        [sys.executable, str(script), *cases],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


def same(one, mesh):
    """Tokens and counts to the last one; sums of logits round as they are split."""
    for name in ("tokens", "lengths", "finish_reason", "accept_counts", "num_target_calls", "drafted"):
        np.testing.assert_array_equal(mesh[name], one[name], err_msg=name)
    for name in ("scores", "beta_sum"):
        np.testing.assert_allclose(mesh[name], one[name], atol=1e-4, err_msg=name)


def test_a_mesh_of_1_by_8_decodes_what_one_device_does():
    found = decodes(("eight-1-8-block-greedy",))["eight-1-8-block-greedy"]
    same(found["one"], found["mesh"])
    assert found["mesh"]["warnings"] == []


def test_a_mesh_of_2_by_4_decodes_what_one_device_does():
    """Target and draft of T5X's own training; the draft, with two heads, does not divide."""
    found = decodes(("mini-2-4-block-mixed",))["mini-2-4-block-mixed"]
    same(found["one"], found["mesh"])
    mesh = found["mesh"]
    assert mesh["caches"] == ["P('data', 'model')"]
    assert mesh["kernels"] == {"wi_0": "P('model',)", "wo": "P(None, 'model')", "out": "P(None, 'model')"}  # transposed
    # Of all that a step computes, devices only need each other's logits whole: no cache ever moves.
    assert mesh["gathered"] == ["f32[4,4,384]"]  # 8 rows over 2, gamma + 1, vocabulary
    assert mesh["draft_kernel"] == "P(None, None)"
    assert mesh["warnings"] == [
        "the draft small is not split but whole on every device: heads is 2, not a multiple of the 4 devices of mesh "
        "axis model."
    ]


def test_adaptive_gamma_on_a_mesh():
    found = decodes(("mini-2-4-block-drawn-adaptive",))["mini-2-4-block-drawn-adaptive"]
    same(found["one"], found["mesh"])
    calls, drafted = sum(found["mesh"]["num_target_calls"]), sum(found["mesh"]["drafted"])
    assert calls < drafted < 3 * calls  # it does vary


@pytest.mark.slow
@pytest.mark.parametrize("case", GRID)
def test_all_meshes_and_rules(case):
    found = decodes(GRID)[case]
    same(found["one"], found["mesh"])


def config(**sizes):
    usual = dict(vocab_size=32, emb_dim=8, num_heads=8, head_dim=4, mlp_dim=16)
    return T5Config(**{**usual, **sizes}, num_encoder_layers=1, num_decoder_layers=1)


def test_a_target_that_does_not_divide_is_refused():
    mesh = AbstractMesh((2, 4), ("data", "model"))
    assert not sharding.indivisible(config(), mesh)
    with pytest.raises(ValueError) as error:
        sharding.split_target(T5(config(num_heads=6, mlp_dim=18, head_dim=2)), mesh)
    assert str(error.value) == (
        "mesh is (2, 4), and the target does not fit it: heads is 6, not a multiple of the 4 devices of mesh axis "
        "model; mlp is 18, not a multiple of the 4 devices of mesh axis model. Give model a size that divides: 1, 2."
    )


def test_rules_like_those_of_t5x():
    mesh = AbstractMesh((2, 2, 2), ("replica", "data", "model"))
    rules = [("batch", ("replica", "data")), ("mlp", ("data", "model")), ("heads", "model"), ("embed", None)]
    (wrong,) = sharding.indivisible(config(mlp_dim=6, num_heads=2), mesh, rules)
    assert wrong == ("mlp", 6, ("data", "model"), 4)
    sharded = sharding.Sharded(T5(config()), mesh, rules)
    assert hash(sharded) == hash(sharding.Sharded(T5(config()), mesh, tuple(rules)))
    assert dict(sharding.replicated(sharded.rules)) == {
        "batch": ("replica", "data"), "mlp": None, "heads": None, "embed": None
    }  # fmt: skip


def test_a_draft_is_warned_of_in_the_log(caplog):
    mesh = AbstractMesh((1, 8), ("data", "model"))
    with caplog.at_level(logging.WARNING):
        draft = sharding.split_draft(T5(config(num_heads=2)), mesh)
    assert draft.rules == sharding.replicated(sharding.RULES)
    assert "heads is 2, not a multiple of the 8 devices of mesh axis model" in caplog.text


def test_axes_of_every_parameter():
    shapes = tiny.model(vocab=20, emb=16).param_shapes()
    axes = param_axes(shapes)
    assert jax.tree.map(len, axes) == jax.tree.map(lambda shape: shape.ndim, shapes)
    layer = axes["decoder"]["layers_0"]
    assert layer["self_attention"]["query"]["kernel"] == PartitionSpec("embed", "joined_kv")
    assert param_axes({"out": {"transposed_kernel": 0}}) == {
        "out": {"transposed_kernel": PartitionSpec("embed", "joined_kv")}
    }
    with pytest.raises(ValueError, match="decoder/bias is no parameter of a T5"):
        param_axes({"decoder": {"bias": 0}})


def test_axes_of_a_batch():
    tree = (Inputs(jnp.ones((2, 3), jnp.int32)), jnp.arange(2), make_sampling(2, forbidden_ids=(3, 4), num_ids=9))
    inputs, seeds, sampling = sharding.row_axes(tree)
    assert inputs.encoder_tokens == PartitionSpec("batch", None) and seeds == PartitionSpec("batch")
    assert sampling.temperature == PartitionSpec("batch")
    assert sampling.forbidden_ids == sampling.num_ids == PartitionSpec()


def test_meshes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"^mesh is \(2, 4\), which takes 8 devices, and there are 1; the two numbers"):
        sharding.make_mesh(2, 4)
    for wrong in ((2,), (0, 8), (2.0, 4), ("data", "model")):
        with pytest.raises(ValueError, match="it must be two numbers of devices"):
            Settings(gamma=1, mesh=wrong)
    with pytest.raises(ValueError, match="^batch_size is 3; it must be a multiple of 2, the devices that batches"):
        Settings(gamma=1, mesh=(2, 1), batch_size=3)


def test_weights_prepared_inside_a_jit():
    weights = t5x.load_params(mini_pair.DRAFT)
    model = T5(T5Config.from_params(weights))
    inside, outside = jax.jit(model.prepare)(weights), model.prepare(weights)
    jax.tree.map(np.testing.assert_array_equal, inside, outside)
    jax.tree.map(np.testing.assert_array_equal, model.prepare(outside), outside)

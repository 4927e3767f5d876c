"""The parts of the adapter that need no t5x."""

import functools
import types

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen.partitioning import AxisMetadata, get_axis_names
from jax.sharding import AbstractMesh
from mini_pair import DRAFT, FIXTURES

from specdec_jax.checkpoints.t5x import CheckpointError, load_params
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.results import FinishReason, empty_result
from specdec_jax.sharding import RULES, Sharded, replicated
from specdec_jax.t5x_adapter import batches, metrics, network
from specdec_jax.t5x_adapter.restore import restore_draft
from specdec_jax.t5x_adapter.settings import DecodeSettings, read_settings


def temperature_sample(inputs, temperature=1.0, topk=1, topp=0.0, state_callback_fn=None):
    raise AssertionError("only its bindings are of interest")


@gin.register(module="stand_in")
def holder(decode_fn):
    raise AssertionError("only its binding is of interest")


def beam_search(inputs):
    raise AssertionError("only its name is of interest")


@pytest.fixture
def wrapped():
    gin.clear_config()
    yield gin.external_configurable(temperature_sample, module="stand_in")
    gin.clear_config()
    gin.config._REGISTRY.pop("stand_in.temperature_sample")
    gin.config._INVERSE_REGISTRY.pop(temperature_sample)


def test_settings_are_t5xs_defaults():
    assert read_settings(temperature_sample) == DecodeSettings(1.0, 1, 0.0, None, None, True)


def test_settings_are_what_gin_bound(wrapped):
    gin.parse_config("stand_in.temperature_sample.temperature = 0.5\nstand_in.temperature_sample.topk = 0")
    assert read_settings(wrapped) == DecodeSettings(temperature=0.5, topk=0)
    assert read_settings(temperature_sample) == DecodeSettings(), "gin does not reach the function itself"
    assert read_settings(functools.partial(wrapped, topk=7), {"topp": 0.0}) == DecodeSettings(0.5, 7, 0.0)
    assert read_settings(wrapped, {"temperature": 2.0}).temperature == 2.0


def test_what_t5x_overwrites_itself_is_left_alone():
    assert read_settings(functools.partial(temperature_sample, num_decodes=4, eos_id=7)) == DecodeSettings()


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("temperature", -1.0, "a number, or one for each input"),
        ("temperature", "1.0", "a number, or one for each input"),
        ("topk", "3", "a whole number, 0"),
        ("topk", -1, "a whole number, 0"),
        ("topp", 2.0, "a number, 0"),
        ("max_decode_steps", 2.5, "a whole number, or None"),
        ("rescale_log_probs", "no", "True or False"),
    ],
)
def test_settings_of_the_wrong_kind_are_named(name, value, rule):
    with pytest.raises(ValueError, match=f"temperature_sample's {name} is {value!r}; it must be {rule}"):
        read_settings(temperature_sample, {name: value})


def test_steps_have_limits():
    assert DecodeSettings().most_steps(9) == 9 and DecodeSettings(max_decode_steps=4).most_steps(9) == 4
    assert DecodeSettings(max_decode_steps=4, max_decode_steps_hard_limit=3).most_steps(9) == 3
    for steps in (0, -1, 10):
        with pytest.raises(ValueError, match=f"max_decode_steps is {steps}; it must be 1 to 9"):
            DecodeSettings(max_decode_steps=steps).most_steps(9)


def test_what_cannot_be_honoured_is_refused(wrapped):
    with gin.unlock_config():
        gin.parse_config("holder.decode_fn = @scope/stand_in.temperature_sample")
    with pytest.raises(ValueError, match="in a scope, or wrapped by another function"):
        read_settings(gin.get_bindings("holder")["decode_fn"])
    with pytest.raises(ValueError, match="decode_fn is beam_search; .* bind decode_fn = @decoding.temperature_sample"):
        read_settings(beam_search)
    with pytest.raises(ValueError, match="state_callback_fn is .* cannot honour it"):
        read_settings(functools.partial(temperature_sample, state_callback_fn=print))
    with pytest.raises(ValueError, match="argument beam_size is not known"):
        read_settings(temperature_sample, {"beam_size": 4})


@pytest.mark.parametrize("settings", [DecodeSettings(), DecodeSettings(temperature=1e-4, topk=0, topp=0.9)])
def test_greedy_settings_build_no_probabilities(settings):
    assert settings.sampling(2, 1, 259).temperature is None


def test_settings_of_the_draws():
    sampling = DecodeSettings(temperature=0.7, topk=0).sampling(2, 3, 259)
    np.testing.assert_allclose(sampling.temperature, [0.7] * 6)
    assert sampling.top_k is None and sampling.top_p is None and int(sampling.num_ids) == 259
    sampling = DecodeSettings(temperature=np.array([0.5, 2.0]), topk=0, topp=0.9).sampling(2, 2, 259)
    np.testing.assert_allclose(sampling.temperature, [0.5, 0.5, 2.0, 2.0])  # decodes of an input side by side
    np.testing.assert_allclose(sampling.top_p, [0.9] * 4)
    np.testing.assert_allclose(DecodeSettings(topk=0).sampling(2, 1, 9, 0.25).temperature, [0.25] * 2)
    with pytest.raises(ValueError, match=r"topk is 1 and its topp 0\.9; bind one of the two to 0"):
        DecodeSettings(topp=0.9).sampling(1, 1, 259)
    with pytest.raises(ValueError, match=r"temperature has shape \(3,\)"):
        DecodeSettings(temperature=np.ones(3), topk=0).sampling(2, 1, 259)


def test_prompt_ends_at_its_first_end_or_padding():
    decoder_input = jnp.array([[0, 5, 6, 1, 0], [0, 7, 0, 8, 0], [0, 5, 1, 6, 7], [0, 0, 0, 0, 0]])
    prompt = batches.read_prompt(decoder_input, 1)
    np.testing.assert_array_equal(prompt, [[5, 6, 0, 0], [7, 0, 0, 0], [5, 0, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(batches.limits(prompt, 4, 5, 5), [3, 4, 4, 5])
    np.testing.assert_array_equal(batches.limits(prompt, 4, 5, 4), [3, 4, 4, 4])
    np.testing.assert_array_equal(batches.limits(None, 2, 5, 2), [2, 2])


def test_results_are_sorted_and_start_with_their_prompt():
    result = empty_result(4, 3, 2, exact=jnp.bool_(True))
    result = result._replace(
        tokens=jnp.array([[11, 12, 0], [21, 22, 23], [31, 1, 0], [41, 1, 0]]),
        lengths=jnp.array([2, 3, 2, 2]),
        scores=jnp.array([[-1.0, -1.0, 0.0], [-0.5, 0, 0], [-1.0, 0, 0], [-3.0, 0, 0]]),
        standardized_scores=jnp.array([[-0.1, 0.0, 0.0], [-0.5, 0, 0], [-0.3, 0, 0], [-0.2, 0, 0]]),
    )
    prompt = jnp.array([[9, 0], [0, 0], [8, 0], [8, 0]])
    tokens, aux = batches.read_result(result, prompt, 2, False)
    np.testing.assert_array_equal(tokens, [[[9, 11, 12], [21, 22, 23]], [[8, 41, 1], [8, 31, 1]]])
    np.testing.assert_allclose(aux["scores"], [[-2.0, -0.5], [-3.0, -1.0]])
    np.testing.assert_array_equal(aux["num_tokens"], [[2, 3], [2, 2]])
    _, aux = batches.read_result(result, None, 2, True)
    np.testing.assert_allclose(aux["scores"], [[-0.5, -0.1], [-0.3, -0.2]])


def test_nan_is_never_the_best_and_scores_are_numbers():
    result = empty_result(2, 2, 1, exact=jnp.bool_(False))
    result = result._replace(
        tokens=jnp.array([[0, 0], [7, 1]]),
        finish_reason=jnp.array([FinishReason.NAN, FinishReason.EOS]),
        standardized_scores=jnp.array([[0.0, 0.0], [-jnp.inf, -1.0]]),
    )
    tokens, aux = batches.read_result(result, None, 2, True)
    np.testing.assert_array_equal(tokens[0], [[0, 0], [7, 1]])
    np.testing.assert_allclose(aux["scores"], [[0.0, -1e7 - 1]])
    np.testing.assert_array_equal(aux["finish_reason"], [[FinishReason.NAN, FinishReason.EOS]])


def test_seeds_depend_on_the_key_and_on_the_seed():
    key = jax.random.PRNGKey(0)
    rows = np.concatenate([batches.seeds(k, s, 64) for k in (key, jax.random.PRNGKey(1)) for s in (0, 1)])
    assert len(set(rows.tolist())) == 256 and (rows >= 0).all()
    assert batches.choose_rng(None, key) is key and batches.choose_rng(key, None) is key
    np.testing.assert_array_equal(batches.choose_rng(None, None), key)
    with pytest.raises(ValueError, match="both given"):
        batches.choose_rng(key, key)


def config(**changes):
    sizes = {"vocab_size": 384, "emb_dim": 32, "num_heads": 2, "head_dim": 16, "mlp_dim": 64, "num_encoder_layers": 1}
    known = {"num_decoder_layers": 1, "mlp_activations": ("gelu", "linear"), "logits_via_embedding": False}
    known |= {"dtype": "bfloat16", "float32_attention_logits": False, "dropout_rate": 0.1}
    return types.SimpleNamespace(**{**sizes, **known, **changes})


def test_networks_of_t5x():
    t5 = network.to_t5(types.SimpleNamespace(config=config()), "module")
    assert t5.config.dtype == jnp.bfloat16 and t5.param_shapes()["decoder"]["logits_dense"]["kernel"].shape == (32, 384)
    network.to_t5(types.SimpleNamespace(config=config(dtype="float32", float32_attention_logits=True)), "module")
    with pytest.raises(ValueError, match="draft_module's float32_attention_logits is True"):
        network.to_t5(types.SimpleNamespace(config=config(float32_attention_logits=True)), "draft_module")
    with pytest.raises(ValueError, match="module scans its layers"):
        network.to_t5(types.SimpleNamespace(config=config(), scan_layers=True), "module")
    with pytest.raises(ValueError, match="module's config has scale_attn, which T5 has not"):
        network.to_t5(types.SimpleNamespace(config=config(scale_attn=True)), "module")
    with pytest.raises(ValueError, match=r"module is a SimpleNamespace without config\.vocab_size"):
        network.to_t5(types.SimpleNamespace(), "module")


@pytest.mark.parametrize(("heads", "divides"), [(4, True), (6, False)])
def test_draft_that_does_not_divide_the_mesh_is_whole_on_every_device(heads, divides, caplog):
    axes = {"attention": {"kernel_axes": AxisMetadata(("embed", "joined_kv"))}, "scale_axes": AxisMetadata(("embed",))}
    draft = network.to_t5(types.SimpleNamespace(config=config(num_heads=heads)), "draft_module")
    mesh = AbstractMesh((2, 4), ("data", "model"))
    placement = network.Placement(types.SimpleNamespace(mesh=mesh, logical_axis_rules=list(RULES)), draft)
    names = get_axis_names(placement.axes_of_draft(axes))
    assert placement.draft_is_whole == (not divides)
    assert tuple(names["attention"]["kernel"]) == (("embed", "joined_kv") if divides else (None, None))
    assert tuple(names["scale"]) == (("embed",) if divides else (None,))
    assert ("whole on every device: heads is 6, not a multiple of the 4 devices" in caplog.text) == (not divides)
    assert placement.draft == Sharded(draft, mesh, RULES if divides else replicated(RULES))
    assert network.Placement(None, draft).draft is draft


def test_restored_state_holds_the_draft():
    params = load_params(DRAFT, progress=False)
    expected = T5(T5Config.from_params(params)).param_shapes()
    state = {"target": {"w": "a spec"}, "state": {"step": 3}}
    target_state = {"flax_mutables": {"draft": expected}}
    restored = restore_draft(state, target_state, path=DRAFT)
    assert set(restored) == {"target", "state", "flax_mutables"} and set(state) == {"target", "state"}
    jax.tree.map(np.testing.assert_array_equal, restored["flax_mutables"]["draft"], params)
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(restored["flax_mutables"]))
    half = restore_draft(state, target_state, path=DRAFT, dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(half["flax_mutables"])} == {jnp.dtype("bfloat16")}
    again = restore_draft(restored, target_state, path="nowhere", is_resuming=True)
    assert again["flax_mutables"] is restored["flax_mutables"]


def test_wrong_drafts_are_refused():
    target_state = {"flax_mutables": {"draft": load_params(DRAFT, progress=False)}}
    with pytest.raises(CheckpointError, match="the draft's checkpoint: .*nowhere: no such directory"):
        restore_draft({}, target_state, path="nowhere")
    other = str(FIXTURES / "mini_target" / "legacy_f32" / "checkpoint_1500")
    with pytest.raises(CheckpointError, match="the draft's checkpoint: .*mini_target"):
        restore_draft({}, target_state, path=other)
    with pytest.raises(ValueError, match="path is None; bind DRAFT_CHECKPOINT_PATH"):
        restore_draft({}, target_state, path=None)
    with pytest.raises(ValueError, match="dtype is 'float16'; bind DRAFT_DTYPE"):
        restore_draft({}, target_state, path=DRAFT, dtype="float16")
    with pytest.raises(ValueError, match="the model has no draft"):
        restore_draft({}, {"target": {}}, path=DRAFT)


def test_metrics_weigh_rows_by_their_trials():
    aux = {"alpha": [1.0, 0.5], "trials": [1, 3], "accepted": [1, 1], "drafted": [4, 8], "num_target_calls": [1, 2]}
    found = metrics.speculation([], [], aux | {"num_tokens": [2, 4]})
    assert metrics.speculation([], [], {"scores": [-1.0]}) == {}, "a model without a draft"
    assert found == {
        "speculation/alpha": 2.5 / 4,
        "speculation/accepted_fraction": 2 / 12,
        "speculation/tokens_per_target_call": 2.0,
    }

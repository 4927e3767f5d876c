"""The adapter's model against t5x's own, on the mini pair, in one process; skipped where t5x cannot be imported."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("t5x", reason="t5x is not installed; it is not on PyPI, see scripts/t5x/setup_tpu_vm.sh")

import scipy.stats
from mini_pair import DRAFT, FIXTURES, TARGET, greedy_outputs
from t5x import checkpoints, decoding, interactive_model, models, partitioning, utils
from t5x_models import LENGTH, VOCABULARY, draft_module, make, module, sampling, train_state_initializer, with_optimizer

from specdec_jax.checkpoints.t5x import load_params, save_checkpoint
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.t5x_adapter import (
    SpeculativeEncoderDecoderModel,
    SpeculativeInteractiveModel,
    restore_draft,
)

pytestmark = [pytest.mark.t5x, pytest.mark.filterwarnings("default")]


@pytest.fixture(autouse=True)
def _as_t5x_has_it():
    with jax.numpy_rank_promotion("allow"):
        yield


@functools.cache
def weights(path):
    return jax.tree.map(jnp.asarray, load_params(path, progress=False))


@functools.cache
def batch(rows=4):
    """Inputs, and as decoder input the targets shifted right, as t5x's feature converter has them."""
    examples = [row["inputs"] for row in greedy_outputs()][:rows]

    def tokens(name, shift):
        table = np.zeros((rows, LENGTH), np.int32)
        for place, example in zip(table, examples, strict=True):
            ids = [*VOCABULARY.encode(example[f"{name}_pretokenized"]), 1]
            place[shift : shift + len(ids)] = ids
        return jnp.asarray(table)

    targets = tokens("targets", 0)
    weights = (targets > 0).astype(jnp.int32)
    return {
        "encoder_input_tokens": tokens("inputs", 0),
        "decoder_input_tokens": tokens("targets", 1),
        "decoder_target_tokens": targets,
        "decoder_loss_weights": weights,
    }


def predict(model, rows=4, draft=DRAFT, some=None, **kwargs):
    mutables = {} if not isinstance(model, SpeculativeEncoderDecoderModel) else {"draft": weights(draft)}
    call = functools.partial(model.predict_batch_with_aux, **kwargs)
    if mutables:
        call = functools.partial(call, flax_mutables=mutables)
    rng = jax.random.PRNGKey(0)
    return jax.tree.map(np.asarray, jax.jit(call)(weights(TARGET), batch(rows) if some is None else some, rng))


@pytest.mark.parametrize("rescale", [False, True])
def test_greedy_tokens_and_scores_are_the_stock_models(rescale):
    decode_fn = sampling(temperature=0.0, rescale_log_probs=rescale)
    tokens, aux = predict(make(decode_fn=decode_fn))
    expected, theirs = predict(make(stock=True, decode_fn=decode_fn))
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_allclose(aux["scores"], theirs["scores"], atol=1e-4)
    assert {x.shape for x in aux.values()} == {(4,)}
    assert (aux["accepted"] + aux["num_target_calls"] >= aux["num_tokens"]).all() and (aux["alpha"] > 0.9).all()


def test_the_target_alone_is_what_speed_is_measured_against():
    tokens, aux = predict(make(gamma=0))
    np.testing.assert_array_equal(tokens, predict(make())[0])
    assert (aux["num_target_calls"] == aux["num_tokens"]).all() and not aux["drafted"].any()


def test_t5xs_defaults_are_greedy():
    tokens, _ = predict(make(decode_fn=decoding.temperature_sample))
    np.testing.assert_array_equal(tokens, predict(make(stock=True))[0])


def prompted(length):
    """The batch with prompts of 0, 1, ... tokens and their end, as prompt_with_targets has them."""
    some = dict(batch())
    place = np.arange(LENGTH)[None]
    lengths = np.minimum(
        np.arange(4)[:, None] * length, np.asarray(jnp.sum(some["decoder_target_tokens"] > 1, axis=1))[:, None]
    )
    shifted = np.where(place <= lengths, some["decoder_input_tokens"], 0)
    some["decoder_input_tokens"] = jnp.asarray(np.where(place == lengths + 1, 1, shifted), jnp.int32)
    return some


@pytest.mark.parametrize("steps", [None, 2])
def test_outputs_go_on_from_prompts_as_the_stock_models_do(steps):
    decode_fn = sampling(temperature=0.0, max_decode_steps=steps)
    asked = {"some": prompted(2), "prompt_with_targets": True}
    tokens, aux = predict(make(decode_fn=decode_fn), **asked)
    expected, theirs = predict(make(stock=True, decode_fn=decode_fn), **asked)
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_allclose(aux["scores"], theirs["scores"], atol=1e-4)
    assert steps is None or (aux["num_tokens"] <= steps).all()


def test_decodes_are_independent_and_sorted():
    model = make(decode_fn=sampling(temperature=6.0), default_decoder_params=models.DecoderParams(num_decodes=3))
    tokens, aux = predict(model, return_all_decodes=True)
    assert tokens.shape == (4, 3, LENGTH) and {x.shape for x in aux.values()} == {(4, 3)}
    assert (np.diff(aux["scores"], axis=1) >= 0).all()
    assert all(len({tuple(row) for row in rows}) == 3 for rows in tokens)
    best, aux_of_best = predict(model)
    np.testing.assert_array_equal(best, tokens[:, -1])
    np.testing.assert_array_equal(aux_of_best["scores"], aux["scores"][:, -1])


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_tokens_are_drawn_from_the_targets_law(rule):
    """Two tokens under top-k 3 at temperature 1.5: nine outcomes, whose law is that of teacher forcing."""
    draws, temperature = 4096, 1.5
    some = {name: x[:1] for name, x in batch().items()}
    model = make(rule=rule, gamma=2, decode_fn=sampling(temperature=temperature, topk=3, max_decode_steps=2))
    tokens, _ = predict(model, some=some, num_decodes=draws, return_all_decodes=True)
    target = T5(T5Config.from_params(weights(TARGET)))

    def law(prefix):
        decoder = jnp.asarray([[0, *prefix]], jnp.int32)
        logits = np.asarray(target.forward(weights(TARGET), some["encoder_input_tokens"], decoder))[0, -1, :259]
        best = np.argsort(-logits)[:3]
        p = np.exp((logits[best] - logits[best[0]]) / temperature)
        return dict(zip(best.tolist(), p / p.sum(), strict=True))

    expected = {(x, y): p * q for x, p in law([]).items() for y, q in law([x]).items()}
    seen = {pair: 0 for pair in expected}
    for row in tokens[0, :, :2].tolist():
        seen[tuple(row)] += 1
    counts, mean = np.array(list(seen.values())), draws * np.array(list(expected.values()))
    large = mean >= 5
    observed = np.append(counts[large], counts[~large].sum())
    wanted = np.append(mean[large], max(mean[~large].sum(), 1e-9))
    assert scipy.stats.chi2.sf(((observed - wanted) ** 2 / wanted).sum(), large.sum()) > 1e-4


def test_the_draft_decides_nothing_and_the_seed_everything():
    decode_fn = sampling(temperature=6.0)
    tokens, _ = predict(make(rule="coupled", decode_fn=decode_fn))
    other, _ = predict(make(rule="coupled", gamma=2, draft_module=module(), decode_fn=decode_fn), draft=TARGET)
    np.testing.assert_array_equal(tokens, other)
    assert (predict(make(rule="coupled", seed=1, decode_fn=decode_fn))[0] != tokens).any()


def test_scores_of_given_targets_are_the_stock_models():
    score = jax.jit(make().score_batch)(weights(TARGET), batch())
    np.testing.assert_array_equal(score, jax.jit(make(stock=True).score_batch)(weights(TARGET), batch()))


def test_each_input_may_have_a_temperature_of_its_own():
    model = make(decode_fn=sampling(temperature=np.array([0.0, 6.0, 0.0, 6.0])))
    tokens, greedy = predict(model)[0], predict(make())[0]
    assert (tokens[::2] == greedy[::2]).all() and (tokens[1::2] != greedy[1::2]).any(axis=1).all()


def test_losses_are_the_targets_and_training_leaves_the_draft_as_it_is():
    model, stock = make(), make(stock=True)
    mutables = {"draft": weights(DRAFT)}
    loss, (metrics, after) = model.loss_fn(weights(TARGET), batch(), None, mutables)
    expected, theirs = stock.loss_fn(weights(TARGET), batch(), None)
    assert float(loss) == float(expected) and after is mutables and metrics.keys() == theirs.keys()
    assert float(model.eval_fn(weights(TARGET), batch(), mutables)[0]) == float(expected)
    assert float(model.loss_fn(weights(TARGET), batch(), None)[0]) == float(expected)


def test_what_cannot_be_is_refused_before_anything_is_read():
    with pytest.raises(ValueError, match="the draft's vocab_size is 512 and the target's 384"):
        make(draft_module=draft_module(vocab_size=512))
    with pytest.raises(ValueError, match="output vocabulary has 259 ids and the models only 256 rows"):
        make(module=module(vocab_size=256), draft_module=draft_module(vocab_size=256))
    with pytest.raises(ValueError, match="decode_fn is beam_search"):
        make(decode_fn=decoding.beam_search)
    with pytest.raises(ValueError, match="rule is 'blocks'"):
        make(rule="blocks")
    with pytest.raises(ValueError, match="gamma is -1"):
        make(gamma=-1)
    for seed in (-1, 2**32, "0"):
        with pytest.raises(ValueError, match=f"seed is {seed!r}"):
            make(seed=seed)
    with pytest.raises(ValueError, match="gamma is '4'"):
        make(gamma="4")
    with pytest.raises(ValueError, match=r"draft_temperature is -1\.0"):
        make(draft_temperature=-1.0)
    with pytest.raises(ValueError, match="num_decodes is 0"):
        make(default_decoder_params=models.DecoderParams(num_decodes=0))
    with pytest.raises(ValueError, match="max_decode_steps is 99; it must be 1 to 24"):
        predict(make(decode_fn=sampling(max_decode_steps=99)))
    with pytest.raises(ValueError, match="temperature is traced"):
        jax.jit(lambda t: predict(make(), decoder_params={"temperature": t}))(1.0)
    with pytest.raises(ValueError, match=r"lenience is 0\.5"):
        make(rule="block", lenience=0.5)
    with pytest.raises(ValueError, match=r"flax_mutables has no 'draft'; .*restore_draft"):
        make().predict_batch_with_aux(weights(TARGET), batch())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("target", ["legacy_f32", "orbax_f32"])
@pytest.mark.parametrize("draft", ["legacy_f32", "orbax_f32"])
def test_restores(tmp_path, target, draft, dtype):
    paths = {}
    for which, kind in (("mini_target", target), ("mini_draft", draft)):
        shutil.copytree(FIXTURES / which / kind, tmp_path / which)
        paths[which] = str(tmp_path / which / "checkpoint_1500")
    model = make()
    model.optimizer_def = None
    init, partitioner = train_state_initializer(model)
    config = utils.RestoreCheckpointConfig(
        path=paths["mini_target"],
        mode="specific",
        dtype=dtype,
        strict=False,
        state_transformation_fns=[functools.partial(restore_draft, path=paths["mini_draft"], dtype=dtype)],
    )
    state, _ = utils.create_checkpoint_manager_and_restore(init, partitioner, config, config.path, None, use_orbax=True)
    for found, path in ((state.params, TARGET), (state.flax_mutables["draft"], DRAFT)):
        expected = load_params(path, dtype=jnp.dtype(dtype), progress=False)
        jax.tree.map(np.testing.assert_array_equal, dict(jax.device_get(found).unfreeze()), expected)


def test_t5x_restores_what_this_package_writes(tmp_path):
    path = save_checkpoint(tmp_path, weights(TARGET), step=7)
    model = make(stock=True)
    model.optimizer_def = None
    init, partitioner = train_state_initializer(model)
    reader = checkpoints.Checkpointer(init.global_train_state_shape, partitioner, str(tmp_path))
    state = reader.restore(path=path)
    assert int(state.step) == 7
    jax.tree.map(np.testing.assert_array_equal, state.params.unfreeze(), weights(TARGET))


@pytest.mark.parametrize("writer", [checkpoints.Checkpointer, checkpoints.OrbaxCheckpointManagerInterface])
def test_this_package_reads_what_t5x_writes(tmp_path, writer):
    init, partitioner = train_state_initializer(make(stock=True))
    state = init.from_scratch(jax.random.PRNGKey(3))
    saver = (
        writer(str(tmp_path), init.global_train_state_shape, partitioner)
        if "Orbax" in writer.__name__
        else writer(init.global_train_state_shape, partitioner, str(tmp_path))
    )
    saver.save(state)
    if hasattr(saver, "close"):
        saver.close()
    found = load_params(tmp_path / "checkpoint_0", progress=False)
    jax.tree.map(np.testing.assert_array_equal, found, jax.device_get(state.params).unfreeze())


def test_interactive_model(tmp_path):
    partitioner, shapes = partitioning.PjitPartitioner(num_partitions=1), {name: (4, LENGTH) for name in batch()}
    path = with_optimizer(tmp_path, module(), weights(TARGET))
    with jax.default_prng_impl(jax.config.jax_default_prng_impl):  # it changes that
        model = SpeculativeInteractiveModel(
            model=make(partitioner=partitioner),
            partitioner=partitioner,
            draft_checkpoint_path=DRAFT,
            dtype="float32",
            batch_size=4,
            task_feature_lengths={"inputs": LENGTH, "targets": LENGTH},
            output_dir=str(tmp_path / "out"),
            restore_mode="specific",
            checkpoint_path=path,
            input_shapes=shapes,
        )
        examples = [row["inputs"]["inputs_pretokenized"] for row in greedy_outputs()][:6]
        outputs, aux = model.predict_with_aux(examples)
        scores = model.score([{"input": x, "target": x.upper()} for x in examples])
    assert [text.decode() for _, text in outputs] == [row["prediction"] for row in greedy_outputs()][:6]
    np.testing.assert_allclose(aux["scores"], [row["aux"]["scores"] for row in greedy_outputs()][:6], atol=2e-4)
    assert len(aux["num_target_calls"]) == 6 and len(scores) == 6
    assert interactive_model.utils.RestoreCheckpointConfig is utils.RestoreCheckpointConfig

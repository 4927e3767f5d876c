"""Training: tasks, bucketing, the parametrization, overfitting, resuming, distillation."""

import collections
import dataclasses
import gzip
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.checkpoints import t5x
from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.training import batches, examples, loop, losses, narrowing, parametrization, saves, step, text
from specdec_jax.vocabularies import ByteVocabulary

_MIXTURE = batches.Mixture(
    rates=(("a", 1.0), ("b", 1.0)), max_source=24, max_target=16, batch_tokens=120, block_examples=80
)
_MODEL = T5(
    T5Config(
        vocab_size=32,
        emb_dim=16,
        num_heads=2,
        head_dim=8,
        mlp_dim=32,
        num_encoder_layers=1,
        num_decoder_layers=1,
    )
)


def _random_examples(seed, count, vocab_size=32):
    rng = np.random.default_rng(seed)

    def sequences(longest):
        return [[*rng.integers(3, vocab_size, rng.integers(0, longest)).tolist(), 1] for _ in range(count)]

    return examples.Examples(examples.ragged(sequences(24)), examples.ragged(sequences(16)))


def _fixed_length_examples(count, length=6):
    rng = np.random.default_rng(5)
    rows = [[*rng.integers(3, 32, length - 1).tolist(), 1] for _ in range(count)]
    return examples.Examples(examples.ragged(rows), examples.ragged(rows[::-1]))


# All eight examples fill one batch: training compiles once.
_ONE_SHAPE = batches.Mixture(
    rates=(("copy", 1.0),), max_source=24, max_target=16, batch_tokens=112, block_examples=8, seed=3
)


def test_restore_input_has_neither_case_nor_punctuation():
    assert text.strip_punctuation("Don't panic -- it's (only) GNU/Linux, v2.0!") == "dont panic its only gnu linux v2 0"
    assert text.strip_punctuation("Caf\u00e9\u2019s") == "caf\u00e9s"
    assert text.restore_pair("12.5 %, --") is None
    assert text.restore_pair("A b.") == text.Pair("restore: a b", "A b.")


def test_read_tasks_takes_one_split_and_names_bad_rows(tmp_path):
    ende, pairs = tmp_path / "ende.tsv.gz", tmp_path / "pairs.tsv"
    ende.write_bytes(gzip.compress(b"One.\tEins.\ttrain\tx\n3.\t3.\ttrain\tx\nTwo.\tZwei.\ttest\tx\n"))
    pairs.write_text("".join(f"restore: {i}\t{i}\n" for i in range(100)))
    tasks = text.read_tasks(split="train", ende=ende, pairs=pairs)
    assert tasks["ende"] == [
        ("translate English to German: One.", "Eins."),
        ("translate English to German: 3.", "3."),
    ]
    assert tasks["restore"] == [("restore: one", "One.")]
    assert len(tasks["pairs"]) == 98
    assert [pair.target for pair in text.read_tasks(split="valid", pairs=pairs)["pairs"]] == ["49", "99"]
    pairs.write_text("only one column\n")
    with pytest.raises(ValueError, match=r"pairs\.tsv:1 has 1 columns"):
        text.read_tasks(split="train", pairs=pairs)
    with pytest.raises(ValueError, match="no 'valid' examples"):
        text.read_tasks(split="valid", ende=ende)


def test_tokenizing_cuts_sources_drops_long_targets_and_caches(tmp_path):
    pairs = [text.Pair("abcdef", "xy"), text.Pair("ab", "xyz"), text.Pair("a", "")]
    limits = {"max_source": 4, "max_target": 3}
    first = examples.tokenize_cached({"t": pairs}, ByteVocabulary(), tmp_path, **limits)["t"]
    assert first.size == 1
    assert first.sources.padded(np.array([0]), 5).tolist() == [[100, 101, 102, 1, 0]]
    assert first.targets.padded(np.array([0]), 3).tolist() == [[123, 124, 1]]
    again = examples.tokenize_cached({"t": pairs}, ByteVocabulary(), tmp_path, **limits)["t"]
    assert jax.tree.all(jax.tree.map(np.array_equal, first, again))
    assert len(list(tmp_path.iterdir())) == 1
    examples.tokenize_cached({"t": pairs}, ByteVocabulary(), tmp_path, max_source=5, max_target=3)
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(ValueError, match="raise max_target"):
        examples.tokenize_cached({"t": pairs}, ByteVocabulary(), tmp_path, max_source=4, max_target=2)


def test_buckets_keep_every_example_once_within_few_shapes():
    data = _random_examples(0, 500)
    selections = batches.into_buckets(data, np.arange(500), _MIXTURE.buckets)
    assert sorted(np.concatenate([selection.rows for selection in selections]).tolist()) == list(range(500))
    assert sum(len(selection.rows) < selection.bucket.rows for selection in selections) <= 1
    assert len(_MIXTURE.buckets) <= 8
    for selection in selections:
        batch = batches.gather(data, selection)
        assert batch.sources.shape == (selection.bucket.rows, selection.bucket.source)
        assert batch.targets.shape == (selection.bucket.rows, selection.bucket.target)
        assert batch.sources.size + batch.targets.size <= _MIXTURE.batch_tokens
        for row, place in enumerate(selection.rows):
            ids = data.targets.ids[data.targets.starts[place] : data.targets.starts[place + 1]]
            assert batch.targets[row, : len(ids)].tolist() == ids.tolist()
            assert not batch.targets[row, len(ids) :].any()


def test_an_epoch_of_the_stream_holds_every_example_once():
    tasks = {"a": _random_examples(1, 40), "b": _random_examples(2, 40)}  # one block is one epoch of both
    stream = batches.batches(tasks, _MIXTURE)
    seen = collections.Counter()
    while seen.total() < 80:
        batch = next(stream)
        seen.update(s.tobytes()[: 4 * np.count_nonzero(s)] for s in batch.sources if s.any())
    both = (data.sources for data in tasks.values())
    expected = collections.Counter(ids.tobytes() for s in both for ids in np.split(s.ids, s.starts[1:-1]))
    assert seen == expected


def test_the_stream_depends_on_seed_and_step_alone():
    tasks = {"a": _random_examples(1, 30), "b": _random_examples(2, 70)}

    def take(start, count, seed=0):
        mixture = batches.Mixture(**{**vars(_MIXTURE), "seed": seed})
        stream = batches.batches(tasks, mixture, start_step=start)
        return [batch.sources.tolist() for batch in (next(stream) for _ in range(count))]

    everything = take(0, 70)  # several blocks
    for start in (0, 1, 33, 65):
        assert take(start, 5) == everything[start : start + 5]
    assert take(0, 5, seed=1) != everything[:5]
    with pytest.raises(ValueError, match="task 'b'"):
        next(batches.batches({"a": tasks["a"]}, _MIXTURE))


def _logits(model, params):
    sources = jnp.asarray(np.random.default_rng(1).integers(2, model.vocab_size, (2, 5)), jnp.int32)
    return model.forward(params, sources, sources[:, :4])


def test_what_fits_is_cut_and_what_does_not_is_named():
    deep = T5(dataclasses.replace(_MODEL.config, num_encoder_layers=3, num_decoder_layers=4))
    params = parametrization.initial_raw(deep, 0)
    small = dataclasses.replace(_MODEL.config, emb_dim=8, mlp_dim=8, num_encoder_layers=1, num_decoder_layers=1)
    cut = narrowing.fit(params, small)
    assert jax.tree.map(jnp.shape, cut) == jax.tree.map(lambda x: x.shape, T5(small).param_shapes())
    jax.tree.map(np.testing.assert_array_equal, narrowing.fit(params, deep.config), params)
    for change in ({"vocab_size": 128}, {"head_dim": 2}, {"mlp_activations": ("relu",)}):
        (name,) = change
        with pytest.raises(ValueError, match=f"^{name} is .*, and the model to start from has"):
            narrowing.fit(params, dataclasses.replace(small, **change))


def test_narrowing_to_the_same_width_changes_nothing():
    raw = parametrization.initial_raw(_MODEL, 0)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32), raw)  # scales other than 1
    narrowed = narrowing.narrow(params, _MODEL.config)
    np.testing.assert_allclose(_logits(_MODEL, narrowed), _logits(_MODEL, params), atol=2e-4)
    assert {x.dtype.name for x in jax.tree.leaves(narrowed)} == {"float32"}


def test_a_narrowed_model_keeps_what_is_used():
    """Half of the width of a model that uses no more than half of it, one of two heads, half of its units."""
    cfg = dataclasses.replace(_MODEL.config, emb_dim=16, num_heads=2, mlp_dim=32)
    narrow = T5(dataclasses.replace(cfg, emb_dim=8, num_heads=1, mlp_dim=16))
    small = parametrization.initial_raw(narrow, 0)

    def widen(small, shape):
        wide = np.zeros(shape.shape, np.float32)
        wide[tuple(slice(n) for n in small.shape)] = small
        return wide

    params = jax.tree_util.tree_map_with_path(
        lambda path, x, shape: np.ones(shape.shape, np.float32) if path[-1].key == "scale" else widen(x, shape),
        small,
        T5(cfg).param_shapes(),
    )
    narrowed = narrowing.narrow(params, narrow.config)
    np.testing.assert_allclose(_logits(narrow, narrowed), _logits(T5(cfg), params), atol=1e-4)
    for field in ("emb_dim", "num_heads", "mlp_dim"):
        with pytest.raises(ValueError, match=f"{field} is {getattr(cfg, field)}, and the model to narrow has"):
            narrowing.narrow(narrowed, dataclasses.replace(narrow.config, **{field: getattr(cfg, field)}))


def test_pruning_keeps_the_outer_layers():
    deep = T5(dataclasses.replace(_MODEL.config, num_encoder_layers=3, num_decoder_layers=4))
    shallow = T5(dataclasses.replace(_MODEL.config, num_encoder_layers=2, num_decoder_layers=1))
    params = parametrization.initial_raw(deep, 0)
    pruned = narrowing.prune(params, shallow.config)
    assert jax.tree.map(jnp.shape, pruned) == jax.tree.map(lambda x: x.shape, shallow.param_shapes())
    for ours, theirs in [
        (pruned["encoder"]["layers_1"], params["encoder"]["layers_1"]),
        (pruned["decoder"]["layers_0"], params["decoder"]["layers_3"]),
        (pruned["token_embedder"], params["token_embedder"]),
    ]:
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    with pytest.raises(ValueError, match="3 encoder layers are wanted of a model that has 2"):
        narrowing.prune(pruned, deep.config)


def test_fold_and_unfold_are_inverse_and_rescale_only_embedding_and_queries():
    raw = parametrization.initial_raw(_MODEL, 0)
    assert jax.tree.map(jnp.shape, raw) == jax.tree.map(lambda leaf: leaf.shape, _MODEL.param_shapes())
    plain = parametrization.fold(raw, _MODEL)
    for ours, back in zip(jax.tree.leaves(raw), jax.tree.leaves(parametrization.unfold(plain, _MODEL)), strict=True):
        np.testing.assert_allclose(ours, back, rtol=1e-6)
    np.testing.assert_allclose(plain["token_embedder"]["embedding"], raw["token_embedder"]["embedding"] * 4, rtol=1e-6)
    changed = [
        jax.tree_util.keystr(path)
        for path, same in jax.tree_util.tree_leaves_with_path(
            jax.tree.map(lambda a, b: bool((a == b).all()), raw, plain)
        )
        if not same
    ]
    assert len(changed) == 4 and sum("query" in name for name in changed) == 3


def test_cross_entropy_and_divergence_by_hand():
    logits = jnp.log(jnp.array([[[0.5, 0.25, 0.125, 0.125]]]))
    np.testing.assert_allclose(losses.cross_entropies(logits, jnp.array([[1]])), [[np.log(4)]], rtol=1e-6)
    even = jnp.zeros((1, 1, 4))
    np.testing.assert_allclose(losses.divergences(logits, even), [[np.log(4) - 1.75 * np.log(2)]], rtol=1e-5)
    np.testing.assert_allclose(losses.divergences(logits, logits + 3.0), [[0.0]], atol=1e-6)
    sums = losses.totals(logits, jnp.array([[1]]), even, divergence_weight=1.0, label_smoothing=0.0, with_matches=True)
    np.testing.assert_allclose([sums.overlap, sums.agreement, sums.correct, sums.tokens], [0.75, 1, 0, 1])


def test_learning_rate_warms_up_by_steps_and_decays_by_fraction():
    settings = step.Optimization(peak_learning_rate=1.0, warmup_steps=10)
    rates = [step.learning_rate(jnp.int32(s), jnp.float32(f), settings) for s, f in ((0, 0), (9, 0), (50, 0.5), (9, 1))]
    np.testing.assert_allclose(rates, [0.1, 1.0, 0.55, 0.1], rtol=1e-6)


def _train(run_dir, steps, **changes):
    data = {"copy": _fixed_length_examples(8)}
    return loop.train(
        _MODEL,
        data,
        data,
        run_dir,
        **{
            "mixture": _ONE_SHAPE,
            "optimization": step.Optimization(peak_learning_rate=1e-2, warmup_steps=5, ema_decay=0.5),
            "schedule": loop.Schedule(steps=steps, log_every=10, validate_every=1000),
            **changes,
        },
    )


@pytest.fixture(scope="module")
def overfitted(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("target")
    return _train(run_dir, 300), run_dir


def test_a_tiny_model_overfits_eight_examples(overfitted):
    trained, run_dir = overfitted
    assert trained.validation["copy"]["loss"] < 0.05
    assert trained.validation["copy"]["correct"] == 1.0
    saved = t5x.load_params(run_dir / "checkpoint_300", expected=_MODEL.param_shapes())
    assert jax.tree.all(jax.tree.map(np.array_equal, saved, jax.device_get(trained.params)))
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "train"] == list(range(10, 301, 10))
    assert {"loss", "lr", "tokens_per_s", "elapsed"} <= events[1].keys()


def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    class Killed(Exception):
        pass

    class Schedule(loop.Schedule):
        killed_at = 0

        def fraction(self, step, elapsed):
            if step == self.killed_at:
                raise Killed
            return super().fraction(step, elapsed)

    every_step = {"steps": 12, "log_every": 5, "validate_every": 1000, "save_minutes": 0.0}
    whole = _train(tmp_path / "whole", 12)
    killed = Schedule(**every_step)
    object.__setattr__(killed, "killed_at", 7)
    with pytest.raises(Killed):
        _train(tmp_path / "parts", 12, schedule=killed)
    assert sorted(path.name for path in (tmp_path / "parts").glob("resume_*")) == [
        "resume_6.msgpack",
        "resume_7.msgpack",
    ]
    assert t5x.list_steps(tmp_path / "parts") == [6, 7]
    shutil.rmtree(tmp_path / "parts" / "checkpoint_7")
    resumed = _train(tmp_path / "parts", 12)
    assert int(resumed.state.step) == 12
    assert jax.tree.all(jax.tree.map(np.array_equal, whole.state, resumed.state))
    with pytest.raises(ValueError, match="give another run_dir"):
        _train(tmp_path / "parts", 12, mixture=batches.Mixture(**{**vars(_ONE_SHAPE), "seed": 9}))


def test_a_broken_save_is_named(tmp_path):
    (tmp_path / "resume_3.msgpack").write_bytes(b"\xc1")
    with pytest.raises(ValueError, match=r"resume_3\.msgpack"):
        saves.restore(tmp_path, {}, settings="")


def test_distillation_brings_the_draft_to_the_target(overfitted, tmp_path):
    trained, _ = overfitted
    teacher = step.Teacher(_MODEL, trained.params)
    few = _train(tmp_path / "few", 2, teacher=teacher).validation["copy"]
    many = _train(tmp_path / "many", 200, teacher=teacher).validation["copy"]
    assert many["divergence"] < 0.2 * few["divergence"]
    assert many["agreement"] > 0.95 and many["overlap"] > few["overlap"]
    itself = _train(tmp_path / "itself", 1, teacher=teacher, initial_params=trained.params).validation["copy"]
    assert itself["overlap"] > few["overlap"] and itself["agreement"] == 1.0
    small = T5(T5Config(**{**vars(_MODEL.config), "vocab_size": 16}))
    with pytest.raises(ValueError, match="vocabulary size is 16, the trained model's 32"):
        _train(tmp_path / "no", 1, teacher=step.Teacher(small, None))


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match="give one of them"):
        loop.Schedule(steps=3, minutes=1.0)
    with pytest.raises(ValueError, match="divergence_weight is 2"):
        step.Optimization(divergence_weight=2.0)
    with pytest.raises(ValueError, match="batch_tokens is 50"):
        batches.Mixture(rates=(("a", 1.0),), batch_tokens=50)
    with pytest.raises(ValueError, match="rates"):
        batches.Mixture(rates=(("a", 0.0),))

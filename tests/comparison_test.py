import dataclasses
import io

import jax
import jax.numpy as jnp
import mini_pair
import numpy as np
import pytest
from rich.console import Console

from specdec_jax import comparison, generation
from specdec_jax.comparison import Comparison, Difference
from specdec_jax.results import DecodingResult
from specdec_jax.sampling import gumbel_noise
from specdec_jax.settings import Settings
from specdec_jax.vocabularies import ByteVocabulary

VOCABULARY = ByteVocabulary()
SETTINGS = Settings(gamma=4, batch_size=4, **mini_pair.LIMITS)


@pytest.fixture(scope="module")
def pair():
    return generation.load_pair(mini_pair.MODELS, VOCABULARY)


@pytest.fixture(scope="module")
def batch():
    encoded = generation.encode(["blue", "west green", "sun"], VOCABULARY, SETTINGS)
    return generation.make_batches(encoded, VOCABULARY, SETTINGS)[0]


@pytest.fixture(scope="module")
def compared(pair, batch):
    return comparison.compare(pair, batch, SETTINGS, repeats=2)


def test_compare_decodes_both_ways_without_the_copies(compared):
    assert compared.differences == []
    assert compared.plain.tokens.shape == compared.speculative.tokens.shape == (3, 32)
    np.testing.assert_array_equal(compared.plain.tokens, compared.speculative.tokens)
    np.testing.assert_array_equal(compared.plain.num_target_calls, compared.plain.lengths)
    assert (compared.speculative.num_target_calls < compared.speculative.lengths).all()
    assert compared.plain_seconds > 0 and compared.speculative_seconds > 0


def test_differences_carry_the_targets_margin(pair, batch, compared):
    plain = np.array(compared.plain.tokens)
    other = plain.copy()
    other[1, 3:5] += 1
    (found,) = comparison.find_differences(pair, batch, plain, other)
    assert (found.row, found.position) == (1, 3)
    shifted = jnp.asarray(np.concatenate([[[0]], plain[1:2, :-1]], axis=1))
    logits = jax.jit(pair.target.forward)(pair.target_params, batch.inputs.encoder_tokens[1:2], shifted)[0, 3]
    second, best = np.sort(np.asarray(logits)[: VOCABULARY.size])[-2:]
    assert int(jnp.argmax(logits)) == plain[1, 3]
    assert found.margin == pytest.approx(best - second, abs=1e-4)
    assert found.margin > 1


def test_the_coupled_rule_is_compared_token_by_token(pair, batch):
    settings = dataclasses.replace(SETTINGS, temperature=1.0, rule="coupled")
    sampled = batch._replace(
        sampling=settings.sampling(len(batch.seeds), VOCABULARY.size),
        draft_sampling=settings.sampling(len(batch.seeds), VOCABULARY.size, of_draft=True),
    )
    compared = comparison.compare(pair, sampled, settings, repeats=1)
    assert compared.differences == []
    other = np.array(compared.plain.tokens)
    other[2, 0] += 1
    (found,) = comparison.find_differences(pair, sampled, np.asarray(compared.plain.tokens), other)
    assert (found.row, found.position) == (2, 0) and found.margin > 0
    start = jnp.zeros((1, 1), jnp.int32)
    logits = pair.target.forward(pair.target_params, sampled.inputs.encoder_tokens[2:3], start)
    log_p = jax.nn.log_softmax(logits[..., : VOCABULARY.size])
    noise = gumbel_noise(jax.vmap(jax.random.key)(sampled.seeds[2:3]), start[0], 1, 384)[..., : VOCABULARY.size]
    second, best = np.sort(np.asarray(log_p + noise)[0, 0])[-2:]
    assert int(jnp.argmax(log_p + noise)) == compared.plain.tokens[2, 0]
    assert found.margin == pytest.approx(best - second, abs=1e-3)  # in units of logits, at temperature 1
    lenient = dataclasses.replace(SETTINGS, lenience=0.5)
    assert comparison.compare(pair, batch, lenient, repeats=1).differences is None


def made(lengths, calls, trials, beta, plain_seconds, seconds, differences=()):
    """A comparison of hand-made counts."""
    empty = DecodingResult(*[np.zeros((len(lengths), 1), np.int32)] * len(DecodingResult._fields))
    plain = empty._replace(lengths=np.array(lengths), num_target_calls=np.array(lengths))
    speculative = plain._replace(
        num_target_calls=np.array(calls), trials=np.array(trials), beta_sum=np.array(beta, np.float32)
    )
    return Comparison(
        plain, speculative, plain_seconds, seconds, differences if differences is None else [*differences]
    )


def test_summary_weighs_by_tokens_and_trials():
    a, b = made([10], [5], [8], [4.0], 2.0, 1.0), made([30, 10], [10, 5], [30, 2], [24.0, 2.0], 2.0, 3.0)
    summary = comparison.summarize([a, b])
    assert (summary.tokens, summary.target_calls) == (50, 20)
    assert summary.plain_speed == 50 / 4 and summary.speed == 50 / 4 and summary.speedup == 1
    assert summary.tokens_per_call == 2.5
    assert summary.alpha == pytest.approx(30 / 40)
    assert comparison.summarize([a]).speedup == 2
    assert comparison.summarize([made([1], [1], [0], [0.0], 1.0, 1.0)]).alpha == 0


@pytest.mark.parametrize(
    ("differences", "dtype", "verdict"),
    [
        ([], "float32", "yes"),
        (None, "float32", "law"),
        ([Difference(0, 3, 1e-5)], "float32", "1 near tie"),
        ([Difference(0, 3, 1e-5), Difference(1, 0, 0.1)], "float32", "NO"),
        ([Difference(0, 3, 1e-5), Difference(1, 0, 0.1)], "bfloat16", "2 near ties"),
    ],
)
def test_verdict(differences, dtype, verdict):
    some = made([2, 2], [1, 1], [1, 1], [1.0, 1.0], 1.0, 1.0, differences)
    assert comparison.verdict([some], dtype) == verdict
    lines = comparison.explain([made([1], [1], [1], [1.0], 1.0, 1.0), some], dtype)
    assert len(lines) == len(differences or ())
    if lines:
        assert lines[0].startswith("input 2 differs from token 4 on") and lines[0].endswith("1e-05 apart: a near tie.")


def test_table_fits_80_columns():
    some = [made([100], [20], [30], [20.0], 1.0, 0.5), made([10, 20], [5, 5], [8, 9], [4.0, 1.0], 1.0, 0.1)]
    console = Console(width=80, file=io.StringIO())
    console.print(comparison.table(some, "float32", temperature=0.0))
    text = console.file.getvalue()
    for part in ("temperature 0", "1", "2-3", "all", "2.00x", "10.00x", "yes", "speedup", "alpha"):
        assert part in text
    assert "…" not in text

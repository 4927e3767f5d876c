"""Random settings, shapes and models: the loop's output, token for token, is that of the slow reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec_jax import verification
from specdec_jax.decoding import speculative_decode
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.sampling import make_sampling
from specdec_jax.settings import RULES
from specdec_jax.types import Inputs

CAPACITY = 16


@functools.partial(jax.jit, static_argnames="model")
def next_logits(model, params, encoder_tokens, history, length):
    return model.forward(params, encoder_tokens, history)[0, length - 1]


def logits_of(model, params, encoder_tokens):
    """A model as the reference sees it: teacher forcing of a padded history."""

    @functools.cache
    def logits(history: tuple[int, ...]) -> np.ndarray:
        padded = np.zeros((1, CAPACITY), np.int32)
        padded[0, : len(history)] = history
        return np.asarray(next_logits(model, params, encoder_tokens, padded, len(history)))

    return lambda history: logits(tuple(history))


ROW = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 0, 1, 2]),
        "top_p": st.sampled_from([1.0, 1.0, 0.6, 0.9]),
        "min_p": st.sampled_from([0.0, 0.0, 0.1, 0.5]),
        "min_length": st.sampled_from([0, 0, 1, 4]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.5, 0.7]),
        "no_repeat_ngram": st.sampled_from([0, 0, 2, 3]),
    }
)
CONFIGURATION = {
    "rule": st.sampled_from(sorted(RULES)),
    "gamma": st.sampled_from([1, 2, 4]),
    "vocab": st.sampled_from([3, 6, 11]),
    "start_id": st.sampled_from([0, 2]),
    "max_length": st.sampled_from([1, 2, 5, 8]),
    "eos_ids": st.sampled_from([(), (1,), (0, 2)]),
    "forbidden_ids": st.sampled_from([(), (0,)]),
    "closeness": st.sampled_from([0.05, 0.5]),
    "seed": st.integers(0, 1000),
    "rows": st.lists(ROW, min_size=1, max_size=3),
}


def check(rule, gamma, vocab, start_id, max_length, eos_ids, forbidden_ids, closeness, seed, rows):
    model = tiny.model(vocab=vocab, start_id=start_id)
    target_params = tiny.params(model, seed % 7, 2.0)
    draft_params = tiny.nudged(target_params, closeness, seed % 5)
    if vocab == 3:  # so few ids that the rules together might leave none
        forbidden_ids, rows = (), [{**row, "no_repeat_ngram": 0, "min_length": 0} for row in rows]
    rows = [reference.Row(**row, forbidden_ids=forbidden_ids) for row in rows]
    encoder_tokens = tiny.encoder_inputs(len(rows), 5, vocab, seed)
    per_row = {
        name: [getattr(row, name) for row in rows] for name in rows[0].__dataclass_fields__ if name != "forbidden_ids"
    }
    seeds = [seed + 31 * i for i in range(len(rows))]
    result = speculative_decode(
        model,
        target_params,
        ModelDrafter(model),
        draft_params,
        Inputs(encoder_tokens),
        gamma=gamma,
        max_length=max_length,
        sampling=make_sampling(len(rows), **per_row, forbidden_ids=forbidden_ids),
        seeds=jnp.asarray(seeds, jnp.int32),
        eos_ids=eos_ids,
        rule=RULES[rule],
    )
    for i, row in enumerate(rows):
        models = [logits_of(model, tree, encoder_tokens[i : i + 1]) for tree in (target_params, draft_params)]
        limits = {"gamma": gamma, "max_length": max_length, "eos_ids": eos_ids}
        expected = reference.decode(*models, start_id, seeds[i], rule, row, **limits)
        assert result.tokens[i, : int(result.lengths[i])].tolist() == expected


@settings(max_examples=3, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(**CONFIGURATION)
def test_a_few_configurations(**configuration):
    check(**configuration)


def test_the_search_notices_another_rule(monkeypatch):
    monkeypatch.setitem(RULES, "token", verification.coupled)
    rows = [{"temperature": 1.0}] * 3
    with pytest.raises(AssertionError):
        check("token", 2, 6, 0, 8, (), (), 0.5, 0, rows)


@pytest.mark.slow
@settings(max_examples=500, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(**CONFIGURATION)
def test_five_hundred_configurations(**configuration):
    check(**configuration)

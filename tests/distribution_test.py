"""The law of whole sequences, decoded through the real loop and cache by tiny T5s, against teacher forcing.

A chi-square over every possible sequence, for each input of a batch. The controls are wrong in ways that decoders
really were wrong, and must be rejected at the same size.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import tiny

from specdec_jax import verification
from specdec_jax.decoding import autoregressive_decode, speculative_decode
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.sampling import ACCEPT, EXTRA, draw, make_sampling, uniforms
from specdec_jax.types import Inputs
from specdec_jax.verification import Proposal

VOCAB, LENGTH = 4, 3
TARGET = tiny.model(vocab=VOCAB)
ROWS = 4096
X = jnp.asarray([[2, 3, 2, 0], [3, 0, 0, 0]], jnp.int32)  # two inputs, in turn along the batch
DRAFTS = {
    "near": (tiny.nudged(tiny.params(TARGET, 0, 2.0), 0.3), {}),
    "other": (tiny.params(TARGET, 8, 2.0), {}),
    "argmax": (tiny.nudged(tiny.params(TARGET, 0, 2.0), 0.3), {"temperature": 0.0}),
}


def params():
    return tiny.params(TARGET, 0, 2.0)


def p_values(decode, sampling_of, calls: int) -> list[float]:
    """Decodes `calls` batches; the p-value of a chi-square for each input."""
    x = Inputs(jnp.tile(X, (ROWS // 2, 1)))
    sampling = sampling_of(ROWS)
    sequences = []
    for call in range(calls):
        result = decode(x, sampling, jnp.arange(call * ROWS, (call + 1) * ROWS, dtype=jnp.int32))
        sequences.append((np.asarray(result.tokens), np.asarray(result.lengths)))
    tokens = np.concatenate([t for t, _ in sequences])
    lengths = np.concatenate([n for _, n in sequences])
    values = []
    for row in range(2):
        law = tiny.exact_law(TARGET, params(), X[row : row + 1], sampling_of(1), LENGTH)
        assert abs(sum(law.values()) - 1) < 1e-5
        seen: dict = {}
        for sequence, length in zip(tokens[row::2].tolist(), lengths[row::2].tolist(), strict=True):
            key = tuple(sequence[:length])
            seen[key] = seen.get(key, 0) + 1
        values.append(chi_square(law, seen))
    return values


def chi_square(law: dict, seen: dict) -> float:
    """The p-value; outcomes expected fewer than five times share a cell, impossible ones must not occur."""
    total = sum(seen.values())
    if any(law.get(key, 0.0) < 1e-9 for key in seen):
        return 0.0
    cells, rest = [], [0.0, 0.0]
    for key, probability in law.items():
        expected, observed = probability * total, seen.get(key, 0)
        if expected >= 5:
            cells.append((expected, observed))
        else:
            rest = [rest[0] + expected, rest[1] + observed]
    if rest[0] >= 5:
        cells.append(tuple(rest))
    expected, observed = np.array(cells).T
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(scipy.stats.chi2.sf(statistic, len(cells) - 1))


def speculative(gamma, draft="near", rule=verification.token, drafter=None):
    tree, draft_settings = DRAFTS[draft]

    def decode(x, sampling, seeds):
        return speculative_decode(
            TARGET,
            params(),
            drafter or ModelDrafter(TARGET),
            tree,
            x,
            gamma=gamma,
            max_length=LENGTH,
            sampling=sampling,
            draft_sampling=make_sampling(ROWS, **draft_settings) if draft_settings else None,
            seeds=seeds,
            rule=rule,
        )

    return decode


def settings(**kwargs):
    return lambda batch: make_sampling(batch, **kwargs)


CASES = [
    (1, "near", {}),
    (2, "other", {}),
    (3, "near", {"temperature": 1.5}),
    (2, "argmax", {}),
    (3, "near", {"top_k": 2}),
    (2, "other", {"top_p": 0.6}),
    (2, "near", {"temperature": 0.5, "top_k": 3, "top_p": 0.7}),
]


@pytest.mark.parametrize(("gamma", "draft", "filters"), CASES)
def test_sequences_have_the_target_law(gamma, draft, filters, record_property):
    values = p_values(speculative(gamma, draft), settings(**filters), calls=5)
    record_property("p_values", values)
    print(f"gamma {gamma}, {draft}, {filters}: p = {values}")
    assert min(values) > 1e-3 / (2 * len(CASES))  # Bonferroni


def test_plain_sequences_have_the_target_law():
    def decode(x, sampling, seeds):
        return autoregressive_decode(TARGET, params(), x, max_length=LENGTH, sampling=sampling, seeds=seeds)

    assert min(p_values(decode, settings(top_p=0.8), calls=5)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.6}, {"temperature": 0.5, "top_p": 0.7}])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("gamma", [1, 2, 3, 4])
def test_sequences_have_the_target_law_at_length(gamma, draft, filters):
    values = p_values(speculative(gamma, draft), settings(**filters), calls=50)
    print(f"gamma {gamma}, {draft}, {filters}: p = {values}")
    assert min(values) > 1e-2 / (2 * 4 * 4 * 3)


def always_accept(keys, target, proposal, lenience):
    n = proposal.num_guesses
    return n, draw(verification.extra_law(target.p, proposal, n), uniforms(keys, EXTRA, 1)[:, 0])


def extra_from_p(keys, target, proposal, lenience):
    n, _ = verification.token(keys, target, proposal, lenience)
    p = jnp.take_along_axis(target.p, n[:, None, None], axis=1)[:, 0]
    return n, draw(p, uniforms(keys, EXTRA, 1)[:, 0])


def softmaxed_residual(keys, target, proposal, lenience):
    n, extra = verification.token(keys, target, proposal, lenience)
    place = jnp.minimum(n, proposal.q.shape[1] - 1)[:, None, None]
    p, q = (jnp.take_along_axis(x, place, axis=1)[:, 0] for x in (target.p, proposal.q))
    wrong = draw(jax.nn.softmax(jnp.maximum(p - q, 0)), uniforms(keys, EXTRA, 1)[:, 0])
    return n, jnp.where(n < proposal.num_guesses, wrong, extra)


def reused_r(keys, target, proposal, lenience):
    r = jnp.broadcast_to(uniforms(keys, ACCEPT, 1), proposal.tokens.shape)
    p, q = (verification.at_guesses(x, proposal.tokens) for x in (target.p, proposal.q))
    n = verification.count_accepted(verification.accepts(r, p, q, lenience), proposal.num_guesses)
    return n, draw(verification.extra_law(target.p, proposal, n), r[:, 0])


def dropped_for_low_q(keys, target, proposal, lenience):
    unlikely = verification.at_guesses(proposal.q, proposal.tokens) < 0.3
    num_guesses = verification.count_accepted(~unlikely, proposal.num_guesses)
    return verification.token(keys, target, proposal._replace(num_guesses=num_guesses), lenience)


@dataclasses.dataclass(frozen=True)
class ArgmaxWithSoftmax:
    """Guesses the argmax, and says that it was drawn from the softmax."""

    inner: ModelDrafter

    def init(self, params, inputs, cache_length):
        return self.inner.init(params, inputs, cache_length)

    def propose(self, params, state, tokens, positions, *, gamma, sampling, keys):
        logits, state = self.inner.step(params, state, tokens, positions, first=True)
        guess = jnp.argmax(logits, axis=-1).astype(jnp.int32)[:, None]
        return Proposal(guess, jax.nn.softmax(logits)[:, None], jnp.ones((tokens.shape[0],), jnp.int32)), state


@pytest.mark.parametrize(
    "rule",
    [always_accept, extra_from_p, softmaxed_residual, reused_r, dropped_for_low_q],
    ids=lambda rule: rule.__name__,
)
def test_a_wrong_rule_is_rejected(rule):
    assert max(p_values(speculative(2, "other", rule), settings(), calls=5)) < 1e-6


def test_argmax_guesses_with_a_softmax_q_are_rejected():
    drafter = ArgmaxWithSoftmax(ModelDrafter(TARGET))
    assert max(p_values(speculative(1, "near", drafter=drafter), settings(), calls=5)) < 1e-6

"""The law of whole sequences decoded through the real loop and cache, by chi-square against the target's exact law.

Wrong decoders must be rejected, on fewer sequences even, or the test would show nothing.
"""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from specdec_jax import certificate, verification
from specdec_jax.adaptation import make_adaptation
from specdec_jax.decoding import autoregressive_decode, speculative_decode
from specdec_jax.drafters.copying import CopyDrafter
from specdec_jax.drafters.hierarchical import HierarchicalDrafter
from specdec_jax.drafters.mixture import MixtureDrafter
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.drafters.ngram import BigramDrafter, UnigramDrafter
from specdec_jax.drafters.one_shot import OneShotDrafter
from specdec_jax.drafters.random_tokens import RandomDrafter
from specdec_jax.drafters.table import count
from specdec_jax.sampling import ACCEPT, EXTRA, StepKeys, draw, make_sampling, standardize, uniforms
from specdec_jax.types import Inputs
from specdec_jax.verification import Proposal

VOCAB, LENGTH = 4, 3
TARGET = tiny.model(vocab=VOCAB)
ROWS, CALLS = 4096, 5
X = jnp.asarray([[2, 3, 2, 0], [3, 0, 0, 0]], jnp.int32)  # two inputs, in turn along the batch
NEAR = tiny.nudged(tiny.params(TARGET, 0, 2.0), 0.3)
OTHER = tiny.params(TARGET, 8, 2.0)
RULES = (verification.token, verification.block, verification.coupled)


def params():
    return tiny.params(TARGET, 0, 2.0)


@dataclasses.dataclass(frozen=True)
class Fewer:
    """A model that makes 0 to gamma guesses, by the position and the row's last token."""

    inner: ModelDrafter

    def init(self, params, inputs, cache_length):
        return self.inner.init(params, inputs, cache_length)

    def propose(self, params, state, tokens, positions, *, gamma, wanted, sampling, keys):
        guesses, qs = [], []
        newest = jnp.take_along_axis(tokens, positions[:, None], axis=1)[:, 0]
        u = uniforms(keys, 0, gamma)
        rows = jnp.arange(tokens.shape[0])
        for i in range(gamma):
            logits, state = self.inner.step(params, state, tokens, positions + i, first=i == 0)
            q = standardize(logits[:, None], sampling, tokens, positions + i)[:, 0]
            x = verification.draw_guess(keys, q, u[:, i], jnp.int32(i))
            tokens = tokens.at[rows, positions + i + 1].set(x)
            guesses, qs = [*guesses, x], [*qs, q]
        num_guesses = (positions + newest) % (gamma + 1)
        return Proposal(jnp.stack(guesses, 1), jnp.stack(qs, 1), num_guesses), state


@dataclasses.dataclass(frozen=True)
class Copying:
    """Point masses: what stands in the encoder input, whatever the target wants."""

    def init(self, params, inputs, cache_length):
        return inputs.encoder_tokens

    def propose(self, params, state, tokens, positions, *, gamma, wanted, sampling, keys):
        places = (positions[:, None] + jnp.arange(gamma)[None]) % 2
        guesses = jnp.take_along_axis(state, places, axis=1)
        return Proposal(guesses, None, jnp.full((tokens.shape[0],), gamma, jnp.int32)), state


MODEL = ModelDrafter(TARGET)
TABLE = count([[2, 3, 1], [3, 3, 2], [2, 2, 1], [3, 2, 3]], vocab_size=VOCAB, distances=4).params()
MIXTURE = MixtureDrafter(MODEL, BigramDrafter(), 0.5, VOCAB)
# name: drafter, its parameters, its own sampling settings
DRAFTS = {
    "near": (MODEL, NEAR, {}),
    "other": (MODEL, OTHER, {}),
    "argmax": (MODEL, NEAR, {"temperature": 0.0}),
    "cold": (MODEL, NEAR, {"temperature": 0.5}),
    "fewer": (Fewer(MODEL), OTHER, {}),
    "copying": (Copying(), None, {}),
    "unigram": (UnigramDrafter(), TABLE, {}),
    "bigram": (BigramDrafter(), TABLE, {}),
    "copy": (CopyDrafter(), None, {}),
    "copy with a table": (CopyDrafter(shortest=2), TABLE, {}),
    "one-shot": (OneShotDrafter(), TABLE, {}),
    "random": (RandomDrafter(VOCAB), None, {}),
    "mixture": (MIXTURE, (OTHER, TABLE), {}),
    "hierarchical": (HierarchicalDrafter(TARGET, BigramDrafter(), 2), (OTHER, TABLE), {}),
    "hierarchical of models": (HierarchicalDrafter(TARGET, MODEL, 1), (NEAR, OTHER), {}),
    "adaptive": (MODEL, OTHER, {}),
    "adaptive copy": (CopyDrafter(), TABLE, {}),
    "adaptive one-shot": (OneShotDrafter(), TABLE, {}),
    "adaptive hierarchical": (HierarchicalDrafter(TARGET, MODEL, 2), (NEAR, OTHER), {}),
}
# What those called adaptive choose by: rows make 0 to gamma guesses, by their past and by the draft's confidence.
ADAPTATION = {"alpha": 0.6, "weight": 2.0, "trust": 1.0, "confidence": 0.5}


def p_values(decode, sampling_of, calls=CALLS) -> list[float]:
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
        law = tiny.exact_law(TARGET, params(), X[row : row + 1], sampling_of, LENGTH)
        assert abs(sum(law.values()) - 1) < 1e-5
        seen = Counter(
            tuple(sequence[:length])
            for sequence, length in zip(tokens[row::2].tolist(), lengths[row::2].tolist(), strict=True)
        )
        values.append(certificate.chi_square(law, seen, excuse=False).p_value)
    return values


def speculative(gamma, draft="near", rule=None, drafter=None, lenience=1.0):
    usual, tree, own = DRAFTS[draft]

    def decode(x, sampling, seeds):
        draft_sampling = sampling
        if own:
            draft_sampling = sampling._replace(temperature=make_sampling(ROWS, **own).temperature, greedy=None)
        return speculative_decode(
            TARGET,
            params(),
            drafter or usual,
            tree,
            x,
            gamma=gamma,
            max_length=LENGTH,
            sampling=sampling,
            draft_sampling=draft_sampling,
            seeds=seeds,
            rule=rule,
            lenience=lenience,
            adaptation=make_adaptation(gamma, costs=[1 + 0.35 * i for i in range(gamma + 1)], **ADAPTATION)
            if draft.startswith("adaptive")
            else None,
        )

    return decode


def settings(**kwargs):
    return lambda batch: make_sampling(batch, **kwargs)


CASES = [
    (1, "near", {}),
    (2, "other", {"repetition_penalty": 1.7}),
    (3, "near", {"temperature": 1.5, "min_p": 0.2}),
    (2, "argmax", {"no_repeat_ngram": 1}),
    (3, "fewer", {"top_k": 2}),
    (2, "other", {"top_p": 0.6}),
    (4, "near", {"temperature": 0.5, "top_k": 3, "top_p": 0.7}),
    (3, "cold", {"min_length": 2}),
    (2, "copying", {"forbidden_ids": (3,)}),
    (4, "fewer", {"no_repeat_ngram": 2, "min_length": 1}),
    (3, "bigram", {"top_p": 0.9}),
    (2, "unigram", {"repetition_penalty": 1.3}),
    (4, "copy", {}),
    (3, "copy with a table", {"temperature": 0.7}),
    (4, "one-shot", {"no_repeat_ngram": 1}),
    (2, "random", {"top_k": 3}),
    (3, "mixture", {"temperature": 1.5}),
    (4, "hierarchical", {"temperature": 0.7}),
    (2, "hierarchical of models", {"forbidden_ids": (3,)}),
    (4, "adaptive", {}),
    (3, "adaptive copy", {"min_length": 1}),
    (4, "adaptive one-shot", {}),
    (4, "adaptive hierarchical", {}),
]
_SIGNIFICANCE = 1e-3 / (len(RULES) * 2 * len(CASES))  # Bonferroni


# The default run takes every other case, and each drafter's, with one rule each, the slow one all of them.
ALL = [
    pytest.param(rule, *case, marks=[] if (i + j) % len(RULES) == 0 and (j % 2 == 0 or j > 9) else pytest.mark.slow)
    for i, rule in enumerate(RULES)
    for j, case in enumerate(CASES)
]


@pytest.mark.parametrize(("rule", "gamma", "draft", "filters"), ALL)
def test_sequences_have_the_target_law(rule, gamma, draft, filters):
    values = p_values(speculative(gamma, draft, rule), settings(**filters))
    print(f"{rule.__name__}, gamma {gamma}, {draft}, {filters}: p = {values}")
    assert min(values) > _SIGNIFICANCE


def test_there_are_sequences_enough():
    assert ROWS * CALLS * len(CASES) >= 200_000  # of every rule, in the slow run
    # One case's input has half a batch; this total variation, and any above it, would be rejected.
    power = certificate.detectable(VOCAB**LENGTH, ROWS * CALLS // 2, _SIGNIFICANCE)
    print(f"total variation that is detected with probability 0.99: {power:.3f}")
    assert power < 0.06


def test_plain_sequences_have_the_target_law():
    for rule in (verification.token, verification.coupled):

        def decode(x, sampling, seeds, rule=rule):
            kwargs = {"max_length": LENGTH, "sampling": sampling, "seeds": seeds, "rule": rule}
            return autoregressive_decode(TARGET, params(), x, **kwargs)

        assert min(p_values(decode, settings(top_p=0.8))) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.6}, {"temperature": 0.5, "top_p": 0.7}])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("gamma", [1, 2, 3, 4])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_sequences_have_the_target_law_at_length(rule, gamma, draft, filters):
    values = p_values(speculative(gamma, draft, rule), settings(**filters), calls=20)
    print(f"{rule.__name__}, gamma {gamma}, {draft}, {filters}: p = {values}")
    assert min(values) > 1e-2 / (2 * 4 * len(DRAFTS) * 4 * len(RULES))


def always_accept(keys, target, proposal, lenience):
    n = proposal.num_guesses
    return n, draw(verification.extra_law(target.p, proposal, n), uniforms(keys, EXTRA, 1)[:, 0])


def extra_from_p(keys, target, proposal, lenience):
    n, _ = verification.token(keys, target, proposal, lenience)
    p = jnp.take_along_axis(target.p, n[:, None, None], axis=1)[:, 0]
    return n, draw(p, uniforms(keys, EXTRA, 1)[:, 0])


def another_residual(residual):
    """The token rule with a residual of its own, made from p, q and the target's unfiltered distribution."""

    def rule(keys, target, proposal, lenience):
        n, extra = verification.token(keys, target, proposal, lenience)
        place = jnp.minimum(n, proposal.q.shape[1] - 1)[:, None, None]
        of_step = (target.p, proposal.q, jax.nn.softmax(target.logits))
        weight = residual(*(jnp.take_along_axis(x, place, axis=1)[:, 0] for x in of_step))
        return n, jnp.where(n < proposal.num_guesses, draw(weight, uniforms(keys, EXTRA, 1)[:, 0]), extra)

    return rule


softmaxed_residual = another_residual(lambda p, q, raw: jax.nn.softmax(jnp.maximum(p - q, 0)))
residual_from_raw_p = another_residual(lambda p, q, raw: jnp.maximum(raw - q, 0))


def reused_r(keys, target, proposal, lenience):
    r = jnp.broadcast_to(uniforms(keys, ACCEPT, 1), proposal.tokens.shape)
    p, q = (verification.at_guesses(x, proposal.tokens) for x in (target.p, proposal.q))
    n = verification.count_accepted(verification.accepts(r, p, q, lenience), proposal.num_guesses)
    return n, draw(verification.extra_law(target.p, proposal, n), r[:, 0])


def dropped_for_low_q(keys, target, proposal, lenience):
    unlikely = verification.at_guesses(proposal.q, proposal.tokens) < 0.3
    num_guesses = verification.count_accepted(~unlikely, proposal.num_guesses)
    return verification.token(keys, target, proposal._replace(num_guesses=num_guesses), lenience)


def block_by_absolute_position(keys, target, proposal, lenience):
    """Block verification whose numbers belong to a place of the sequence, and so come again after a rejection."""
    p, guesses = target.p, proposal.tokens
    weights = verification.block_weights(*(verification.at_guesses(x, guesses) for x in (p, proposal.q)))
    h = verification.block_accept_probability(weights, p, proposal)
    eta = jnp.concatenate(
        [uniforms(StepKeys(keys.rngs, keys.positions + i), ACCEPT, 1) for i in range(guesses.shape[1])], axis=1
    )
    n = verification.count_block(eta < h, proposal.num_guesses)
    weight = jnp.take_along_axis(weights, n[:, None], axis=1)[:, 0]
    return n, draw(verification.extra_law(p, proposal, n, weight), uniforms(keys, EXTRA, 1)[:, 0])


@dataclasses.dataclass(frozen=True)
class OneGuess:
    """Draws a guess with settings of its own, and says that it was drawn from the plain softmax."""

    argmax: bool

    def init(self, params, inputs, cache_length):
        return MODEL.init(params, inputs, cache_length)

    def propose(self, params, state, tokens, positions, *, gamma, wanted, sampling, keys):
        logits, state = MODEL.step(params, state, tokens, positions, first=True)
        batch = tokens.shape[0]
        own = make_sampling(batch, top_k=1) if self.argmax else make_sampling(batch, top_p=0.6)
        guess = draw(standardize(logits[:, None], own, tokens, positions)[:, 0], uniforms(keys, 0, 1)[:, 0])
        return Proposal(guess[:, None], jax.nn.softmax(logits)[:, None], jnp.ones((batch,), jnp.int32)), state


WRONG = {
    "always accept": (speculative(2, "other", always_accept), {}),
    "extra token from p": (speculative(2, "other", extra_from_p), {}),
    "softmaxed residual": (speculative(2, "other", softmaxed_residual), {}),
    "residual from raw p": (speculative(2, "other", residual_from_raw_p), {"temperature": 0.5}),
    "reused r": (speculative(2, "other", reused_r), {}),
    "guess dropped for low q": (speculative(2, "other", dropped_for_low_q), {}),
    "block noise by absolute position": (speculative(2, "other", block_by_absolute_position), {"temperature": 2.0}),
    "argmax guesses with softmax q": (speculative(1, "near", drafter=OneGuess(argmax=True)), {}),
    "top-p on one side": (speculative(1, "near", drafter=OneGuess(argmax=False)), {}),
    "lenience 0.5": (speculative(2, "other", lenience=0.5), {}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_decoder_is_rejected(name):
    decode, filters = WRONG[name]
    values = p_values(decode, settings(**filters), calls=2)  # a right one stands CALLS of them
    print(f"{name}: p = {values}")
    assert min(values) < 1e-6

"""A tiny target, drafts of it from perfect to hopeless, and what holds for every result of decoding with them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tiny

from specdec_jax import verification
from specdec_jax.decoding import autoregressive_decode, speculative_decode
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.sampling import make_sampling
from specdec_jax.types import Inputs
from specdec_jax.verification import Proposal

VOCAB = 20
TARGET = tiny.model(vocab=VOCAB, emb=16)
DRAFT = tiny.model(vocab=VOCAB)


def target_params(seed=0):
    return tiny.params(TARGET, seed, 3.0)


def inputs(batch, seed=0):
    return Inputs(tiny.encoder_inputs(batch, length=6, vocab=VOCAB, seed=seed))


def plain(
    batch, *, temperature=0.0, max_length=20, eos_ids=(1,), x=None, seeds=None, rule=verification.token, **settings
):
    return autoregressive_decode(
        TARGET,
        target_params(),
        inputs(batch) if x is None else x,
        max_length=max_length,
        sampling=make_sampling(batch, temperature=temperature, **settings),
        seeds=jnp.arange(batch, dtype=jnp.int32) if seeds is None else seeds,
        eos_ids=eos_ids,
        rule=rule,
    )


def speculative(
    batch,
    *,
    gamma,
    drafter="near",
    temperature=0.0,
    max_length=20,
    eos_ids=(1,),
    x=None,
    seeds=None,
    rule=None,
    lenience=1.0,
    draft_temperature=None,
    limits=None,
    adaptation=None,
    **settings,
):
    """`drafter` is one of those below by name, or any other with its parameters."""
    known = {
        "near": (ModelDrafter(TARGET), tiny.nudged(target_params(), 0.05)),
        "same": (ModelDrafter(TARGET), target_params()),
        "other": (ModelDrafter(DRAFT), tiny.params(DRAFT, 5, 3.0)),
        "wrong": (WrongDrafter(TARGET), target_params()),
        "scripted": (ScriptedDrafter(), None),
    }
    model, tree = known[drafter] if isinstance(drafter, str) else drafter
    return speculative_decode(
        TARGET,
        target_params(),
        model,
        tree,
        inputs(batch) if x is None else x,
        gamma=gamma,
        max_length=max_length,
        sampling=make_sampling(batch, temperature=temperature, **settings),
        seeds=jnp.arange(batch, dtype=jnp.int32) if seeds is None else seeds,
        eos_ids=eos_ids,
        draft_sampling=None if draft_temperature is None else make_sampling(batch, temperature=draft_temperature),
        rule=rule,
        lenience=lenience,
        limits=limits,
        adaptation=adaptation,
    )


@dataclasses.dataclass(frozen=True)
class Wrapped:
    """A model around another one."""

    inner: Any

    @property
    def vocab_size(self):
        return self.inner.vocab_size

    def prefill(self, params, inputs, cache_length):
        return self.inner.prefill(params, inputs, cache_length)

    def extend(self, params, cache, tokens, positions):
        return self.inner.extend(params, cache, tokens, positions)


@dataclasses.dataclass(frozen=True)
class WrongDrafter(ModelDrafter):
    """Always guesses what the target would not say."""

    def step(self, params, state, tokens, positions, *, first):
        logits, state = super().step(params, state, tokens, positions, first=first)
        return -logits, state


@dataclasses.dataclass(frozen=True)
class ScriptedDrafter:
    """Proposes 0, 1, .. gamma guesses in turn, by position and row; made-up ids, point masses."""

    def init(self, params, inputs, cache_length):
        return jnp.int32(0)

    def propose(self, params, state, tokens, positions, *, gamma, wanted, sampling, keys):
        batch = tokens.shape[0]
        newest = jnp.take_along_axis(tokens, positions[:, None], axis=1)
        guesses = (newest * 7 + positions[:, None] + jnp.arange(gamma)[None]) % VOCAB
        num_guesses = (positions + jnp.arange(batch)) % (gamma + 1)
        return Proposal(guesses.astype(jnp.int32), None, num_guesses.astype(jnp.int32)), state + 1


def same_tokens(a, b):
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_array_equal(a.lengths, b.lengths)
    np.testing.assert_array_equal(a.finish_reason, b.finish_reason)
    np.testing.assert_allclose(a.scores, b.scores, atol=2e-5)


def consistent(result):
    """What holds for every result."""
    r = jax.tree.map(np.asarray, result)
    np.testing.assert_array_equal(r.accepted + r.extra, r.lengths)
    np.testing.assert_array_equal(r.accept_counts.sum(1), r.num_target_calls)
    np.testing.assert_array_equal((r.accept_counts * np.arange(r.accept_counts.shape[1])[None]).sum(1), r.accepted)
    np.testing.assert_array_equal(r.step_emitted.sum(1), r.lengths)
    np.testing.assert_array_equal((r.step_accepted >= 0).sum(1), r.num_target_calls)
    assert (r.accepted <= r.trials).all() and (r.trials <= r.drafted).all()
    assert (0 <= r.beta_sum).all() and (r.beta_sum <= r.trials + 1e-3).all()
    max_length = r.tokens.shape[1]
    after = np.arange(max_length)[None] >= r.lengths[:, None]
    assert (r.tokens[after] == 0).all() and (r.scores[after] == 0).all() and (r.lengths <= max_length).all()

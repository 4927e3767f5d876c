"""Tiny random T5s, and slow, obviously right references, for tests of decoding."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.sampling import End, PointMass, standardize


@functools.cache
def model(vocab: int = 6, emb: int = 8, layers: int = 1, start_id: int = 0, **kwargs) -> T5:
    return T5(
        T5Config(
            vocab_size=vocab,
            emb_dim=emb,
            num_heads=2,
            head_dim=4,
            mlp_dim=16,
            num_encoder_layers=1,
            num_decoder_layers=layers,
            start_id=start_id,
            **kwargs,
        )
    )


@functools.cache
def params(t5: T5, seed: int = 0, sharpness: float = 1.0):
    """Random weights, drawn without compiling anything; a greater sharpness makes the predictions less uniform."""
    rng = np.random.default_rng(seed)

    def weight(path, shape):
        name = path[-1].key
        if name == "scale":
            return jnp.ones(shape.shape)
        std = 1.0 if name == "embedding" else shape.shape[0] ** -0.5
        if "logits_dense" in str(path):
            std *= sharpness
        return jnp.asarray(rng.normal(0.0, std, shape.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(weight, t5.param_shapes())


def nudged(tree, amount: float, seed: int = 9):
    """The same weights with noise: a draft that agrees often, not always."""
    leaves, shape = jax.tree.flatten(tree)
    rngs = jax.random.split(jax.random.key(seed), len(leaves))
    noisy = [x + amount * jax.random.normal(rng, x.shape) for x, rng in zip(leaves, rngs, strict=True)]
    return jax.tree.unflatten(shape, noisy)


def encoder_inputs(batch: int, length: int = 5, vocab: int = 6, seed: int = 0) -> jax.Array:
    """Ragged rows of random ids, at least one token each."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(2, vocab, (batch, length))
    lengths = rng.integers(1, length + 1, batch)
    return jnp.asarray(np.where(np.arange(length)[None] < lengths[:, None], tokens, 0), jnp.int32)


def exact_law(t5: T5, tree, encoder_tokens, sampling_of, max_length: int, eos_ids=(1,)) -> dict:
    """The law of whole sequences for one row, by teacher forcing every prefix. {tuple of ids: probability}.

    `sampling_of(batch)` gives the settings.
    """
    starts = list(itertools.product(range(t5.vocab_size), repeat=max_length))
    decoder = jnp.asarray([(t5.config.start_id, *s) for s in starts], jnp.int32)
    rows = jnp.broadcast_to(encoder_tokens, (len(starts), encoder_tokens.shape[1]))
    zeros = jnp.zeros((len(starts),), jnp.int32)
    logits = jax.jit(t5.forward)(tree, rows, decoder)[:, :max_length]
    p = standardize(logits, sampling_of(len(starts))._replace(end=End(jnp.asarray(eos_ids), zeros)), decoder, zeros)
    if isinstance(p, PointMass):
        p = np.eye(t5.vocab_size)[np.asarray(p.tokens)]
    p = np.asarray(p, np.float64)
    law: dict = {}
    for s, row in zip(starts, p, strict=True):
        probability, sequence = 1.0, []
        for i, token in enumerate(s):
            probability *= row[i, token]
            sequence.append(token)
            if token in eos_ids or probability == 0:
                break
        # Sequences that share a prefix up to EOS are the same outcome: count each once.
        law[tuple(sequence)] = probability
    return law

"""How training sees T5's weights: raw parameters whose `fold` is the plain T5 1.1 tree.

T5 neither scales its embeddings nor divides attention logits by sqrt(head_dim); it was trained with
Adafactor, whose steps are relative to each weight's own size. Adam's steps are not, and with the plain tree
small models learn slowly. So Adam trains raw weights of like size, and the model is given

    token_embedder/embedding = raw * sqrt(emb_dim)           query/kernel = raw / sqrt(head_dim)

Checkpoints hold the folded, plain weights.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from specdec_jax.models.t5 import T5
from specdec_jax.types import Params


def fold(raw: Params, model: T5) -> Params:
    """The plain T5 weights of raw ones; differentiable."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: leaf * _factor(path, model), raw)


def unfold(params: Params, model: T5) -> Params:
    """The raw weights of plain T5 ones; the inverse of `fold` up to rounding."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: jnp.asarray(leaf) / _factor(path, model), params)


def initial_raw(model: T5, seed: int) -> Params:
    """Random raw weights for training from nothing.

    Kernels have variance 1 / fan-in. Those that write to the residual stream are divided by sqrt(3 * layers),
    so that the stream's variance does not grow with depth. NumPy draws them:
    JAX would compile once per shape.
    """
    generator = np.random.default_rng(seed)

    def initial(path: tuple, leaf: jax.ShapeDtypeStruct) -> Array:
        names = _names(path)
        if names[-1] == "scale":
            return jnp.ones(leaf.shape, jnp.float32)
        if names[-1] == "embedding":
            deviation = model.config.emb_dim**-0.5
        elif names[-1] == "rel_embedding":
            deviation = 0.1
        else:
            deviation = leaf.shape[0] ** -0.5
            if names[-2] in ("out", "wo"):
                encoder, decoder = model.config.num_encoder_layers, model.config.num_decoder_layers
                deviation /= math.sqrt(3 * (encoder if names[0] == "encoder" else decoder))
        return jnp.asarray(deviation * generator.standard_normal(leaf.shape, dtype=np.float32))

    return jax.tree_util.tree_map_with_path(initial, model.param_shapes())


def _names(path: tuple) -> list[str]:
    return [entry.key for entry in path]


def _factor(path: tuple, model: T5) -> float:
    names = _names(path)
    if names[-2:] == ["token_embedder", "embedding"]:
        return math.sqrt(model.config.emb_dim)
    return model.config.head_dim**-0.5 if names[-2:] == ["query", "kernel"] else 1.0

"""T5's layers as t5x defines them: no biases, no 1/sqrt(head_dim), RMS norm, relative position buckets.

Parameter names and shapes are t5x's, so that its checkpoints fit without renaming or transposing. So are the logical
names of the axes, by which weights, activations and caches are split over a mesh of devices (axes.py, sharding.py).
"""

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.spmd import with_logical_constraint
from jaxtyping import Array, Float

MASKED = -1e10  # added to attention logits, as t5x does: a row without any visible key stays finite

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "linear": lambda x: x,
}


TRANSPOSED = "transposed_kernel"
"""Name under which a kernel is stored as [out, in]; see `Dense`."""

SLOT_AXES = ("batch", "heads", "length", "kv")
"""Logical axes of queries, keys, values and the caches that hold them."""


class Dense(nn.Module):
    """A linear map without bias; the kernel is [in, out] whatever its heads.

    For decoding on a CPU the weights can be given as [out, in] instead (`T5.prepare`). A few rows then cost little
    more than one: XLA's product of such a kernel with a few rows reads it once, where the plain one packs it anew in
    every call. The barrier keeps XLA from turning the product back into the plain one.
    """

    features: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "*lead in_dim"]) -> Float[Array, "*lead out_dim"]:
        rows = x.astype(self.dtype).reshape(-1, x.shape[-1])  # two axes: the gradient's products are faster so
        if self.has_variable("params", TRANSPOSED):
            kernel = self.get_variable("params", TRANSPOSED).astype(self.dtype)
            product = jax.lax.optimization_barrier(_times_rows(kernel, rows)).T
        else:
            init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
            kernel = self.param("kernel", init, (x.shape[-1], self.features), jnp.float32)
            product = jnp.dot(rows, kernel.astype(self.dtype))
        return product.reshape(*x.shape[:-1], self.features)


_CACHED = 2**20  # numbers that any CPU's last cache holds


def _times_rows(kernel: Float[Array, "out_dim in_dim"], rows: Float[Array, "rows in_dim"]) -> Array:
    """[out, rows], as fast as XLA for CPU can.

    One row it multiplies on a single core. As a batch of two products, of half the outputs each, it takes two: two
    thirds of the time on two cores, and no more on one. Two rows are fastest as two such products, if the kernel stays
    in the cache from the first to the second. From there on it has a fast way for four rows and for every multiple of
    eight; nine rows would take twice as long as sixteen.
    """
    num, on_mesh = rows.shape[0], jax.sharding.get_abstract_mesh().size > 1
    most = 2 if kernel.size <= _CACHED else 1
    if num > most or kernel.shape[0] % 2 or on_mesh:  # halves of a kernel that is split over devices would be moved
        group = 1 if num == 1 else 4 if num <= 4 else 8
        rows = jnp.pad(rows, ((0, -num % group), (0, 0)))
        return jnp.einsum("oi,ri->or", kernel, rows)[:, :num]
    halves = kernel.reshape(2, -1, kernel.shape[1])
    both = [jnp.broadcast_to(rows[i], (2, 1, kernel.shape[1])) for i in range(num)]
    products = [jnp.einsum("noi,nri->nor", halves, row).reshape(-1, 1) for row in both]
    return jnp.concatenate(products, axis=1)


def times_embedding(
    embedding: Float[Array, "vocab emb"], x: Float[Array, "batch length emb"]
) -> Float[Array, "batch length vocab"]:
    """Every token's dot product with the embedding, a kernel that is [out, in] as it is."""

    def on_cpu(embedding: Array, rows: Array) -> Array:
        return jax.lax.optimization_barrier(_times_rows(embedding, rows)).T

    rows = x.reshape(-1, x.shape[-1])
    product = jax.lax.platform_dependent(embedding, rows, cpu=on_cpu, default=lambda e, rows: jnp.dot(rows, e.T))
    return product.reshape(*x.shape[:-1], -1)


class RMSNorm(nn.Module):
    """Scales by the root mean square, computed in float32, then cast, then times the learnt scale."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "*lead emb"]) -> Float[Array, "*lead emb"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        return x.astype(self.dtype) * jnp.expand_dims(scale.astype(self.dtype), tuple(range(x.ndim - 1)))


class Mlp(nn.Module):
    """The feed-forward block: `wi` (T5 1.0) or `wi_0`, `wi_1`, ... whose activations are multiplied (T5 1.1)."""

    mlp_dim: int
    activations: tuple[str, ...]
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "*lead emb"]) -> Float[Array, "*lead emb"]:
        gated = len(self.activations) > 1
        factors = [
            ACTIVATIONS[activation](Dense(self.mlp_dim, self.dtype, name=f"wi_{i}" if gated else "wi")(x))
            for i, activation in enumerate(self.activations)
        ]
        hidden = with_logical_constraint(functools.reduce(operator.mul, factors), ("batch", "length", "mlp"))
        return Dense(x.shape[-1], self.dtype, name="wo")(hidden)


class Segment(NamedTuple):
    """Keys and values that are attended to, with their share of the bias (mask and relative bias), float32."""

    keys: Float[Array, "batch heads slots head_dim"]
    values: Float[Array, "batch heads slots head_dim"]
    bias: Float[Array, "#batch #heads #k slots"]


class Attention(nn.Module):
    """Multi-head attention, its projections apart so that keys and values can be cached."""

    num_heads: int
    head_dim: int
    emb_dim: int
    dtype: Any

    def setup(self) -> None:
        joined = self.num_heads * self.head_dim  # heads-major
        self.query = Dense(joined, self.dtype)
        self.key = Dense(joined, self.dtype)
        self.value = Dense(joined, self.dtype)
        self.out = Dense(self.emb_dim, self.dtype)

    def _heads_first(self, x: Float[Array, "batch k joined"]) -> Float[Array, "batch heads k head_dim"]:
        x = x.reshape(*x.shape[:2], self.num_heads, self.head_dim).swapaxes(1, 2)
        return with_logical_constraint(x, SLOT_AXES)

    def keys_values(
        self, x: Float[Array, "batch k emb"]
    ) -> tuple[Float[Array, "batch heads k head_dim"], Float[Array, "batch heads k head_dim"]]:
        """Projects x to keys and values."""
        return self._heads_first(self.key(x)), self._heads_first(self.value(x))

    def attend(self, x: Float[Array, "batch k emb"], *segments: Segment) -> Float[Array, "batch k emb"]:
        """Attends from x to the keys of all segments together."""
        query = self._heads_first(self.query(x))
        logits = [jnp.einsum("bhkd,bhtd->bhkt", query, s.keys).astype(jnp.float32) + s.bias for s in segments]
        weights = jax.nn.softmax(jnp.concatenate(logits, axis=-1)).astype(self.dtype)
        borders = itertools.accumulate(s.keys.shape[2] for s in segments)
        shares = jnp.split(weights, list(borders)[:-1], axis=-1)
        parts = [jnp.einsum("bhkt,bhtd->bhkd", w, s.values) for w, s in zip(shares, segments, strict=True)]
        y = functools.reduce(operator.add, parts).swapaxes(1, 2)
        return self.out(y.reshape(*y.shape[:2], -1))


def relative_bucket(distances: np.ndarray, *, bidirectional: bool, num_buckets: int, max_distance: int) -> np.ndarray:
    """T5's bucket of each distance, which is key position - query position; constants, so NumPy.

    Half of the buckets are exact small distances, the other half grow logarithmically up to max_distance. In the
    encoder half of all buckets are for keys after the query; in the decoder such keys are masked anyway.
    """
    bucket = np.zeros_like(distances)
    behind = -distances
    if bidirectional:
        num_buckets //= 2
        bucket += np.where(behind < 0, num_buckets, 0)
        behind = np.abs(behind)
    else:
        behind = np.maximum(behind, 0)
    exact = num_buckets // 2
    ratio = np.log(behind.astype(np.float32) / exact + np.finfo(np.float32).eps) / np.log(max_distance / exact)
    large = np.minimum(exact + (ratio * (num_buckets - exact)).astype(np.int32), num_buckets - 1)
    return bucket + np.where(behind < exact, behind, large)


class RelativeBias(nn.Module):
    """The learnt bias of each head for each bucket of distances."""

    num_heads: int
    num_buckets: int
    max_distance: int
    bidirectional: bool

    @nn.compact
    def __call__(self, distances: np.ndarray) -> Float[Array, "heads distance"]:
        """Bias per head, float32, for a list of distances (key position - query position)."""
        init = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")
        table = self.param("rel_embedding", init, (self.num_heads, self.num_buckets), jnp.float32)
        bucket = relative_bucket(
            distances,
            bidirectional=self.bidirectional,
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
        )
        return table.astype(jnp.float32) @ jax.nn.one_hot(bucket, self.num_buckets, axis=0)

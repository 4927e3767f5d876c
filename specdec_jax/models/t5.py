"""T5 (1.0, 1.1, mT5, ByT5) on t5x's parameter tree, with one decoder path for everything.

`T5` is the Decoder that the rest of the package sees. Drafting, verification, plain decoding, teacher forcing and
training all run `T5Module.extend`; nothing is implemented twice.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.spmd import with_logical_constraint
from jaxtyping import Array, Bool, Float, Float32, Int32

from specdec_jax.models.layers import (
    MASKED,
    SLOT_AXES,
    TRANSPOSED,
    Attention,
    Dense,
    Mlp,
    RelativeBias,
    RMSNorm,
    Segment,
    times_embedding,
)
from specdec_jax.models.t5_cache import T5Cache, write_slots
from specdec_jax.models.t5_config import T5Config
from specdec_jax.types import Inputs, Params


def _once_known(
    update: Float[Array, "batch heads k head_dim"], attended: Float[Array, "batch k emb"]
) -> Float[Array, "batch heads k head_dim"]:
    """What is written into a cache, not known before the attention to that cache is.

    Without this dependence XLA for CPU cannot tell that the cache is read before it is overwritten, and copies all of
    it, twice in every call.
    """
    return update + 0 * attended[:, :1, :1, None].astype(update.dtype)


def _residual(x: Float[Array, "batch length emb"]) -> Float[Array, "batch length emb"]:
    """Says how the residual stream is split over devices: whole vectors, of which every device has its rows'."""
    return with_logical_constraint(x, ("batch", "length", "embed"))


def _relative_bias(config: T5Config, *, bidirectional: bool, name: str | None = None) -> RelativeBias:
    return RelativeBias(
        config.num_heads,
        config.relpos_num_buckets,
        config.relpos_max_distance,
        bidirectional=bidirectional,
        name=name,
    )


def encoder_bias(relpos: RelativeBias, length: int) -> Float32[Array, "1 heads length length"]:
    """The encoder's relative bias of every (query, key) pair."""
    per_distance = relpos(np.arange(-(length - 1), length))  # entry i is distance i - (length - 1)
    place = np.arange(length)
    return per_distance[:, place[None, :] - place[:, None] + (length - 1)][None]


class DecoderBias(NamedTuple):
    """Relative bias and mask of k queries per row, the first one at the row's position.

    What a query sees is the cache up to the row's position and the block itself up to the query. Keeping the two apart
    lets the cache be written in place: nothing reads what was just written. With positions [2], k = 2 and capacity 5,
    dN being the bias of a key N positions back and - the mask:

                        cached slots 0..4           block 0..1
        query at 2      d2  d1  -   -   -           d0  -
        query at 3      d3  d2  -   -   -           d1  d0
    """

    cached: Float32[Array, "rows heads k capacity"]
    block: Float32[Array, "1 heads k k"]


def decoder_bias(relpos: RelativeBias, positions: Int32[Array, " rows"], k: int, capacity: int) -> DecoderBias:
    """Computes the bias of every distance once, then places it for each row."""
    per_distance = relpos(-np.arange(capacity + k))  # [heads, how far back]
    slot, query = jnp.arange(capacity), jnp.arange(k)
    back = positions[:, None, None] + query[None, :, None] - slot[None, None]  # [rows, k, capacity]
    cached = per_distance[:, jnp.clip(back, 0, capacity + k - 1)]
    cached = jnp.where((slot[None] < positions[:, None])[None, :, None], cached, MASKED).swapaxes(0, 1)
    back = np.arange(k)[:, None] - np.arange(k)
    block = jnp.where(back[None] >= 0, per_distance[:, np.maximum(back, 0)], MASKED)
    return DecoderBias(cached, block[None])


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each on a normed input and added to the residual stream."""

    config: T5Config

    def setup(self) -> None:
        cfg = self.config
        if cfg.relpos_per_layer:
            self.relpos_bias = _relative_bias(cfg, bidirectional=True)
        self.pre_attention_layer_norm = RMSNorm(cfg.dtype)
        self.attention = Attention(cfg.num_heads, cfg.head_dim, cfg.emb_dim, cfg.dtype)
        self.pre_mlp_layer_norm = RMSNorm(cfg.dtype)
        self.mlp = Mlp(cfg.mlp_dim, cfg.mlp_activations, cfg.dtype)

    def __call__(
        self,
        x: Float[Array, "batch length emb"],
        mask: Float[Array, "batch 1 1 length"],
        shared_bias: Float[Array, "1 heads length length"] | None,
    ) -> Float[Array, "batch length emb"]:
        bias = encoder_bias(self.relpos_bias, x.shape[1]) if shared_bias is None else shared_bias
        y = self.pre_attention_layer_norm(x)
        x = _residual(x + self.attention.attend(y, Segment(*self.attention.keys_values(y), bias + mask)))
        return _residual(x + self.mlp(self.pre_mlp_layer_norm(x)))


class DecoderLayer(nn.Module):
    """Cached self-attention, attention to the encoder's cached keys and values, feed-forward."""

    config: T5Config

    def setup(self) -> None:
        cfg = self.config
        if cfg.relpos_per_layer:
            self.relpos_bias = _relative_bias(cfg, bidirectional=False)
        self.pre_self_attention_layer_norm = RMSNorm(cfg.dtype)
        self.self_attention = Attention(cfg.num_heads, cfg.head_dim, cfg.emb_dim, cfg.dtype)
        self.pre_cross_attention_layer_norm = RMSNorm(cfg.dtype)
        self.encoder_decoder_attention = Attention(cfg.num_heads, cfg.head_dim, cfg.emb_dim, cfg.dtype)
        self.pre_mlp_layer_norm = RMSNorm(cfg.dtype)
        self.mlp = Mlp(cfg.mlp_dim, cfg.mlp_activations, cfg.dtype)

    def __call__(
        self,
        x: Float[Array, "batch k emb"],
        slots: tuple[Array, Array],
        cross: Segment,
        positions: Int32[Array, " rows"],
        shared_bias: DecoderBias | None,
    ) -> tuple[Float[Array, "batch k emb"], tuple[Array, Array]]:
        bias = shared_bias
        if bias is None:
            bias = decoder_bias(self.relpos_bias, positions, x.shape[1], slots[0].shape[2])
        y = self.pre_self_attention_layer_norm(x)
        new = self.self_attention.keys_values(y)
        attended = self.self_attention.attend(y, Segment(*slots, bias.cached), Segment(*new, bias.block))
        new = tuple(_once_known(update, attended) for update in new)  # the slots have been read
        x = _residual(x + attended)
        y = self.pre_cross_attention_layer_norm(x)
        x = _residual(x + self.encoder_decoder_attention.attend(y, cross))
        keys, values = (write_slots(old, added, positions) for old, added in zip(slots, new, strict=True))
        return _residual(x + self.mlp(self.pre_mlp_layer_norm(x))), (keys, values)


class Encoder(nn.Module):
    """The encoder stack."""

    config: T5Config

    def setup(self) -> None:
        cfg = self.config
        if not cfg.relpos_per_layer:
            self.relpos_bias = _relative_bias(cfg, bidirectional=True)
        self.layers = [EncoderLayer(cfg) for _ in range(cfg.num_encoder_layers)]
        self.encoder_norm = RMSNorm(cfg.dtype)

    def __call__(
        self, x: Float[Array, "batch length emb"], mask: Float[Array, "batch 1 1 length"]
    ) -> Float[Array, "batch length emb"]:
        bias = None if self.config.relpos_per_layer else encoder_bias(self.relpos_bias, x.shape[1])
        for layer in self.layers:
            x = layer(x, mask, bias)
        return self.encoder_norm(x)


class DecoderStack(nn.Module):
    """The decoder stack, with the logits where they have weights of their own."""

    config: T5Config

    def setup(self) -> None:
        cfg = self.config
        if not cfg.relpos_per_layer:
            self.relpos_bias = _relative_bias(cfg, bidirectional=False)
        self.layers = [DecoderLayer(cfg) for _ in range(cfg.num_decoder_layers)]
        self.decoder_norm = RMSNorm(cfg.dtype)
        if not cfg.logits_via_embedding:
            self.logits_dense = Dense(cfg.vocab_size, jnp.float32)

    def cross_keys_values(self, encoded: Float[Array, "batch length emb"]) -> tuple[tuple[Array, ...], ...]:
        """Every layer's keys and values of the encoder's output."""
        pairs = [layer.encoder_decoder_attention.keys_values(encoded) for layer in self.layers]
        return tuple(zip(*pairs, strict=True))

    def __call__(
        self, x: Float[Array, "batch k emb"], cache: T5Cache, positions: Int32[Array, " rows"]
    ) -> tuple[Float[Array, "batch k emb"], T5Cache]:
        bias = None
        if not self.config.relpos_per_layer:
            bias = decoder_bias(self.relpos_bias, positions, x.shape[1], cache.keys[0].shape[2])
        cross_mask = mask_bias(cache.encoder_mask)
        slots = []
        for i, layer in enumerate(self.layers):
            cross = Segment(cache.cross_keys[i], cache.cross_values[i], cross_mask)
            x, written = layer(x, (cache.keys[i], cache.values[i]), cross, positions, bias)
            slots.append(written)
        keys, values = zip(*slots, strict=True)
        return self.decoder_norm(x), cache._replace(keys=tuple(keys), values=tuple(values))


def mask_bias(mask: Bool[Array, "batch length"]) -> Float32[Array, "batch 1 1 length"]:
    """0 where the mask is True, else a very negative number to add to attention logits."""
    return jnp.where(mask, 0.0, MASKED).astype(jnp.float32)[:, None, None, :]


class T5Module(nn.Module):
    """The Flax module whose parameter tree is t5x's."""

    config: T5Config

    def setup(self) -> None:
        cfg = self.config
        self.token_embedder = nn.Embed(cfg.vocab_size, cfg.emb_dim, dtype=cfg.dtype, embedding_init=_unit_normal)
        self.encoder = Encoder(cfg)
        self.decoder = DecoderStack(cfg)

    def encode(self, tokens: Int32[Array, "batch length"]) -> Float[Array, "batch length emb"]:
        """Runs the encoder; id 0 is padding."""
        return self.encoder(_residual(self.token_embedder(tokens)), mask_bias(tokens > 0))

    def start(self, tokens: Int32[Array, "batch length"], cache_length: int) -> T5Cache:
        """Encodes, projects the cross-attention's keys and values once, and allocates the cache."""
        cfg = self.config
        cross_keys, cross_values = self.decoder.cross_keys_values(self.encode(tokens))
        empty = jnp.zeros((tokens.shape[0], cfg.num_heads, cache_length, cfg.head_dim), cfg.dtype)
        empty = with_logical_constraint(empty, SLOT_AXES)  # a loop's carry is split as its first value is
        slots = (empty,) * cfg.num_decoder_layers
        return T5Cache(slots, slots, cross_keys, cross_values, tokens > 0)

    def extend(
        self, cache: T5Cache, tokens: Int32[Array, "batch k"], positions: Int32[Array, " rows"]
    ) -> tuple[Float32[Array, "batch k vocab"], T5Cache]:
        """Runs k decoder tokens per row; see `Decoder.extend`. One position may stand for all rows."""
        x, cache = self.decoder(_residual(self.token_embedder(tokens)), cache, positions)
        if self.config.logits_via_embedding:
            embedding = self.token_embedder.embedding.astype(jnp.float32)
            logits = times_embedding(embedding, x.astype(jnp.float32)) / np.sqrt(self.config.emb_dim)
        else:
            logits = self.decoder.logits_dense(x)
        # Each device computes its part of the vocabulary; then the parts are gathered, once a call, so that filters,
        # sums and draws run over whole rows and round as on one device.
        logits = with_logical_constraint(logits, ("batch", "length", "vocab"))
        return with_logical_constraint(logits, ("batch", "length", None)), cache

    def __call__(
        self, encoder_tokens: Int32[Array, "batch length"], decoder_tokens: Int32[Array, "batch k"]
    ) -> Float32[Array, "batch k vocab"]:
        """Teacher forcing: the whole decoder input in one `extend`."""
        cache = self.start(encoder_tokens, 0)  # nothing was there before, and nobody comes after
        return self.extend(cache, decoder_tokens, jnp.zeros((1,), jnp.int32))[0]


_unit_normal = nn.initializers.normal(1.0)


@dataclasses.dataclass(frozen=True)
class T5:
    """A T5 as a Decoder (see models/base.py). Hashable; holds sizes, never weights."""

    config: T5Config

    @property
    def module(self) -> T5Module:
        """The Flax module."""
        return T5Module(self.config)

    def _apply(self, params: Params, *args: Any, method: str = "__call__") -> Any:
        return self.module.apply({"params": params}, *args, method=method)

    @property
    def vocab_size(self) -> int:
        """Width of the logits, padded ids included."""
        return self.config.vocab_size

    def init(self, rng: Array) -> Params:
        """Random float32 parameters."""
        token = jnp.ones((1, 1), jnp.int32)
        return self.module.init(rng, token, token)["params"]

    def param_shapes(self) -> Params:
        """The parameter tree as ShapeDtypeStructs."""
        return jax.eval_shape(self.init, jax.random.key(0))

    def prepare(self, params: Params) -> Params:
        """Puts weights on the device in the form that decodes fastest there; any method takes either form.

        On a CPU kernels are stored transposed (see `layers.Dense`), under another name so that the two forms cannot be
        mistaken for each other. Elsewhere they stay as they are. Weights that are on devices already, split or not,
        stay there. It may be called inside a jit.
        """
        if jax.default_backend() != "cpu":  # arrays of a mesh that spans processes cannot be put anywhere
            return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x), params)

        def transpose(tree: Params) -> Params:
            if not isinstance(tree, Mapping):
                return jnp.asarray(tree)
            if set(tree) == {"kernel"}:
                return {TRANSPOSED: jnp.asarray(tree["kernel"]).T}
            return {name: transpose(subtree) for name, subtree in tree.items()}

        return transpose(params)

    def encode(self, params: Params, encoder_tokens: Int32[Array, "batch length"]) -> Float[Array, "batch length emb"]:
        """The encoder's output."""
        return self._apply(params, encoder_tokens, method="encode")

    def forward(
        self, params: Params, encoder_tokens: Int32[Array, "batch length"], decoder_tokens: Int32[Array, "batch k"]
    ) -> Float32[Array, "batch k vocab"]:
        """Teacher-forced logits; decoder_tokens start with the start token."""
        return self._apply(params, encoder_tokens, decoder_tokens)

    def prefill(
        self, params: Params, inputs: Inputs, cache_length: int
    ) -> tuple[T5Cache, Int32[Array, "batch prompt"], Int32[Array, " batch"]]:
        """See `Decoder.prefill`."""
        if inputs.encoder_tokens is None:
            raise ValueError("Inputs.encoder_tokens is None; a T5 needs an encoder input.")
        if cache_length <= inputs.prefix_length:
            raise ValueError(
                f"cache_length is {cache_length}; a prefix of {inputs.prefix_length} tokens needs more slots than that."
            )
        batch = inputs.encoder_tokens.shape[0]
        cache = self._apply(params, inputs.encoder_tokens, cache_length, method="start")
        prompt = jnp.full((batch, 1), self.config.start_id, jnp.int32)
        if inputs.prefix is None:
            return cache, prompt, jnp.zeros((batch,), jnp.int32)
        prompt = jnp.concatenate([prompt, inputs.prefix], axis=1)
        _, cache = self.extend(params, cache, prompt, jnp.zeros((1,), jnp.int32))
        return cache, prompt, jnp.sum(inputs.prefix > 0, axis=1, dtype=jnp.int32)

    def extend(
        self, params: Params, cache: T5Cache, tokens: Int32[Array, "batch k"], positions: Int32[Array, " rows"]
    ) -> tuple[Float32[Array, "batch k vocab"], T5Cache]:
        """See `Decoder.extend`.

        A TPU multiplies a single row by a matrix on its vector unit, which takes three times as long as reading the
        matrix does; so it does with one query of many keys. There a token runs twice, side by side, on the matrix unit;
        the second one's slot is overwritten before it is read, as a rejected guess's is.
        """

        def once(params: Params, cache: T5Cache, tokens: Array, positions: Array) -> tuple[Array, T5Cache]:
            return self._apply(params, cache, tokens, positions, method="extend")

        def twice(params: Params, cache: T5Cache, tokens: Array, positions: Array) -> tuple[Array, T5Cache]:
            logits, cache = once(params, cache, jnp.repeat(tokens, 2, axis=1), positions)
            return logits[:, :1], cache

        if tokens.shape[1] > 1:
            return once(params, cache, tokens, positions)
        return jax.lax.platform_dependent(params, cache, tokens, positions, tpu=twice, default=once)

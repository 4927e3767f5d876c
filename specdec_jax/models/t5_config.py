"""The sizes of a T5."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from specdec_jax.models.layers import ACTIVATIONS


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config:
    """Sizes of a T5; every field but `dtype` can be read off a checkpoint (`from_params`).

    Attributes:
      vocab_size: rows of the embedding, padded ids included.
      emb_dim: width of the residual stream.
      num_heads: attention heads.
      head_dim: width of one head.
      mlp_dim: width of the feed-forward block.
      num_encoder_layers: layers of the encoder.
      num_decoder_layers: layers of the decoder.
      mlp_activations: ("gelu", "linear") for T5 1.1, mT5 and ByT5; ("relu",) for T5 1.0.
      logits_via_embedding: logits from the embedding, divided by sqrt(emb_dim) (T5 1.0).
      relpos_num_buckets: buckets of the relative position bias.
      relpos_max_distance: distance from which on all positions share a bucket.
      relpos_per_layer: every layer has a bias of its own (t5x's scalable_t5).
      start_id: the decoder's start token.
      dtype: of activations and caches; logits are float32 always.
    """

    vocab_size: int
    emb_dim: int
    num_heads: int
    head_dim: int
    mlp_dim: int
    num_encoder_layers: int
    num_decoder_layers: int
    mlp_activations: tuple[str, ...] = ("gelu", "linear")
    logits_via_embedding: bool = False
    relpos_num_buckets: int = 32
    relpos_max_distance: int = 128
    relpos_per_layer: bool = False
    start_id: int = 0
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        object.__setattr__(self, "mlp_activations", tuple(self.mlp_activations))
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), 0 if field.name == "start_id" else 1
            if field.type is int and value < least:
                raise ValueError(f"T5Config.{field.name} is {value}; it must be an integer, {least} or more.")
        if not self.mlp_activations or not ACTIVATIONS.keys() >= set(self.mlp_activations):
            raise ValueError(
                f"T5Config.mlp_activations is {self.mlp_activations}; known activations are {sorted(ACTIVATIONS)}."
            )
        if not 4 <= self.relpos_num_buckets < 2 * self.relpos_max_distance:  # half of them are for single distances
            raise ValueError(
                f"T5Config.relpos_num_buckets is {self.relpos_num_buckets}; it must be at least 4 and less than twice "
                f"relpos_max_distance, which is {self.relpos_max_distance}."
            )
        if self.dtype not in (jnp.float32, jnp.bfloat16):  # in float16, T5's feed-forward outputs overflow
            raise ValueError(f"T5Config.dtype is {self.dtype.name}; use bfloat16 or float32.")

    @classmethod
    def from_params(cls, params: Mapping[str, Any], *, dtype: Any = jnp.float32) -> "T5Config":
        """Reads the sizes off a parameter tree (arrays or ShapeDtypeStructs).

        Raises:
          ValueError: the tree is not a T5's.
        """
        try:
            decoder, layer = params["decoder"], params["decoder"]["layers_0"]
            per_layer = "relpos_bias" in layer
            bias = (layer if per_layer else decoder)["relpos_bias"]["rel_embedding"]
            vocab_size, emb_dim = params["token_embedder"]["embedding"].shape
            gated = "wi_0" in layer["mlp"]
            head_dim, rest = divmod(layer["self_attention"]["query"]["kernel"].shape[1], bias.shape[0])
            if rest:
                columns = head_dim * bias.shape[0] + rest
                raise ValueError(
                    f"decoder/layers_0/self_attention/query/kernel has {columns} columns, which the {bias.shape[0]} "
                    "heads of relpos_bias do not divide; these weights do not belong together."
                )
            return cls(
                vocab_size=vocab_size,
                emb_dim=emb_dim,
                num_heads=bias.shape[0],
                head_dim=head_dim,
                mlp_dim=layer["mlp"]["wo"]["kernel"].shape[0],
                num_encoder_layers=sum(name.startswith("layers_") for name in params["encoder"]),
                num_decoder_layers=sum(name.startswith("layers_") for name in decoder),
                mlp_activations=("gelu", "linear") if gated else ("relu",),
                logits_via_embedding="logits_dense" not in decoder,
                relpos_num_buckets=bias.shape[1],
                relpos_per_layer=per_layer,
                dtype=dtype,
            )
        except KeyError as error:
            raise ValueError(f"These are not a T5's parameters: {error} is missing.") from error
        except (TypeError, AttributeError, IndexError) as error:  # an array where a subtree belongs, or the reverse
            raise ValueError(f"These are not a T5's parameters: {error}.") from error

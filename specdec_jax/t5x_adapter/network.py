"""t5x's networks as models of this package, and where their weights and caches lie."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen.partitioning import AxisMetadata

from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.sharding import Sharded, split_draft

_SAME_NAMES = (
    "vocab_size",
    "dtype",
    "emb_dim",
    "num_heads",
    "num_encoder_layers",
    "num_decoder_layers",
    "head_dim",
    "mlp_dim",
    "mlp_activations",
    "logits_via_embedding",
)


def to_t5(module: Any, name: str) -> T5:
    """The model with the sizes of t5x's network.Transformer.

    Args:
      module: t5x's module; only its config is read.
      name: what it is called in error messages.

    Raises:
      ValueError: it is another network, or computes what this package's T5 does not.
    """
    if getattr(module, "scan_layers", False):
        raise ValueError(f"{name} scans its layers (scalable_t5); use t5x.examples.t5.network.Transformer.")
    config: Any = getattr(module, "config", None)
    missing = [field for field in _SAME_NAMES if not hasattr(config, field)]
    if missing:
        raise ValueError(
            f"{name} is a {type(module).__name__} without config.{missing[0]}; use t5x.examples.t5.network.Transformer."
        )
    unknown = set(vars(config)) - {*_SAME_NAMES, "dropout_rate", "float32_attention_logits"}
    if unknown:
        raise ValueError(
            f"{name}'s config has {', '.join(sorted(unknown))}, which T5 has not: its network may compute something "
            "else; use t5x.examples.t5.network.Transformer."
        )
    if getattr(config, "float32_attention_logits", False) and jnp.dtype(config.dtype) != jnp.float32:
        raise ValueError(
            f"{name}'s float32_attention_logits is True; it is not supported in {config.dtype}: unbind it."
        )
    return T5(T5Config(**{field: getattr(config, field) for field in _SAME_NAMES}))


class Placement:
    """How t5x's mesh splits the two models.

    t5x's networks name their axes by themselves. This package's decoder takes the mesh and the rules with the model
    (`Sharded`), since t5x sets its mesh in a way that Flax's constraints no longer see.

    Attributes:
      draft: the draft on the mesh.
      draft_is_whole: whether its weights are whole on every device, since the mesh does not divide it.
    """

    def __init__(self, partitioner: Any, draft: T5):
        """Takes t5x's partitioner, or None for one device."""
        self._mesh = None if partitioner is None else partitioner.mesh
        self._rules = () if partitioner is None else tuple(partitioner.logical_axis_rules)
        self.draft = draft if self._mesh is None else split_draft(draft, self._mesh, self._rules, name="module")
        self.draft_is_whole = self.draft != self.target(draft)

    def axes_of_draft(self, axes: Mapping[str, Any]) -> dict[str, Any]:
        """The logical axes of the draft's weights: t5x's own, or none where the mesh does not divide the draft."""
        if not self.draft_is_whole:
            return dict(axes)
        return jax.tree.map(lambda leaf: AxisMetadata((None,) * len(leaf.names)), dict(axes), is_leaf=_has_names)

    def target(self, model: T5) -> T5 | Sharded:
        """The target on the mesh."""
        return model if self._mesh is None else Sharded(model, self._mesh, self._rules)


def _has_names(leaf: Any) -> bool:
    return isinstance(leaf, AxisMetadata)

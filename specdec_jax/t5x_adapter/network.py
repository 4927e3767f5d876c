"""t5x's networks as models of this package, and where their weights and caches lie."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.core.meta import get_global_mesh
from flax.linen import get_logical_axis_rules
from flax.linen.partitioning import AxisMetadata
from jax.sharding import AbstractMesh, Mesh

from specdec_jax.models.t5 import T5, T5Config
from specdec_jax.sharding import RULES, Rules, Sharded, indivisible, replicated

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
    if getattr(config, "float32_attention_logits", False) and jnp.dtype(config.dtype) != jnp.float32:
        raise ValueError(
            f"{name}'s float32_attention_logits is True; it is not supported in {config.dtype}: unbind it."
        )
    return T5(T5Config(**{field: getattr(config, field) for field in _SAME_NAMES}))


@dataclasses.dataclass
class Placement:
    """How t5x's mesh splits the two models.

    Attributes:
      mesh: of t5x's partitioner; None where nobody told (see `TrainStateInitializer`).
      rules: of t5x's partitioner.
      draft_is_whole: whether the draft's weights are whole on every device.
    """

    mesh: Mesh | None = None
    rules: Rules = RULES
    draft_is_whole: bool = False

    def axes_of_draft(self, draft: T5, axes: Mapping[str, Any]) -> dict[str, Any]:
        """The logical axes of the draft's weights: t5x's own, or none where the mesh does not divide the draft."""
        # Without a mesh: whatever it will be, the parts of its model axis divide the number of devices.
        mesh = AbstractMesh((1, jax.device_count()), ("data", "model")) if self.mesh is None else self.mesh
        wrong = indivisible(draft.config, mesh, self.rules)
        self.draft_is_whole = bool(wrong)
        if not wrong:
            return dict(axes)
        logging.getLogger(__name__).warning(
            "The draft is not split but whole on every device: %s.", "; ".join(map(str, wrong))
        )
        return jax.tree.map(lambda leaf: AxisMetadata((None,) * len(leaf.names)), dict(axes), is_leaf=_has_names)

    def target(self, model: T5) -> T5 | Sharded:
        """The target on the mesh that t5x runs it on."""
        return self._on_mesh(model, whole=False)

    def draft(self, model: T5) -> T5 | Sharded:
        """The draft on the mesh that t5x runs it on."""
        return self._on_mesh(model, whole=self.draft_is_whole)

    def _on_mesh(self, model: T5, *, whole: bool) -> T5 | Sharded:
        mesh = get_global_mesh() if self.mesh is None else self.mesh
        rules = get_logical_axis_rules() or self.rules
        return model if mesh is None else Sharded(model, mesh, replicated(rules) if whole else rules)


def _has_names(leaf: Any) -> bool:
    return isinstance(leaf, AxisMetadata)

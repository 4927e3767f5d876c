"""Logical names of a T5's axes, which rules map to the axes of a mesh of devices; t5x's names, so that its rules fit.

    batch, length, embed, heads, kv, joined_kv (heads * kv), mlp, vocab, relpos_buckets

layers.py and t5.py name the axes of activations and caches by `flax.linen.with_logical_constraint`, which does nothing
unless rules and a mesh are set. Here are those of the parameters.
"""

from collections.abc import Mapping

from jax.sharding import PartitionSpec

from specdec_jax.models.layers import SLOT_AXES, TRANSPOSED
from specdec_jax.models.t5_config import T5Config
from specdec_jax.types import Params

_KERNELS = {
    "query": ("embed", "joined_kv"),
    "key": ("embed", "joined_kv"),
    "value": ("embed", "joined_kv"),
    "out": ("joined_kv", "embed"),
    "wi": ("embed", "mlp"),
    "wi_0": ("embed", "mlp"),
    "wi_1": ("embed", "mlp"),
    "wo": ("mlp", "embed"),
    "logits_dense": ("embed", "vocab"),
}
_OTHERS = {"embedding": ("vocab", "embed"), "scale": ("embed",), "rel_embedding": ("heads", "relpos_buckets")}
_ACTIVATIONS = (("batch", "length", "embed"), ("batch", "length", "mlp"), SLOT_AXES)

ARRAYS: frozenset[tuple[str, ...]] = frozenset({*_KERNELS.values(), *_OTHERS.values(), *_ACTIVATIONS})
"""Every combination of axes that an array has, for checking a mesh before anything is placed on it."""


def param_axes(params: Params, name: str = "") -> Params:
    """The logical axes of each parameter, by its name, kernels stored transposed included (see `layers.Dense`).

    Args:
      params: a T5's parameters, or their shapes.
      name: of the subtree, where that is what is given: "query" for {"kernel": ...}.

    Returns:
      The same tree with a PartitionSpec of logical names for each array, as t5x has it.

    Raises:
      ValueError: a parameter is none of a T5's.
    """
    if isinstance(params, Mapping):
        inner = {key: f"{name}/{key}" if name else str(key) for key in params}
        return {key: param_axes(subtree, inner[key]) for key, subtree in params.items()}
    *_, parent, leaf = ["", *name.split("/")]
    if leaf in ("kernel", TRANSPOSED) and parent in _KERNELS:
        axes = _KERNELS[parent]
        return PartitionSpec(*(axes if leaf == "kernel" else axes[::-1]))
    if leaf not in _OTHERS:
        raise ValueError(f"{name} is no parameter of a T5; its axes are unknown.")
    return PartitionSpec(*_OTHERS[leaf])


def axis_sizes(config: T5Config) -> dict[str, int]:
    """The size of each logical axis of the weights."""
    return {
        "vocab": config.vocab_size,
        "embed": config.emb_dim,
        "heads": config.num_heads,
        "kv": config.head_dim,
        "joined_kv": config.num_heads * config.head_dim,
        "mlp": config.mlp_dim,
        "relpos_buckets": config.relpos_num_buckets,
    }

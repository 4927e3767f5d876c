"""Puts a draft's checkpoint beside the target's while t5x restores."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from specdec_jax.checkpoints import t5x
from specdec_jax.checkpoints.t5x import CheckpointError

DRAFT = "draft"
"""Where the draft's weights are among the train state's flax_mutables, and in checkpoints of it."""


def restore_draft(
    state: Mapping[str, Any],
    target_state: Mapping[str, Any],
    *,
    path: Any,
    dtype: str | None = None,
    is_resuming: bool = False,
) -> dict[str, Any]:
    """A state transformation of t5x's RestoreCheckpointConfig that adds the draft's weights.

    The draft is read by this package, whole by every process: a draft is small. The target is read by t5x, each
    process its own share.

    Args:
      state: what the target's checkpoint holds, not yet read.
      target_state: what the train state will hold.
      path: the draft's checkpoint, native or Orbax.
      dtype: "float32" or "bfloat16", of the draft's weights; None for that of the checkpoint.
      is_resuming: t5x goes on from a checkpoint of its own, which already has the draft.

    Returns:
      state, with the draft's weights in flax_mutables.

    Raises:
      CheckpointError: the checkpoint is missing, damaged, or of other sizes than the draft's module.
      ValueError: the model has no draft, or an argument is out of its range.
    """
    if not isinstance(path, str) or not path:
        raise ValueError(f"restore_draft's path is {path!r}; bind DRAFT_CHECKPOINT_PATH to the draft's checkpoint.")
    if dtype not in (None, "float32", "bfloat16"):
        raise ValueError(f"restore_draft's dtype is {dtype!r}; bind DRAFT_DTYPE to 'float32', 'bfloat16' or None.")
    if is_resuming and DRAFT in state.get("flax_mutables", {}):
        return dict(state)
    expected = target_state.get("flax_mutables", {}).get(DRAFT)
    if expected is None:
        raise ValueError(
            "restore_draft is bound and the model has no draft; give the draft's gin file last, behind the model's, so "
            "that MODEL is @t5x_adapter.SpeculativeEncoderDecoderModel()."
        )
    try:
        params = t5x.load_params(path, dtype=None if dtype is None else jnp.dtype(dtype), expected=expected)
    except CheckpointError as error:
        raise CheckpointError(f"the draft's checkpoint: {error}") from error
    return {**state, "flax_mutables": {**state.get("flax_mutables", {}), DRAFT: params}}

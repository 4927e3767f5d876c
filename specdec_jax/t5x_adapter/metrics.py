"""Metrics over the auxiliary outputs, for t5x.eval: a seqio task's metric_fns."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def speculation(targets: Sequence[Any], predictions: Sequence[Any], aux_values: Mapping[str, Any]) -> dict[str, float]:
    """How well the guesses did over a whole evaluation.

    Args:
      targets: not used.
      predictions: not used.
      aux_values: of `SpeculativeEncoderDecoderModel.predict_batch_with_aux`, each a list with one entry per example.

    Returns:
      alpha, the mean probability of acceptance (Corollary 3.6), over all guesses that were tested; accepted_fraction,
      which is not alpha; tokens_per_target_call. Nothing for a model without a draft.
    """
    del targets, predictions
    if "trials" not in aux_values:
        return {}
    total = {name: float(np.sum(aux_values[name])) for name in ("accepted", "drafted", "trials", "num_target_calls")}
    tokens = float(np.sum(aux_values["num_tokens"]))
    beta_sum = float(np.sum(np.asarray(aux_values["alpha"]) * np.asarray(aux_values["trials"])))
    return {
        "speculation/alpha": beta_sum / max(total["trials"], 1.0),
        "speculation/accepted_fraction": total["accepted"] / max(total["drafted"], 1.0),
        "speculation/tokens_per_target_call": tokens / max(total["num_target_calls"], 1.0),
    }

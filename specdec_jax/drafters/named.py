"""The drafters by the names that settings have for them."""

from specdec_jax.drafters.base import BlockDrafter, Drafter
from specdec_jax.drafters.copying import CopyDrafter
from specdec_jax.drafters.hierarchical import HierarchicalDrafter
from specdec_jax.drafters.mixture import MixtureDrafter
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.drafters.ngram import BigramDrafter, UnigramDrafter
from specdec_jax.drafters.one_shot import OneShotDrafter
from specdec_jax.drafters.random_tokens import RandomDrafter
from specdec_jax.drafters.table import TableParams
from specdec_jax.models.base import Decoder
from specdec_jax.types import Params

NAMES = ("model", "unigram", "bigram", "copy", "one_shot", "random", "mixture", "hierarchical")
"""What `make` knows."""

WITH_MODEL = ("model", "mixture", "hierarchical")
"""Those that have a draft model in them."""

WITH_TABLE = ("unigram", "bigram", "one_shot", "mixture", "hierarchical")
"""Those that cannot do without a table; copy can, and drafts nothing where nothing matches."""

MODEL_WEIGHT = 0.8
"""The draft model's part in the mixture; the bigram has the rest."""

INNER_GAMMA = 2
"""Guesses of the bigram per call of the hierarchy's middle model."""


def make(
    name: str, vocab_size: int, model: Decoder | None, model_params: Params, table: TableParams | None
) -> tuple[Drafter | BlockDrafter, Params]:
    """A drafter and its parameters.

    Args:
      name: one of NAMES.
      vocab_size: the target's rows.
      model: the draft model; None for those without one.
      model_params: its parameters.
      table: a table; None where there is none.

    Raises:
      ValueError: there is no such drafter, or what it needs is missing.
    """
    if name not in NAMES:
        raise ValueError(f"drafter is {name!r}; it must be one of {', '.join(map(repr, NAMES))}.")
    if name in WITH_TABLE and table is None:
        raise ValueError(f"drafter is {name!r}, which needs draft_table; specdec drafter build makes one.")
    if name in WITH_MODEL and model is None:
        raise ValueError(f"drafter is {name!r}, which needs draft_checkpoint.")
    if model is None or name not in WITH_MODEL:
        without_model: dict[str, Drafter | BlockDrafter] = {
            "unigram": UnigramDrafter(),
            "bigram": BigramDrafter(),
            "copy": CopyDrafter(),
            "one_shot": OneShotDrafter(),
            "random": RandomDrafter(vocab_size),
        }
        return without_model[name], table
    if name == "mixture":
        mixture = MixtureDrafter(ModelDrafter(model), BigramDrafter(), MODEL_WEIGHT, vocab_size)
        return mixture, (model_params, table)
    if name == "hierarchical":
        return HierarchicalDrafter(model, BigramDrafter(), INNER_GAMMA), (model_params, table)
    return ModelDrafter(model), model_params

"""A smaller model as the drafter: the paper's M_q."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from specdec_jax.models.base import Cache, Decoder
from specdec_jax.types import Inputs, Params


@dataclasses.dataclass(frozen=True)
class ModelDrafter:
    """Drafts with a model; gamma calls a step."""

    model: Decoder

    def init(self, params: Params, inputs: Inputs, cache_length: int) -> Cache:
        """See `Drafter.init`."""
        return self.model.prefill(params, inputs, cache_length)[0]

    def step(
        self,
        params: Params,
        state: Cache,
        tokens: Int32[Array, "batch capacity"],
        positions: Int32[Array, " batch"],
        *,
        first: bool,
    ) -> tuple[Float32[Array, "batch vocab"], Cache]:
        """See `Drafter.step`.

        The first call takes the newest two tokens. After a full acceptance the cache lacks the last guess:

            position       3    4    5    6
            token          x_1  x_2  t            t the extra token; x_2 was drawn, never run
            first call          x_2  t            at 4, logits read at 5
            second call                   x_1'

        Elsewhere the older of the two is only computed again.
        """
        start = jnp.maximum(positions - 1, 0) if first else positions
        window = start[:, None] + jnp.arange(2 if first else 1)[None]
        newest = jnp.take_along_axis(tokens, window, axis=1)
        logits, cache = self.model.extend(params, state, newest, start)
        place = (positions - start)[:, None, None]
        return jnp.take_along_axis(logits, place, axis=1)[:, 0], cache

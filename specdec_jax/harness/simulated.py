"""Walltime without checkpoints: real shapes, random weights, and guesses accepted with a given probability.

Everything is the real program, its drafting, verification and rule included, except that how many guesses stand is
drawn Bernoulli(alpha), guess by guess. What comes out is no text and follows no law; only its walltime means anything.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from specdec_jax import verification
from specdec_jax.models.t5 import T5
from specdec_jax.models.t5_config import T5Config
from specdec_jax.sampling import ACCEPT, StepKeys, uniforms
from specdec_jax.types import Params
from specdec_jax.verification import Proposal, Rule, Target

LABEL = "simulated acceptance"
"""Stands on every output."""


@dataclasses.dataclass(frozen=True)
class SimulatedAcceptance:
    """A rule of verification that does the work of another one, and accepts guesses with probability alpha instead.

    Attributes:
      rule: the rule whose work is done, and whose extra token is emitted.
      alpha: probability of acceptance.
    """

    rule: Rule
    alpha: float

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha}; it is a probability, 0 to 1.")

    def __call__(
        self, keys: StepKeys, target: Target, proposal: Proposal, lenience: Float32[Array, ""]
    ) -> tuple[Int32[Array, " batch"], Int32[Array, " batch"]]:
        """See `verification.token`."""
        _, extra_token = self.rule(keys, target, proposal, lenience)  # the extra token takes all of the rule's work
        gamma = proposal.tokens.shape[1]
        passed = uniforms(keys, ACCEPT, gamma) < self.alpha
        return verification.count_accepted(passed, proposal.num_guesses), extra_token


def random_model(config: T5Config, *, seed: int) -> tuple[T5, Params]:
    """A T5 of the given sizes with random weights, in its dtype, prepared for decoding.

    Weights are drawn leaf by leaf; while they are prepared they are there twice.
    """
    model = T5(config)
    rng = np.random.default_rng(seed)

    def weight(path: tuple, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        if path[-1].key == "scale":
            return np.ones(shape.shape, config.dtype)
        std = 1.0 if path[-1].key == "embedding" else shape.shape[0] ** -0.5
        return (rng.standard_normal(shape.shape, np.float32) * np.float32(std)).astype(config.dtype)

    return model, model.prepare(jax.tree_util.tree_map_with_path(weight, model.param_shapes()))


def random_inputs(batch: int, length: int, vocab_size: int, *, seed: int) -> Int32[Array, "batch length"]:
    """Encoder inputs without padding."""
    return jnp.asarray(np.random.default_rng(seed).integers(2, vocab_size, (batch, length)), jnp.int32)

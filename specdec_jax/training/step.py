"""One optimizer step, one validation step, and the state they carry."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32, Int32

from specdec_jax.models.t5 import T5
from specdec_jax.training.batches import Batch
from specdec_jax.training.losses import Totals, totals
from specdec_jax.training.parametrization import fold
from specdec_jax.types import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimization:
    """How a step changes the weights.

    Attributes:
      peak_learning_rate: Adam's step size after warm-up.
      final_learning_rate: of the peak, at the end of training; the decay is linear.
      warmup_steps: steps of linear warm-up.
      clip_norm: largest global gradient norm.
      ema_decay: of the running mean of the weights that is validated and saved; 0 for the last weights
        themselves.
      label_smoothing: see `losses.totals`.
      divergence_weight: see `losses.totals`.
    """

    peak_learning_rate: float = 1.5e-3
    final_learning_rate: float = 0.1
    warmup_steps: int = 200
    clip_norm: float = 1.0
    ema_decay: float = 0.995
    label_smoothing: float = 0.0
    divergence_weight: float = 1.0

    def __post_init__(self) -> None:
        for name in ("final_learning_rate", "label_smoothing", "divergence_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"Optimization.{name} is {getattr(self, name)}: give a share between 0 and 1")
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"Optimization.ema_decay is {self.ema_decay}: give 0 or more and less than 1")
        if self.peak_learning_rate <= 0 or self.clip_norm <= 0 or self.warmup_steps < 0:
            sizes = f"{self.peak_learning_rate}, {self.clip_norm} and {self.warmup_steps}"
            raise ValueError(
                f"Optimization.peak_learning_rate, clip_norm and warmup_steps are {sizes}: none may be "
                "negative and only warmup_steps 0"
            )


class TrainState(NamedTuple):
    """What training carries from step to step.

    Attributes:
      raw: the weights in training (see parametrization.py).
      mean: their running mean.
      moments: Adam's state.
      step: steps taken.
    """

    raw: Params
    mean: Params
    moments: optax.OptState
    step: Int32[Array, ""]


class Teacher(NamedTuple):
    """A frozen target model whose distribution a draft model learns; only its weights are traced."""

    model: T5
    params: Params


TrainStep = Callable[[TrainState, Batch, Params | None, Array], tuple[TrainState, Totals]]
"""(state, batch, teacher's weights, fraction of training done) -> (state, sums over the batch)."""

ValidationStep = Callable[[Params, Batch, Params | None], Totals]
"""(plain weights, batch, teacher's weights) -> sums over the batch."""


def initial_state(raw: Params, optimization: Optimization) -> TrainState:
    """The state before the first step."""
    mean = jax.tree.map(jnp.copy, raw)  # a copy, because the state is donated and a buffer can be donated only once
    return TrainState(raw, mean, _transformation(optimization).init(raw), jnp.zeros((), jnp.int32))


def learning_rate(
    step: Int32[Array, ""], fraction: Float32[Array, ""], optimization: Optimization
) -> Float32[Array, ""]:
    """Linear warm-up by steps times linear decay by the fraction of training done."""
    warm = jnp.minimum(1.0, (step + 1) / max(1, optimization.warmup_steps))
    decay = 1.0 - (1.0 - optimization.final_learning_rate) * jnp.clip(fraction, 0.0, 1.0)
    return optimization.peak_learning_rate * warm * decay


def averaged(state: TrainState, model: T5) -> Params:
    """The plain weights to validate and save."""
    return fold(state.mean, model)


@functools.cache
def make_train_step(model: T5, optimization: Optimization, teacher: T5 | None) -> TrainStep:
    """Compiles one optimizer step; the state is donated.

    Args:
      model: in training.
      optimization: how.
      teacher: target model to learn from, or None.

    Returns:
      The jitted step; it compiles once per batch shape, and equal arguments give the same one.
    """
    transformation = _transformation(optimization)

    def mean_loss(raw: Params, batch: Batch, teacher_params: Params | None) -> tuple[Array, Totals]:
        sums = _batch_totals(model, fold(raw, model), batch, teacher, teacher_params, optimization, matches=False)
        return sums.loss / jnp.maximum(sums.tokens, 1.0), sums

    def step(
        state: TrainState, batch: Batch, teacher_params: Params | None, fraction: Array
    ) -> tuple[TrainState, Totals]:
        gradients, sums = jax.grad(mean_loss, has_aux=True)(state.raw, batch, teacher_params)
        updates, moments = transformation.update(gradients, state.moments, state.raw)
        rate = learning_rate(state.step, fraction, optimization)
        raw = jax.tree.map(lambda weight, update: weight - rate * update, state.raw, updates)
        # Early on the mean reaches back over a tenth of the run, so that it forgets the initial weights.
        decay = jnp.minimum(optimization.ema_decay, (1.0 + state.step) / (10.0 + state.step))
        mean = jax.tree.map(lambda old, new: decay * old + (1.0 - decay) * new, state.mean, raw)
        return TrainState(raw, mean, moments, state.step + 1), sums

    return jax.jit(step, donate_argnums=0)


@functools.cache
def make_validation_step(model: T5, optimization: Optimization, teacher: T5 | None) -> ValidationStep:
    """Compiles the validation of one batch, agreement and overlap included."""

    def step(params: Params, batch: Batch, teacher_params: Params | None) -> Totals:
        return _batch_totals(model, params, batch, teacher, teacher_params, optimization, matches=True)

    return jax.jit(step)


def _transformation(optimization: Optimization) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(optimization.clip_norm), optax.scale_by_adam(b1=0.9, b2=0.98, eps=1e-9)
    )


def _batch_totals(
    model: T5,
    params: Params,
    batch: Batch,
    teacher: T5 | None,
    teacher_params: Params | None,
    optimization: Optimization,
    *,
    matches: bool,
) -> Totals:
    sources, labels = (jnp.asarray(ids) for ids in batch)
    start = jnp.full((labels.shape[0], 1), model.config.start_id, jnp.int32)
    decoder_tokens = jnp.concatenate([start, labels[:, :-1]], axis=1)
    target_logits = None
    if teacher is not None:
        target_logits = jax.lax.stop_gradient(teacher.forward(teacher_params, sources, decoder_tokens))
    return totals(
        model.forward(params, sources, decoder_tokens),
        labels,
        target_logits,
        divergence_weight=optimization.divergence_weight,
        label_smoothing=optimization.label_smoothing,
        with_matches=matches,
    )

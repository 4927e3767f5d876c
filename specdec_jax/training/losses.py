"""Cross-entropy and word-level distillation, and what is measured beside them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from specdec_jax.vocabularies import PAD_ID


class Totals(NamedTuple):
    """Sums over target tokens; a mean is a sum divided by `tokens`.

    Attributes:
      loss: the quantity that is minimized.
      cross_entropy: of the text, in nats.
      divergence: KL(target model || draft model), in nats; 0 without a target model.
      agreement: tokens at which both models' argmax is the same.
      overlap: sum over the vocabulary of min(p, q), the chance that speculative sampling accepts a guess.
      correct: tokens at which the trained model's argmax is the text's token.
      tokens: number of target tokens.
    """

    loss: Float32[Array, ""]
    cross_entropy: Float32[Array, ""]
    divergence: Float32[Array, ""]
    agreement: Float32[Array, ""]
    overlap: Float32[Array, ""]
    correct: Float32[Array, ""]
    tokens: Float32[Array, ""]


def cross_entropies(
    logits: Float32[Array, "batch length vocab"],
    labels: Int32[Array, "batch length"],
    label_smoothing: float = 0.0,
) -> Float32[Array, "batch length"]:
    """Negative log-likelihood of each label, in nats.

    The label's logit is picked by comparing ids inside one fused reduction: no one-hot array is built, and
    the gradient is elementwise, where that of a gather would be a scatter into [batch, length, vocab].
    """
    is_label = jnp.arange(logits.shape[-1])[None, None] == labels[..., None]
    picked = jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1)
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)
    if label_smoothing:
        picked = (1 - label_smoothing) * picked + label_smoothing * jnp.mean(logits, axis=-1)
    return log_normalizer - picked


def divergences(
    target_logits: Float32[Array, "batch length vocab"], draft_logits: Float32[Array, "batch length vocab"]
) -> Float32[Array, "batch length"]:
    """KL(p || q) at temperature 1 at each place, in nats; p is the target model's distribution."""
    log_p, log_q = jax.nn.log_softmax(target_logits), jax.nn.log_softmax(draft_logits)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def totals(
    logits: Float32[Array, "batch length vocab"],
    labels: Int32[Array, "batch length"],
    target_logits: Float32[Array, "batch length vocab"] | None,
    *,
    divergence_weight: float,
    label_smoothing: float,
    with_matches: bool,
) -> Totals:
    """Sums the loss and its companions over the target tokens of a batch.

    Args:
      logits: of the model in training.
      labels: target token ids; id 0 is padding and does not count.
      target_logits: of the frozen target model, or None to train on the text alone.
      divergence_weight: share of the divergence in the loss, the rest being cross-entropy; only with a target
        model.
      label_smoothing: share of the uniform distribution in the cross-entropy's labels.
      with_matches: also sums agreement, overlap and correct; they are 0 otherwise.

    Returns:
      The sums.
    """
    counted = (labels != PAD_ID).astype(jnp.float32)
    zero = jnp.zeros(labels.shape, jnp.float32)
    cross_entropy = cross_entropies(logits, labels, label_smoothing)
    loss, divergence, agreement, overlap, correct = cross_entropy, zero, zero, zero, zero
    if target_logits is not None:
        divergence = divergences(target_logits, logits)
        loss = divergence_weight * divergence + (1 - divergence_weight) * cross_entropy
    if with_matches:
        best = jnp.argmax(logits, axis=-1)
        correct = (best == labels).astype(jnp.float32)
        if target_logits is not None:
            agreement = (best == jnp.argmax(target_logits, axis=-1)).astype(jnp.float32)
            overlap = jnp.sum(jnp.minimum(jax.nn.softmax(target_logits), jax.nn.softmax(logits)), axis=-1)
    places = (loss, cross_entropy, divergence, agreement, overlap, correct, jnp.ones_like(counted))
    return Totals(*(jnp.sum(place * counted) for place in places))

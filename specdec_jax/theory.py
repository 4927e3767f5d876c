"""The paper's analysis (section 3 and appendix A.5) as functions of plain numbers.

alpha is the mean probability that a guess is accepted, gamma the guesses per step, c the time of a draft call in target
calls, c_hat the same of arithmetic operations per token. Betas are taken as independent and of equal law, as the paper
does, and a target call of gamma + 1 tokens to cost what one of one token does.
"""

import numpy as np
from jaxtyping import Float


def beta(p: Float[np.ndarray, "*lead vocab"], q: Float[np.ndarray, "*lead vocab"]) -> Float[np.ndarray, "*lead"]:
    """sum_x min(p(x), q(x)): the probability that a guess drawn from q is accepted (Theorem 3.5)."""
    return np.minimum(p, q).sum(axis=-1)


def d_lk(p: Float[np.ndarray, "*lead vocab"], q: Float[np.ndarray, "*lead vocab"]) -> Float[np.ndarray, "*lead"]:
    """sum_x |p(x) - q(x)| / 2, which is 1 - beta (Definition 3.2, Lemma 3.3)."""
    return np.abs(p - q).sum(axis=-1) / 2


def lenient_beta(
    p: Float[np.ndarray, "*lead vocab"], q: Float[np.ndarray, "*lead vocab"], lenience: float
) -> Float[np.ndarray, "*lead"]:
    """sum_x min(p(x) / lenience, q(x)) (appendix A.5)."""
    return np.minimum(p / lenience, q).sum(axis=-1)


def tokens_per_step(alpha: float, gamma: int) -> float:
    """Expected tokens that a step emits, (1 - alpha^(gamma+1)) / (1 - alpha) (Eq. 1).

    Raises:
      ValueError: alpha or gamma is out of range.
    """
    _check(alpha, gamma)
    return float(gamma + 1) if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def speedup(alpha: float, gamma: int, c: float, verification: float = 1.0) -> float:
    """Expected walltime improvement, tokens per step over gamma c + 1 (Theorem 3.8).

    Args:
      alpha: acceptance.
      gamma: guesses.
      c: cost of a draft call.
      verification: cost of a target call of gamma + 1 tokens; the paper takes it as 1.

    Raises:
      ValueError: an argument is out of range.
    """
    if c < 0 or verification <= 0:
        raise ValueError(f"c and verification are {c} and {verification}; c must be 0 or more, verification above 0.")
    return tokens_per_step(alpha, gamma) / (gamma * c + verification)


def guaranteed_speedup(alpha: float, c: float) -> float:
    """What some gamma reaches at least: (1 + alpha) / (1 + c) where alpha is above c, else 1 (Corollary 3.9)."""
    return max(1.0, speedup(alpha, 1, c)) if alpha > c else 1.0


def operations(alpha: float, gamma: int, c_hat: float) -> float:
    """How many times more arithmetic operations are made: gamma c_hat + gamma + 1 over tokens per step (Thm 3.11)."""
    return (gamma * c_hat + gamma + 1) / tokens_per_step(alpha, gamma)


def best_gamma(alpha: float, c: float, largest: int = 100) -> int:
    """The gamma of the greatest expected improvement, found by trying all (section 3.5); 0 where none is above 1."""
    gains = [1.0, *(speedup(alpha, gamma, c) for gamma in range(1, largest + 1))]
    return int(np.argmax(gains))


def oracle_tokens_per_step(alpha: float) -> float:
    """Tokens per target call if the number of good guesses were known beforehand, 1 / (1 - alpha) (section 3.5)."""
    _check(alpha, 0)
    return float("inf") if alpha == 1 else 1 / (1 - alpha)


def _check(alpha: float, gamma: int) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}; it is a probability, 0 to 1.")
    if gamma < 0:
        raise ValueError(f"gamma is {gamma}; it must be 0 or more.")

"""What the paper reports (Leviathan et al., arXiv 2211.17192), as printed.

Tasks, models and drafters have the paper's names: EnDe is WMT English to German, CNNDM is CNN/DailyMail summarization;
small, base and large are T5 v1.1, and the target of both tasks is T5-XXL (11B), decoded at batch 1 on one TPU v4.
"""

from typing import NamedTuple


class Row1(NamedTuple):
    """A row of Table 1, what the theory says where guesses cost nothing.

    Attributes:
      alpha: acceptance.
      gamma: guesses per step.
      operations: how many times more arithmetic operations are made (Theorem 3.11, c_hat = 0).
      speed: walltime improvement (Theorem 3.8, c = 0).
    """

    alpha: float
    gamma: int
    operations: float
    speed: float


class Row2(NamedTuple):
    """A row of Tables 2 and 4.

    Attributes:
      task: EnDe or CNNDM.
      draft: small, base or large.
      temperature: 0 or 1.
      gamma: guesses per step.
      alpha: acceptance.
      c: a draft call in target calls, read from profiles.
      expected: improvement by Theorem 3.8 (Table 4, Exp).
      measured: improvement of the walltime (Table 2, Speed; Table 4, Emp).
    """

    task: str
    draft: str
    temperature: float
    gamma: int
    alpha: float
    c: float
    expected: float
    measured: float


class Row3(NamedTuple):
    """A row of Table 3, alpha on 10 000 tokens that the target generated.

    Attributes:
      target: the target model.
      task: EnDe or CNNDM; empty for a language model.
      drafter: unigram, bigram or a model.
      greedy: alpha at temperature 0.
      sampled: alpha at temperature 1.
    """

    target: str
    task: str
    drafter: str
    greedy: float
    sampled: float


class Row5(NamedTuple):
    """A row of Table 5, alpha under lenience on EnDe (appendix A.5).

    Attributes:
      drafter: unigram, bigram, small or base.
      temperature: 1 in the table; 0 in the text below it, where lenience acts before standardization.
      alphas: alpha of each of LENIENCES, in order.
      speedups: improvement for each of LENIENCES at c = LENIENT_C; None where the paper has none.
    """

    drafter: str
    temperature: float
    alphas: tuple[float, ...]
    speedups: tuple[float, ...] | None = None


TABLE1 = (
    Row1(0.6, 2, 1.53, 1.96),
    Row1(0.7, 3, 1.58, 2.53),
    Row1(0.8, 2, 1.23, 2.44),
    Row1(0.8, 5, 1.63, 3.69),
    Row1(0.9, 2, 1.11, 2.71),
    Row1(0.9, 10, 1.60, 6.86),
)
"""Table 1 (section 3.4)."""

TABLE2 = (
    Row2("EnDe", "small", 0.0, 7, 0.75, 0.02, 3.2, 3.4),
    Row2("EnDe", "base", 0.0, 7, 0.80, 0.04, 3.3, 2.8),
    Row2("EnDe", "large", 0.0, 7, 0.82, 0.11, 2.5, 1.7),
    Row2("EnDe", "small", 1.0, 7, 0.62, 0.02, 2.3, 2.6),
    Row2("EnDe", "base", 1.0, 5, 0.68, 0.04, 2.4, 2.4),
    Row2("EnDe", "large", 1.0, 3, 0.71, 0.11, 2.0, 1.4),
    Row2("CNNDM", "small", 0.0, 5, 0.65, 0.02, 2.4, 3.1),
    Row2("CNNDM", "base", 0.0, 5, 0.73, 0.04, 2.6, 3.0),
    Row2("CNNDM", "large", 0.0, 3, 0.74, 0.11, 2.0, 2.2),
    Row2("CNNDM", "small", 1.0, 5, 0.53, 0.02, 1.9, 2.3),
    Row2("CNNDM", "base", 1.0, 3, 0.55, 0.04, 1.8, 2.2),
    Row2("CNNDM", "large", 1.0, 3, 0.56, 0.11, 1.6, 1.7),
)
"""Table 2 (section 4.1), and with c and Exp Table 4."""

T5_XXL = "T5-XXL"

TABLE3 = (
    Row3("GPT-like 97M", "", "unigram", 0.03, 0.03),
    Row3("GPT-like 97M", "", "bigram", 0.05, 0.05),
    Row3("GPT-like 97M", "", "GPT-like 6M", 0.88, 0.89),
    Row3(T5_XXL, "EnDe", "unigram", 0.08, 0.07),
    Row3(T5_XXL, "EnDe", "bigram", 0.20, 0.19),
    Row3(T5_XXL, "EnDe", "small", 0.75, 0.62),
    Row3(T5_XXL, "EnDe", "base", 0.80, 0.68),
    Row3(T5_XXL, "EnDe", "large", 0.82, 0.71),
    Row3(T5_XXL, "CNNDM", "unigram", 0.13, 0.08),
    Row3(T5_XXL, "CNNDM", "bigram", 0.23, 0.16),
    Row3(T5_XXL, "CNNDM", "small", 0.65, 0.53),
    Row3(T5_XXL, "CNNDM", "base", 0.73, 0.55),
    Row3(T5_XXL, "CNNDM", "large", 0.74, 0.56),
    Row3("LaMDA 137B", "", "LaMDA 100M", 0.61, 0.57),
    Row3("LaMDA 137B", "", "LaMDA 2B", 0.71, 0.71),
    Row3("LaMDA 137B", "", "LaMDA 8B", 0.75, 0.74),
)
"""Table 3 (section 4.2). GPT-like is trained on lm1b; LaMDA samples under a top-40 filter."""

LENIENCES = (1.0, 0.5, 0.3, 0.1)
"""Table 5's columns."""

LENIENT_TASK = "EnDe"
"""Table 5's task."""

LENIENT_C = 0.015
"""c of the improvements in Row5 (appendix A.5)."""

LENIENT_GAMMA_GREEDY = 8
"""gamma of the improvements at temperature 0 (appendix A.5); that at temperature 1 is not said."""

TABLE5 = (
    Row5("unigram", 1.0, (0.07, 0.10, 0.11, 0.16)),
    Row5("bigram", 1.0, (0.19, 0.23, 0.25, 0.32)),
    Row5("small", 1.0, (0.62, 0.71, 0.76, 0.84), (2.5, 3.1, 3.6, 5.0)),
    Row5("base", 1.0, (0.68, 0.80, 0.83, 0.90)),
    Row5("small", 0.0, (0.75, 0.75, 0.80, 0.87), (3.3, 3.3, 3.9, 4.9)),
)
"""Table 5 (appendix A.5), and below it the text's values for T5-small at temperature 0."""


def row2(task: str, draft: str, temperature: float) -> Row2 | None:
    """The row of Tables 2 and 4 of these, by the paper's names; None if they have none."""
    found = (row for row in TABLE2 if (row.task, row.draft, row.temperature) == (task, draft, temperature))
    return next(found, None)

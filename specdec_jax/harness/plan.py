"""What the harness is asked to measure; checked before anything is read."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from specdec_jax.harness import paper
from specdec_jax.models.t5_config import T5Config
from specdec_jax.settings import find_rule

GAMMAS = ("paper", "best")
"""Names that may stand for a gamma: the paper's own, and the best one by Theorem 3.8 with measured costs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A task: inputs, and the models that were made for it.

    Attributes:
      name: as the tables show it.
      paper_name: the paper's name of it, "EnDe" or "CNNDM"; None for a task that the paper has not.
      inputs: a text file with one input per line, or "demo:ende", "demo:summarize", "demo:restore"; None where
        weights are random, and so are inputs.
      task_prefix: what is put before each input.
      target: a checkpoint, or the sizes of a model with random weights.
      drafts: by the name that the tables show, likewise.
      vocabulary: a SentencePiece .model file, "bytes", or "demo:vocabulary"; None where weights are random.
      extra_ids: sentinel ids to append to the vocabulary.
      max_input_length: what inputs are padded to; longer ones are cut before their end, as SeqIO does.
      max_decode_length: tokens of an output at most.
    """

    name: str
    paper_name: str | None
    inputs: str | None
    task_prefix: str
    target: str | T5Config
    drafts: Mapping[str, str | T5Config]
    vocabulary: str | None
    extra_ids: int
    max_input_length: int
    max_decode_length: int

    def __post_init__(self) -> None:
        for name in ("max_input_length", "max_decode_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of task {self.name} is {getattr(self, name)}; it must be 1 or more.")
        if not self.drafts:
            raise ValueError(f"drafts of task {self.name} is empty; give at least one, as {{'small': checkpoint}}.")
        if self.paper_name not in (None, "EnDe", "CNNDM"):
            raise ValueError(
                f"paper_name of task {self.name} is {self.paper_name!r}; the paper has 'EnDe' and 'CNNDM'."
            )
        for model in (self.target, *self.drafts.values()):
            if not isinstance(model, (str, T5Config)):
                raise ValueError(f"task {self.name} has {model!r} as a model; give a checkpoint's path or a T5Config.")
        random = [isinstance(model, T5Config) for model in (self.target, *self.drafts.values())]
        if any(random) and not all(random):
            raise ValueError(f"task {self.name} mixes checkpoints and random weights; give all its models alike.")
        if not self.simulated and (self.inputs is None or self.vocabulary is None):
            raise ValueError(f"task {self.name} has no inputs or no vocabulary; its checkpoints need both.")
        if self.simulated and self.paper_name is None:
            raise ValueError(f"task {self.name} has random weights and no paper_name; whose alpha shall be simulated?")

    @property
    def simulated(self) -> bool:
        """Whether weights are random, and acceptance is simulated."""
        return isinstance(self.target, T5Config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure, and how thoroughly.

    Attributes:
      name: of the results; files are results/table2_NAME.json and so on.
      directory: where results go.
      tasks: the tasks.
      paper_drafts: the paper's name of a draft, "small", "base" or "large", by its name here, where it has one.
      temperatures: of both models.
      gammas: numbers, or "paper" or "best".
      max_gamma: the largest that is tried for the best.
      rule: of verification, "token", "block" or "coupled"; None for "block".
      batch_size: inputs decoded together when timed.
      num_prompts: timed inputs of each cell.
      repeats: timed decodes of each, both ways in turn.
      rounds: times that the cost of each call is measured.
      num_tokens: tokens of the target that alpha is measured on, at least, if the inputs give as many.
      alpha_batch_size: inputs decoded together for that.
      seed: of all draws.
      dtype: "float32" or "bfloat16"; None for float32 on CPU, bfloat16 elsewhere.
    """

    name: str
    directory: str
    tasks: tuple
    paper_drafts: Mapping[str, str]
    temperatures: tuple
    gammas: tuple
    max_gamma: int
    rule: str | None
    batch_size: int
    num_prompts: int
    repeats: int
    rounds: int
    num_tokens: int
    alpha_batch_size: int
    seed: int
    dtype: str | None

    def __post_init__(self) -> None:
        check(self, ("max_gamma", "batch_size", "num_prompts", "repeats", "rounds", "num_tokens", "alpha_batch_size"))
        if len({task.simulated for task in self.tasks}) > 1:
            raise ValueError("some tasks have checkpoints and some random weights; measure them apart.")
        for gamma in self.gammas:
            if gamma not in GAMMAS and not (type(gamma) is int and gamma >= 1):
                raise ValueError(f"gammas has {gamma!r}; each must be a whole number from 1 on, 'paper' or 'best'.")
        if not self.gammas:
            raise ValueError("gammas must not be empty.")
        if self.dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"dtype is {self.dtype!r}; it must be 'float32', 'bfloat16' or None (by device).")
        unknown = set(self.paper_drafts.values()) - {"small", "base", "large"}
        if unknown:
            raise ValueError(f"paper_drafts names {sorted(unknown)}; the paper's drafts are small, base and large.")
        find_rule(self.rule, 1.0)
        if self.simulated and self.rule == "coupled":
            raise ValueError("rule is 'coupled', whose guesses pass by being equal; simulate 'token' or 'block'.")
        rows = [
            self.paper_row(task, draft, float(temperature))
            for task in self.tasks
            for draft in task.drafts
            for temperature in self.temperatures
        ]
        printed = [row.gamma for row in rows if row is not None and "paper" in self.gammas]
        numbers = [gamma for gamma in self.gammas if type(gamma) is int]
        if not (printed or numbers or "best" in self.gammas):
            raise ValueError(
                f"gammas is {tuple(self.gammas)}, and the paper has none of these tasks, drafts and temperatures: "
                "there is nothing to measure; give numbers or 'best' too."
            )
        shortest = min(task.max_decode_length for task in self.tasks)
        largest = max([self.max_gamma, *numbers, *printed])
        if shortest < 4 * (largest + 1):
            raise ValueError(
                f"the largest of max_gamma and gammas is {largest}; to time steps of up to {largest + 1} tokens, "
                f"max_decode_length of every task must be {4 * (largest + 1)} or more, and one is {shortest}."
            )
        for task in self.tasks:
            for draft in task.drafts if task.simulated else ():
                for temperature in self.temperatures:
                    if self.paper_row(task, draft, float(temperature)) is None:
                        raise ValueError(
                            f"the paper has no alpha for task {task.name} ({task.paper_name}), draft {draft} and "
                            f"temperature {temperature}, which acceptance could be simulated with."
                        )

    @property
    def simulated(self) -> bool:
        """Whether acceptance is simulated."""
        return self.tasks[0].simulated

    def path(self, what: str, suffix: str) -> pathlib.Path:
        """Where a result goes, such as results/table2_demo.json."""
        return pathlib.Path(self.directory) / f"{what}_{self.name}{suffix}"

    def paper_row(self, task: Task, draft: str, temperature: float) -> paper.Row2 | None:
        """The paper's line of Table 2 for a cell; None where it has none."""
        if task.paper_name is None or draft not in self.paper_drafts:
            return None
        return paper.row2(task.paper_name, self.paper_drafts[draft], temperature)

    def settings(self) -> dict[str, Any]:
        """What the figures depend on, JSON-ready."""
        fields = dataclasses.asdict(self)
        del fields["name"], fields["directory"]
        fields["tasks"] = [
            {name: str(value) if isinstance(value, T5Config) else value for name, value in vars(task).items()}
            | {"drafts": {name: str(model) for name, model in task.drafts.items()}}
            for task in self.tasks
        ]
        fields["paper_tasks"] = {task.name: task.paper_name for task in self.tasks if task.paper_name}
        return fields


def check(plan: Any, counts: Sequence[str]) -> None:
    """What every plan's name, tasks, temperatures and those numbers of it must be.

    Raises:
      ValueError: one is not.
    """
    for name in counts:
        if getattr(plan, name) < 1:
            raise ValueError(f"{name} is {getattr(plan, name)}; it must be 1 or more.")
    if not plan.name or not plan.name.replace("_", "").replace("-", "").isalnum():
        raise ValueError(f"name is {plan.name!r}; it is part of file names: letters, digits, - and _ only.")
    if not plan.tasks or not all(isinstance(task, Task) for task in plan.tasks):
        raise ValueError(f"tasks is {plan.tasks!r}; give Tasks, as [@ende/Task()].")
    if len({task.name for task in plan.tasks}) < len(plan.tasks):
        raise ValueError(f"tasks are named {[task.name for task in plan.tasks]}; give each a name of its own.")
    if not plan.temperatures:
        raise ValueError("temperatures must not be empty.")
    for temperature in plan.temperatures:
        if not isinstance(temperature, (int, float)) or isinstance(temperature, bool) or temperature < 0:
            raise ValueError(f"temperatures has {temperature!r}; each must be a number from 0 on.")

"""The figures of a measured plan: the paper's five, and two that look at the i.i.d. assumption."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specdec_jax import trace
from specdec_jax.harness import figures, plots
from specdec_jax.harness.grid import TaskModels
from specdec_jax.harness.plan import Plan
from specdec_jax.sharding import fetch


def draw(plan: Plan, document: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    """What to draw, by name; nothing is drawn before it is called.

    Figures 1 and 5 are of the first prompt of the first task, as the first cell decodes it.

    Args:
      plan: what was measured.
      document: its measurements, with cells.
    """
    cells, simulated = document["cells"], document["simulated"]
    first = cells[0]
    models = TaskModels(plan, next(task for task in plan.tasks if task.name == first["task"]))
    work = models.works(first["draft"], first["temperature"], first["gamma"])[0]
    result = fetch(work.run(limit=work.max_length, eos_ids=models.eos_ids))
    emitted = [int(n) for n in np.asarray(result.step_emitted[0]) if n > 0]
    made: dict[str, Callable[[], Any]] = {
        "figure2": lambda: figures.figure2(cells, simulated=simulated),
        "figure3": figures.figure3,
        "figure4": lambda: figures.figure4(cells, simulated=simulated),
        "figure5": lambda: figures.figure5(
            {name: value for name, value in first["seconds"].items() if name not in ("gamma", "bodies")},
            [first["gamma"]] * len(emitted),
            emitted,
            simulated=simulated,
        ),
    }
    if simulated:  # there is no text, and betas were not measured
        return made
    made["figure1"] = lambda: figures.figure1(trace.steps_of(result, 0, models.vocabulary))
    made["acceptance_by_position"] = lambda: plots.acceptance_by_position(dict(document))
    made["beta_distribution"] = lambda: plots.beta_distribution(dict(document))
    return made

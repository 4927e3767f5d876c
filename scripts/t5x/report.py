"""Prints a table like the paper's Table 2 from folders that scripts/t5x/infer.sh wrote.

python scripts/t5x/report.py out/*_t0.0 out/*_t1.0

Speed is t5x's own record of its chunks, without the first after each start, which compiles.
"""

import json
import pathlib
import re
import sys
from typing import Any, NamedTuple

_CHUNK = re.compile(r"chunk completed in ([\d.]+) seconds \(([\d.]+) examples/sec\)")
_COLUMNS = "task|draft|temperature|gamma|alpha|tokens per target call|seconds per input|speedup|equal|launch (s)"
_NOTES = """
alpha: mean over the guesses that were tested. tokens per target call: all tokens, ends included, by all calls. seconds
per input: after compilation. speedup: against gamma 0, the target alone in the same program; draft none is t5x's own
decoder. equal: greedy outputs, token by token, that the target alone gives too; in bfloat16 near ties may fall either
way. launch: wall time of all, start-up and compilation included; no speedup follows from it."""


class Run(NamedTuple):
    """What one launch of t5x.infer left."""

    task: str
    temperature: float
    draft: str
    gamma: str
    outputs: list[dict[str, Any]]
    seconds_per_input: float | None
    launch_seconds: str


def read_run(directory: pathlib.Path) -> Run:
    """Reads a folder of infer.sh's; ValueError where its outputs are missing."""
    config = (directory / "config.gin").read_text(encoding="utf-8")
    macros = dict(re.findall(r"^([A-Z_]+) = (?:\\\n\s*)?(.*)$", config, re.MULTILINE))
    files = sorted(directory.glob("*-predict_with_aux.jsonl-?????-of-?????"))
    if not files or len(files) != int(files[0].name[-5:]):
        raise ValueError("not all outputs of mode 'predict_with_aux' are there: the run has not ended")
    outputs = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    if not all({"aux", "prediction_tokens"} <= set(one) for one in outputs):
        raise ValueError("outputs lack aux or prediction_tokens; infer with OUTPUT_IDS = True")
    draft = macros.get("DRAFT_CHECKPOINT_PATH", "'none'").strip("'")
    return Run(
        task=macros["MIXTURE_OR_TASK_NAME"].strip("'"),
        temperature=float(macros["TEMPERATURE"]),
        draft=re.sub(r"/checkpoint_\d+/?$", "", draft).rsplit("/", 1)[-1],
        gamma=macros.get("GAMMA", "-1"),
        outputs=outputs,
        seconds_per_input=steady_seconds((directory / "infer.log").read_text(encoding="utf-8", errors="replace")),
        launch_seconds=(directory / "seconds").read_text().strip(),
    )


def steady_seconds(log: str) -> float | None:
    """Seconds per input over all chunks but the first after each start; None where there are no others."""
    seconds, inputs, first = 0.0, 0, True
    for line in log.splitlines():
        first |= "Starting inference loop" in line
        if chunk := _CHUNK.search(line):
            if not first:
                seconds += float(chunk[1])
                inputs += round(float(chunk[1]) * float(chunk[2]))
            first = False
    return seconds / inputs if inputs else None


def row(run: Run, plain: Run | None) -> list[str]:
    """The run's line of the table; plain is the one with gamma 0."""
    aux = [output["aux"] for output in run.outputs]
    tests = [(one["alpha"], one["trials"]) for one in aux if one.get("trials")]
    calls = sum(one.get("num_target_calls", 0) for one in aux)
    tokens = sum(len(output["prediction_tokens"]) for output in run.outputs)
    alpha = f"{sum(a * n for a, n in tests) / sum(n for _, n in tests):.2f}" if tests else "-"
    per_call = f"{tokens / calls:.2f}" if calls else "-"
    seconds = f"{run.seconds_per_input:.4f}" if run.seconds_per_input else "-"
    speedup = equal = "-"
    if plain and run.seconds_per_input and plain.seconds_per_input:
        speedup = f"{plain.seconds_per_input / run.seconds_per_input:.2f}"
    if plain and not run.temperature and [o["inputs"] for o in run.outputs] == [o["inputs"] for o in plain.outputs]:
        pairs = zip(run.outputs, plain.outputs, strict=True)
        equal = f"{sum(a['prediction_tokens'] == b['prediction_tokens'] for a, b in pairs)} of {len(run.outputs)}"
    start = [run.task, run.draft, f"{run.temperature:g}", run.gamma.replace("-1", "-")]
    return [*start, alpha, per_call, seconds, speedup, equal, run.launch_seconds]


if __name__ == "__main__":
    runs = []
    for folder in dict.fromkeys(sys.argv[1:]) or sys.exit("usage: report.py FOLDER ..."):
        try:
            runs.append(read_run(pathlib.Path(folder)))
        except (ValueError, KeyError, TypeError, OSError) as error:
            sys.exit(f"error: {folder} is not what infer.sh leaves: {type(error).__name__}: {error}")
    runs.sort(key=lambda run: (run[:2], run.draft != "none", int(run.gamma)))
    without = {run[:2]: run for run in runs if run.gamma == "0"}
    for cells in (_COLUMNS.split("|"), ["---"] * 10, *(row(run, without.get(run[:2])) for run in runs)):
        print(f"| {' | '.join(cells)} |")
    print(_NOTES)

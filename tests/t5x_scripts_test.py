"""scripts/t5x: their launches parse, and their report is what the outputs say."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from t5x_gin_parser import ROOT, read_command, run, write_stand_ins


def call_script(tmp_path, words, **environment):
    """The commands that a script starts with Python, which is a stand-in that writes them down."""
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh
{{ printf '%s\\n' "$@"; echo; }} >>{tmp_path}/commands
""")
    python.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(python), "MODELS": "gs://bucket/models", **environment}
    script, *words = words
    script = ROOT / "scripts" / "t5x" / script
    result = subprocess.run([script, *words], env=environment, capture_output=True, text=True, cwd=tmp_path)
    commands = tmp_path / "commands"
    texts = commands.read_text().split("\n\n")[:-1] if commands.exists() else []
    return result, [text.split("\n") for text in texts]


def test_scripts_start_launches_that_parse(tmp_path):
    _, commands = call_script(tmp_path, ["finetune.sh", "xxl", "ende", "--gin.BATCH_SIZE=64"], MULTI_HOST="1")
    assert "--multiprocess_gpu" in commands[0]
    result, commands = call_script(tmp_path, ["table2.sh", "out"], STAGES="finetune infer", TFDS_DATA_DIR="gs://tfds")
    assert result.returncode == 0, result.stderr
    cases = [read_command(command) for command in commands]
    assert len(cases) == 1 + 2 * 4 + 2 * 2 * 5
    results = run(cases, write_stand_ins(tmp_path))
    assert [result["error"] for result in results if "error" in result] == []
    macros = [result["macros"] for result in results]
    assert (macros[0]["BATCH_SIZE"], macros[0]["NUM_PARTITIONS"]) == ("64", "8")
    assert macros[0]["MODEL_DIR"] == "'gs://bucket/models/ende_xxl'"
    decoding = [one for one in macros if "INFER_OUTPUT_DIR" in one]
    found = {}
    for one in decoding:
        draft = re.search(r"_(\w+)/", one.get("DRAFT_CHECKPOINT_PATH", "models_none/"))[1].rsplit("_", 1)[-1]
        task = "EnDe" if "wmt" in one["MIXTURE_OR_TASK_NAME"] else "CNNDM"
        draft = "alone" if one.get("GAMMA") == "0" else draft
        found[task, draft, one["TEMPERATURE"]] = one.get("GAMMA")
        assert one.get("RULE") == (None if draft == "none" else "'token'")
        assert one["BATCH_SIZE"] == "1" and re.search(r"_xxl/checkpoint_1020000", one["CHECKPOINT_PATH"])
    paper = {  # Table 2's gammas
        "EnDe": {"small": "77", "base": "75", "large": "73", "none": [None, None], "alone": "00"},
        "CNNDM": {"small": "55", "base": "53", "large": "33", "none": [None, None], "alone": "00"},
    }
    assert found == {
        (task, draft, temperature): gammas[place]
        for task, drafts in paper.items()
        for draft, gammas in drafts.items()
        for place, temperature in enumerate(["0.0", "1.0"])
    }


def test_a_failed_launch_is_not_taken_for_a_finished_one(tmp_path):
    (tmp_path / "fails").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "fails").chmod(0o755)
    words = ["infer.sh", "ende", "xxl", "none", "0.0", "-", "out"]
    result, _ = call_script(tmp_path, words, PYTHON=str(tmp_path / "fails"))
    assert result.returncode == 3 and not (tmp_path / "out" / "seconds").exists()


@pytest.mark.parametrize("name", ["finetune.sh", "infer.sh", "setup_tpu_vm.sh", "table2.sh"])
def test_scripts_say_what_they_need(name, tmp_path):
    result, commands = call_script(tmp_path, [name])
    assert result.returncode and "usage: " in result.stderr and commands == []


def write_run(folder, *, ids, seconds, temperature="0.0", draft=None, gamma=7, aux=None):
    folder.mkdir()
    macros = ["MIXTURE_OR_TASK_NAME = 'wmt_t2t_ende_v003'", f"TEMPERATURE = {temperature}"]
    if draft:
        macros += [
            f"DRAFT_CHECKPOINT_PATH = \\\n    'gs://bucket/models/{draft}/checkpoint_1020000'",
            f"GAMMA = {gamma}",
        ]
    (folder / "config.gin").write_text("\n".join(macros))
    lines = [
        {"inputs": {"n": n}, "prediction_tokens": one, "aux": aux or {"scores": -1.0}} for n, one in enumerate(ids)
    ]
    output = folder / "wmt_t2t_ende_v003-predict_with_aux.jsonl-00000-of-00001"
    output.write_text("".join(json.dumps(line) + "\n" for line in lines))
    log = ["I1130 infer.py:1] Starting inference loop for shard 0 of 1 of task 't'."]
    log += [f"I1130 infer.py:2] chunk completed in {one:f} seconds ({100 / one:f} examples/sec)." for one in seconds]
    (folder / "infer.log").write_text("\n".join(log))
    (folder / "seconds").write_text("321\n")
    return str(folder)


def report(*folders):
    script = ROOT / "scripts" / "t5x" / "report.py"
    result = subprocess.run([sys.executable, script, *folders], capture_output=True, text=True)
    rows = [line.strip("| ").split(" | ") for line in result.stdout.splitlines() if line.startswith("|")]
    return result, rows[2:]


def test_report(tmp_path):
    aux = {"scores": -1.0, "num_target_calls": 2, "accepted": 3, "drafted": 14, "trials": 4, "alpha": 0.75}
    alone = {"scores": -1.0, "num_target_calls": 5, "accepted": 0, "drafted": 0, "trials": 0, "alpha": 0.0}
    ids = [[5, 6, 7, 8, 1], [5, 6, 7, 9, 1]]
    theirs = write_run(tmp_path / "theirs", ids=ids, seconds=[90.0, 120.0])
    plain = write_run(tmp_path / "plain", ids=ids, seconds=[90.0, 60.0, 60.0], draft="ende_small", gamma=0, aux=alone)
    small = write_run(tmp_path / "small", ids=[ids[0]] * 2, seconds=[80.0, 20.0, 20.0], draft="ende_small", aux=aux)
    short = write_run(tmp_path / "short", ids=ids, seconds=[80.0], draft="ende_base", aux=aux)
    warm = write_run(tmp_path / "warm", ids=ids, seconds=[9.0, 1.0], draft="ende_base", aux=aux, temperature="1.0")
    result, rows = report(warm, small, short, theirs, plain)
    start = "wmt_t2t_ende_v003"
    assert rows == [
        [start, "none", "0", "-", "-", "-", "1.2000", "0.50", "2 of 2", "321"],
        [start, "ende_small", "0", "0", "-", "1.00", "0.6000", "1.00", "2 of 2", "321"],
        [start, "ende_small", "0", "7", "0.75", "2.50", "0.2000", "3.00", "1 of 2", "321"],
        [start, "ende_base", "0", "7", "0.75", "2.50", "-", "-", "2 of 2", "321"],  # its only chunk compiled
        [start, "ende_base", "1", "7", "0.75", "2.50", "0.0100", "-", "-", "321"],  # nothing to compare with
    ]
    assert "start-up and compilation included" in result.stdout


def test_a_run_that_has_not_ended_is_no_row(tmp_path):
    folder = pathlib.Path(write_run(tmp_path / "run", ids=[[1]], seconds=[1.0, 1.0]))
    next(folder.glob("*.jsonl*")).unlink()
    result, rows = report(str(folder))
    assert result.returncode == 1 and rows == [] and "the run has not ended" in result.stderr

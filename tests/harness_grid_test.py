import json
import pathlib
import re
import subprocess

import pytest
import tiny_plan

from specdec_jax import cli, theory
from specdec_jax.harness import costs, grid, records
from specdec_jax.harness.plan import Plan, Task
from specdec_jax.models.t5_config import T5Config
from specdec_jax.vocabularies import load_vocabulary

ROOT = pathlib.Path(__file__).parent.parent
FIXTURE, WORDS = tiny_plan.FIXTURE, tiny_plan.WORDS
RUN = "--gin_file=configs/table2_demo.gin"
TINY = T5Config(
    vocab_size=40, emb_dim=8, num_heads=2, head_dim=4, mlp_dim=16, num_encoder_layers=1, num_decoder_layers=1
)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(costs, "_SECONDS_PER_LOOP", 0.002)


def task(tmp_path, **changes) -> Task:
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(WORDS) + "\n\n")
    fields = dict(
        name="upper",
        paper_name="EnDe",
        inputs=str(lines),
        task_prefix="",
        target=FIXTURE.format("target"),
        drafts={"small": FIXTURE.format("draft")},
        vocabulary="bytes",
        extra_ids=0,
        max_input_length=16,
        max_decode_length=12,
    )
    return Task(**fields | changes)


def plan(tmp_path, *tasks, **changes) -> Plan:
    fields = dict(
        name="test",
        directory=str(tmp_path / "results"),
        tasks=tasks or (task(tmp_path),),
        paper_drafts={"small": "small"},
        temperatures=(0.0,),
        gammas=("best", 2),
        max_gamma=2,
        rule=None,
        batch_size=1,
        num_prompts=2,
        repeats=1,
        rounds=1,
        num_tokens=20,
        alpha_batch_size=2,
        seed=0,
        dtype=None,
    )
    return Plan(**fields | changes)


def test_a_killed_run_goes_on_with_what_is_missing(tmp_path, monkeypatch):
    some = plan(tmp_path)
    measured = []
    real = grid._cell

    def dies(plan, task, models, key, found):
        if measured:
            raise KeyboardInterrupt
        measured.append(key["gamma"])
        return real(plan, task, models, key, found)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(grid, "_cell", dies)
        patched.setattr(grid, "best_gamma", lambda *args: 1)
        grid.run(some, with_cells=True)
    path = some.path("table2", ".json")
    saved = json.loads(path.read_text())
    assert [cell["gamma"] for cell in saved["cells"]] == measured == [1]
    with monkeypatch.context() as patched:
        patched.setattr(grid, "best_gamma", lambda *args: 1)
        patched.setattr(grid.acceptance, "measure", lambda *args, **more: pytest.fail("measured twice"))
        document = grid.run(some, with_cells=True)
    assert document["cells"][0] == saved["cells"][0] and [c["gamma"] for c in document["cells"]] == [1, 2]
    for cell in document["cells"]:
        assert cell["outputs"] == "equal" and cell["num_prompts"] == 2
        assert cell["predicted"] == pytest.approx(theory.speedup(cell["alpha"], cell["gamma"], cell["c"]))
        assert 0 < cell["speedup_low"] <= cell["speedup"] <= cell["speedup_high"]
        assert 1 <= cell["tokens_per_call"] <= cell["gamma"] + 1
    (found,) = document["acceptance"]
    assert found["num_tokens"] >= 20 and 0.5 < found["alpha"] <= 1
    (told,) = grid.advice(document)
    assert told.removeprefix("WARNING: ").startswith("upper, small, temperature 0: best gamma 1, predicted")
    with pytest.raises(ValueError, match="was measured with settings.seed 0, which is now 1"):
        grid.run(plan(tmp_path, seed=1), with_cells=True)
    here = records.environment()
    monkeypatch.setattr(records, "environment", lambda: here | {"backend": "tpu"})
    with pytest.raises(ValueError, match="was measured with backend 'cpu', and here it is 'tpu'; go on there"):
        grid.run(plan(tmp_path), with_cells=True)


def test_a_commit_is_marked_where_what_runs_differs_from_it(tmp_path, monkeypatch):
    source, result = tmp_path / "specdec_jax/harness/records.py", tmp_path / "results/table.json"
    for path in (source, result):
        path.parent.mkdir(parents=True)
        path.write_text("1")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=name", "-c", "user.email=name@example.org"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=one"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(records, "__file__", str(source))
    clean = records.environment()["commit"]
    assert re.fullmatch("[0-9a-f]{40}", clean)
    result.write_text("2")
    assert records.environment()["commit"] == clean
    source.write_text("2")
    assert records.environment()["commit"] == clean + "+"


def test_simulated_acceptance_is_said_on_everything(tmp_path):
    simulated = task(tmp_path, target=TINY, drafts={"small": TINY}, inputs=None, vocabulary=None)
    some = plan(tmp_path, simulated, gammas=(2,), batch_size=2)
    document = grid.run(some, with_cells=True)
    (cell,) = document["cells"]
    assert document["simulated"] and cell["outputs"] == "simulated" and cell["alpha"] == 0.75
    assert cell["num_prompts"] == 2 and cell["batch_size"] == 2


def test_inputs_are_cut_before_their_end(tmp_path):
    bytes_ = load_vocabulary("bytes")
    found = grid.read_inputs(task(tmp_path, max_input_length=6), bytes_)
    assert found[0] == [byte + 3 for byte in b"fish "] + [1]
    assert found[2] == [byte + 3 for byte in b"blue"] + [1] and len(found) == 4
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n")
    with pytest.raises(ValueError, match="which holds no text"):
        grid.read_inputs(task(tmp_path, inputs=str(empty)), bytes_)
    with pytest.raises(ValueError, match="cannot read inputs"):
        grid.read_inputs(task(tmp_path, inputs=str(tmp_path / "none.txt")), bytes_)


def test_the_packaged_inputs_are_enough_for_ten_thousand_tokens():
    texts = grid._read_lines("demo:ende"), grid._read_lines("demo:summarize")
    assert [len(set(some)) for some in texts] == [440, 950]


def test_the_best_gamma_knows_what_verification_costs():
    free = {"c": 0.02, "verification": {str(k): 1.0 for k in range(1, 10)}}
    assert grid.best_gamma(0.75, free, 8) == theory.best_gamma(0.75, 0.02, largest=8)
    dear = free | {"verification": {str(k): 0.5 + 0.5 * k for k in range(1, 10)}}
    assert grid.best_gamma(0.75, dear, 8) < grid.best_gamma(0.75, free, 8)


def test_the_best_gamma_alone_is_a_plan(tmp_path):
    assert plan(tmp_path, gammas=("best",)).gammas == ("best",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "a/b"}, "name is 'a/b'; it is part of file names"),
        ({"gammas": (0,)}, "gammas has 0; each must be a whole number from 1 on"),
        ({"gammas": ("oracle",)}, "gammas has 'oracle'"),
        ({"gammas": ()}, "gammas must not be empty"),
        ({"temperatures": (-1.0,)}, "temperatures has -1.0"),
        ({"tasks": ()}, "tasks is"),
        ({"rule": "strict"}, "rule is 'strict'"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
        ({"rounds": 0}, "rounds is 0; it must be 1 or more"),
        ({"max_gamma": 5}, "the largest of max_gamma and gammas is 5; to time steps of up to 6 tokens"),
        ({"gammas": (9,)}, "the largest of max_gamma and gammas is 9; to time steps of up to 10 tokens"),
        ({"gammas": ("paper",), "temperatures": (0.5,)}, "there is nothing to measure; give numbers or 'best' too"),
        ({"paper_drafts": {"small": "tiny"}}, "paper_drafts names"),
    ],
)
def test_a_plan_that_cannot_be_measured_is_refused(tmp_path, changes, message):
    if "tasks" in changes:
        with pytest.raises(ValueError, match=message):
            Plan(**{**vars(plan(tmp_path)), **changes})
        return
    with pytest.raises(ValueError, match=message):
        plan(tmp_path, **changes)


@pytest.mark.parametrize(
    "edit",
    [
        {"environments": None},
        {"environments": [{}]},
        {"acceptance": None},
        {"cells": [{"task": "upper"}]},
        {"calls": [{"task": "upper", "draft": "small", "environment": 7}]},
    ],
)
def test_a_results_file_that_was_damaged_is_named(tmp_path, edit):
    path = plan(tmp_path).path("table2", ".json")
    record = records.Record.open(path, name="test", simulated=False, settings={})
    record.add("acceptance", {"task": "upper", "draft": "small", "alpha": 0.5})
    path.write_text(json.dumps(json.loads(path.read_text()) | edit))
    with pytest.raises(ValueError, match="holds no measurements of this program"):
        records.Record.open(path, name="test", simulated=False, settings={})
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="holds no measurements of this program"):
        records.Record.open(path, name="test", simulated=False, settings={})


def test_a_place_that_nothing_can_be_written_to_is_found_before_measuring(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file/below"):
        assert cli.main(["table3", RUN, f"--gin.DIRECTORY='{place}'"]) == 2
        assert "error: DIRECTORY: nothing can be written to" in capsys.readouterr().err
    for output, wanted in (("", "--output is ''"), (f"{tmp_path}/file/x", "--output: nothing can be written to")):
        assert cli.main(["peers", "--gin_file=configs/demo_ende.gin", f"--output={output}", "x"]) == 2
        assert f"error: {wanted}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafts": {}}, "drafts of task upper is empty"),
        ({"paper_name": "WMT"}, "paper_name of task upper is 'WMT'"),
        ({"target": TINY}, "mixes checkpoints and random weights"),
        ({"inputs": None}, "has no inputs or no vocabulary"),
        ({"max_input_length": 0}, "max_input_length of task upper is 0"),
        ({"target": TINY, "drafts": {"small": TINY}, "paper_name": None}, "whose alpha shall be simulated"),
    ],
)
def test_a_task_that_cannot_be_measured_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        task(tmp_path, **changes)


def test_the_commands_write_every_form(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    flags = [RUN, *tiny_plan.flags(tmp_path)]
    for command in ("table1", "table2", "table3", "table4", "table5", "figures"):
        assert cli.main([command, *flags]) == 0, capsys.readouterr().err
    written = {path.name for path in (tmp_path / "results").iterdir()}
    forms = {f"table{n}_t{suffix}" for n in range(1, 6) for suffix in (".md", ".csv")}
    names = ["table2", *(f"figure{n}" for n in range(1, 6)), "acceptance_by_position", "beta_distribution"]
    drawn = {f"{name}_t{suffix}" for name in names for suffix in (".png", ".svg")}
    assert written == forms | drawn | {"table2_t.json"}
    assert "paper" in (tmp_path / "results/table2_t.md").read_text()


def test_headers_name_commands_that_exist():
    for path in (ROOT / "configs").glob("table2_*.gin"):
        commands = [line.split()[2] for line in path.read_text().splitlines() if line.startswith("#   specdec ")]
        assert commands and set(commands) <= {"table2", "figures"}

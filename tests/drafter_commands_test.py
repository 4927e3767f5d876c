"""`specdec drafter` and `specdec tune`."""

import io
import json
import pathlib
import re

import mini_pair
import numpy as np
import pytest
import tiny_plan

from specdec_jax import cli
from specdec_jax.checkpoints import t5x
from specdec_jax.drafters import base, table
from specdec_jax.harness import costs, tuning

ROOT = pathlib.Path(__file__).parent.parent
MINI = [
    "--gin_file=configs/generate.gin",
    f"--gin.TARGET_CHECKPOINT='{mini_pair.TARGET}'",
    f"--gin.DRAFT_CHECKPOINT='{mini_pair.DRAFT}'",
    "--gin.VOCABULARY='bytes'",
    "--gin.MAX_DECODE_LENGTH=16",
    "--gin.MAX_INPUT_LENGTH=32",
]
TASK = """
import seqio
import tensorflow as tf

def words(split, shuffle_files=False, seed=None):
    return tf.data.Dataset.from_tensor_slices({"inputs": ["x", "y"], "targets": ["ABAB", "AC"]})

vocabulary = seqio.ByteVocabulary()
seqio.TaskRegistry.add(
    "drafter_words",
    source=seqio.FunctionDataSource(words, splits=["validation"]),
    preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
    output_features={"inputs": seqio.Feature(vocabulary), "targets": seqio.Feature(vocabulary)},
)
"""


@pytest.fixture
def specdec(capsys, monkeypatch, tmp_path):
    """Runs a command in an empty directory: (exit status, stdout, the last line of stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(costs, "_SECONDS_PER_LOOP", 0.002)

    def run(*arguments, stdin=""):
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        status = cli.main(list(arguments))
        captured = capsys.readouterr()
        return status, captured.out, (captured.err.splitlines() or [""])[-1]

    return run


def test_a_table_of_a_text(specdec, tmp_path, monkeypatch):
    monkeypatch.setattr(t5x, "load_params", None)  # of the target only the sizes are read
    (tmp_path / "lines.txt").write_text("ABAB\n\nAC\n")
    status, out, _ = specdec("drafter", "build", *MINI, "--text=lines.txt", "--output=t", "--distances=2")
    assert (status, out) == (
        0,
        "written: t.npz, 8 tokens, 4 of 259 ids seen, 6, 5 different pairs at distances 1 to 2, from text lines.txt\n",
    )
    made = table.Table.load("t.npz")
    assert made.after(ord("A") + 3) == [(ord("B") + 3, 2), (ord("C") + 3, 1)] and made.counts[1] == 2
    status, out, _ = specdec("drafter", "inspect", "t.npz", *MINI, "A", "--top=2")
    assert status == 0 and "frequent: 'A' 3, 'B' 2\n" in out
    assert "1 behind 'A': 'B' 2, 'C' 1\n" in out and "2 behind 'A': (end) 2, 'A' 1\n" in out


def test_a_table_of_a_seqio_task(specdec, tmp_path, monkeypatch):
    pytest.importorskip("seqio", reason="seqio is not installed: there are no tasks")
    (tmp_path / "drafter_tasks.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)
    flags = ("--task=drafter_words", "--module=drafter_tasks", "--split=validation")
    status, out, _ = specdec("drafter", "build", *MINI, *flags, "--output=t")
    assert (status, out.split(", ")[0]) == (0, "written: t.npz")
    assert "from task drafter_words, split validation" in out
    made = table.Table.load("t.npz")
    assert made.after(ord("A") + 3) == [(ord("B") + 3, 2), (ord("C") + 3, 1)] and made.counts[1] == 2


def test_a_table_of_what_the_target_says(specdec):
    words = "blue\nred cat\n"
    assert specdec("drafter", "build", *MINI, "--output=t.npz", stdin=words)[0] == 0
    made = table.Table.load("t.npz")
    expected = np.zeros(len(made.counts), int)
    for byte in b"BLUERED CAT":
        expected[byte + 3] += 1
    expected[1] = 2
    np.testing.assert_array_equal(made.counts, expected)
    # What it drafts from is used by name, and changes nothing.
    for drafter in ("bigram", "copy", "mixture", "hierarchical"):
        flags = [f"--gin.DRAFTER='{drafter}'", "--gin.DRAFT_TABLE='t.npz'"]
        assert specdec("generate", *MINI, *flags, "blue", "red cat")[:2] == (0, "BLUE\nRED CAT\n")


def test_tuning(specdec, tmp_path):
    status, out, _ = specdec("tune", *MINI, "--max_gamma=1", "--output=tuned.gin", "blue", "red cat")
    assert status == 0
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith(("model", "copy"))}
    assert set(rows) == {"model", "copy"} and 0 < float(rows["model"][1]) <= 1
    text = (tmp_path / "tuned.gin").read_text()
    assert re.search(r"(?m)^DRAFTER = '(model|copy)'$", text) and "RULE = 'block'" in text
    assert specdec("generate", *MINI, "--gin_file=tuned.gin", "blue", "red cat")[:2] == (0, "BLUE\nRED CAT\n")


def test_a_step_costs_what_lies_between_one_without_guesses_and_one_with_all():
    calls = [1.0, 1.5, 1.75, 1.75, 2.0]
    guess = tuning.cost_of_a_guess(calls, 1.25, 3.0)  # 1.75 more, 1.0 of it the target's, for three guesses
    assert guess == 0.25
    assert tuning.step_costs(calls, 1.25, guess) == [1.25, 1.75, 2.25, 2.5, 3.0]
    assert tuning.cost_of_a_guess(calls, 1.25, 1.5) == 0.0  # a noisy machine's
    assert tuning.step_costs([1.0, 1.5], 1.25, tuning.cost_of_a_guess([1.0, 1.5], 1.25, 1.75)) == [1.25, 1.75]


def test_adaptive_gamma_by_gin(specdec):
    adaptation = "--gin.ADAPTATION={'costs': (1.0, 1.2, 1.3, 1.4, 1.5), 'alpha': 0.5, 'trust': 0.5}"
    status, out, _ = specdec("generate", *MINI, adaptation, "--json", "blue")
    assert status == 0 and json.loads(out)["text"] == "BLUE"
    status, _, error = specdec("generate", *MINI, adaptation, "--gin.GAMMA=3", "blue")
    assert status == 2 and error == "error: adaptation has 5 costs and gamma is 3; give those of 0 to 3 guesses."


def test_every_drafter_is_measured_and_measurements_are_kept(specdec, tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(word.upper() for word in tiny_plan.WORDS))
    assert specdec("drafter", "build", *MINI, "--text=text.txt", "--output=t.npz")[0] == 0
    flags = [
        *tiny_plan.flags(tmp_path),
        "--gin.MAX_GAMMA=1",
        "--gin.NUM_COUNTED=1",
        "--gin.ALPHA_BATCH_SIZE=2",
        "--gin.TABLES={'ende': 't.npz'}",
    ]
    flags = [flag for flag in flags if "GAMMAS" not in flag]
    command = ("drafter", "measure", "--gin_file=configs/drafters_demo.gin", *flags)
    assert specdec(*command, "--gin.DRAFTERS=('copy:table',)")[0] == 0
    document = json.loads((tmp_path / "results/drafters_t.json").read_text())
    cells = {cell["drafter"]: cell for cell in document["cells"]}
    assert set(cells) == {"copy:table"}
    for cell in cells.values():
        assert {"task", "temperature", "gamma", "alpha", "tokens_per_target_call", "speedup"} <= set(cell)
        assert cell["outputs"] == "1 of 1 equal" and 0 <= cell["alpha"] <= 1 and cell["c"] >= 0
        assert cell["oracle"] > 0 and 1 <= cell["tokens_per_target_call"] <= cell["gamma"] + 1
    assert specdec(*command, "--gin.DRAFTERS=('copy:table', 'model:small')")[0] == 0
    again = json.loads((tmp_path / "results/drafters_t.json").read_text())
    assert again["cells"][:1] == document["cells"] and again["cells"][1]["drafter"] == "model:small"
    assert "| ende | model:small |" in (tmp_path / "results/drafters_t.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["drafter"], "the following arguments are required: command, arguments (see specdec drafter --help)"),
        (["drafter", "build", *MINI], "the following arguments are required: --output"),
        (["drafter", "build", *MINI, "--output=t", "--text=no.txt"], "cannot read --text no.txt"),
        (["drafter", "build", *MINI, "--output=t", "--task=nothing"], "cannot read --task nothing, split train"),
        (["drafter", "inspect", "no.npz", *MINI], "cannot read the table no.npz"),
        (["drafter", "inspect", "demo:table_ende", *MINI], "has 4000 ids and the vocabulary 259"),
        (["generate", *MINI, "--gin.DRAFTER='bigram'", "x"], "DRAFT_TABLE is None, and the drafter 'bigram' needs one"),
        (["generate", *MINI, "--gin.DRAFTER='best'", "x"], "DRAFTER is 'best'; it must be one of 'model', 'unigram'"),
        (["generate", *MINI, "--gin.DRAFT_CHECKPOINT=None", "x"], "DRAFT_CHECKPOINT is None, and the drafter 'model'"),
        (
            ["generate", *MINI, "--gin.DRAFTER='bigram'", "--gin.DRAFT_TABLE='demo:table_ende'", "x"],
            "has a vocabulary of 4096 rows and the target",
        ),
        (["tune", *MINI, "x"], "MAX_DECODE_LENGTH is 16; to time steps of up to 8 tokens it must be 32 or more"),
        (["tune", *MINI, "--max_gamma=0", "x"], "--max_gamma is 0; it must be 1 to 64"),
        (
            ["drafter", "measure", "--gin.DRAFTERS=('model',)"],
            "DRAFTERS has 'model', and drafts of task ende are",
        ),
        (["drafter", "measure", "--gin.DRAFTERS=('trigram',)"], "DRAFTERS has 'trigram'; known are 'model'"),
        (["drafter", "measure", "--gin.TABLES={}"], "DRAFTERS has 'unigram', and tables has none for task ende"),
        (["drafter", "measure", "--gin.DRAFTERS=('copy:tabel',)"], "DRAFTERS has 'copy:tabel'; known are"),
        (["drafter", "measure", "--gin.DRAFTERS=('copy:table',)", "--gin.TABLES={}"], "tables has none for task ende"),
        (["drafter", "measure", "--gin.DRAFTERS=()"], "DRAFTERS must not be empty"),
        (["drafter", "measure", "--gin.MAX_GAMMA=31"], "MAX_GAMMA is 31; to time steps of up to 32 tokens"),
        (["drafter", "measure", "--gin.TASKS=[]"], "TASKS is (); give Tasks"),
    ],
)
def test_mistakes_are_told(specdec, arguments, message):
    status, _, error = specdec(*arguments)
    assert status == 2 and error.startswith("error: ") and message.lower() in error.lower()


def test_the_documented_drafter_works():
    """The one in the documentation, as it stands there."""
    import dataclasses

    import jax.numpy as jnp
    from tiny_pair import TARGET, inputs, plain, same_tokens, target_params

    from specdec_jax import PointMass, make_sampling, speculative_decode

    assert base.__doc__ is not None
    (example,) = re.findall(r"(?s)(    @dataclasses.*?)\n\n    speculative_decode", base.__doc__)
    assert len(example.splitlines()) < 40
    names = {"dataclasses": dataclasses, "jnp": jnp, "PointMass": PointMass}
    exec("\n".join(line[4:] for line in example.splitlines()), names)
    result = speculative_decode(
        TARGET,
        target_params(),
        names["RepeatDrafter"](2),
        None,
        inputs(3),
        gamma=3,
        max_length=20,
        sampling=make_sampling(3, temperature=0.0),
        seeds=jnp.arange(3, dtype=jnp.int32),
    )
    same_tokens(result, plain(3))
    assert result.accepted.sum() > 0

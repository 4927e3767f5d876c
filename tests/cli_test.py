import io
import json

import mini_pair
import pytest

from specdec_jax import cli, comparison

OPTIONS = [
    "--gin_file=gin/generate.gin",
    f"--gin.TARGET_CHECKPOINT='{mini_pair.TARGET}'",
    f"--gin.DRAFT_CHECKPOINT='{mini_pair.DRAFT}'",
    "--gin.VOCABULARY='bytes'",
    "--gin.MAX_DECODE_LENGTH=32",
    "--gin.MAX_INPUT_LENGTH=32",
    "--gin.BATCH_SIZE=4",
]


@pytest.fixture
def specdec(capsys, monkeypatch, tmp_path):
    """Runs `specdec generate` in an empty directory: (exit status, lines of stdout, lines of stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, stdin="", terminal=False, command="generate"):
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        monkeypatch.setattr("sys.stdin.isatty", lambda: terminal)
        status = cli.main([command, *arguments])
        captured = capsys.readouterr()
        # On a busy machine reading takes long enough for a progress bar.
        errors = [line for line in captured.err.splitlines() if not line.startswith("Reading checkpoint_")]
        return status, captured.out.splitlines(), errors

    return run


def test_one_line_per_input(specdec):
    assert specdec(*OPTIONS, "blue", "sun river") == (0, ["BLUE", "SUN RIVER"], [])


def test_inputs_from_stdin_and_flags_in_any_order(specdec):
    assert specdec(*OPTIONS, stdin="blue\nwest green\n")[:2] == (0, ["BLUE", "WEST WEST GREEN"])
    assert specdec("blue", *OPTIONS, "sun river", "--gin.SEED=3")[1] == ["BLUE", "SUN RIVER"]
    assert specdec(*OPTIONS, "--", "blue")[1] == ["BLUE"]


def test_json_is_what_t5x_computed(specdec):
    expected = mini_pair.greedy_outputs()
    texts = [e["inputs"]["inputs_pretokenized"] for e in expected]
    status, lines, errors = specdec(*OPTIONS, "--json", *texts)
    assert (status, errors) == (0, [])
    for line, text, wanted in zip(lines, texts, expected, strict=True):
        found = json.loads(line)
        assert found["input"] == text and found["text"] == wanted["prediction"]
        assert found["tokens"] == wanted["prediction_tokens"]
        assert found["length"] == len(found["tokens"]) == len(found["scores"])
        assert sum(found["scores"]) == pytest.approx(wanted["aux"]["scores"], abs=2e-4)
        assert sum(found["accept_counts"]) == found["num_target_calls"] < found["length"]
        assert len(found["accept_counts"]) == 4 + 1
        assert 0 < found["alpha"] <= 1 and 0 < found["seconds"] < 5
        assert found["finish_reason"] == "eos"


def test_trace(specdec):
    status, lines, errors = specdec(*OPTIONS, "--trace", "blue", "west green")
    assert (status, errors) == (0, [])
    assert lines[0].split() == ["accepted", "[-rejected]", "[+the", "target's", "own]"]
    assert lines[1:5] == [
        "blue",
        "  1 | B L U E [+</s>]",
        "    tokens 5, target calls 1: 5.00 tokens per target call, alpha 1.00",
        "BLUE",
    ]
    assert lines[5] == "west green" and lines[-1] == "WEST WEST GREEN"
    assert lines[6].startswith("  1 | W E S T")


def test_compare(specdec, monkeypatch):
    monkeypatch.setattr(cli, "COMPARE_REPEATS", 1)
    monkeypatch.setenv("COLUMNS", "80")
    status, lines, _ = specdec(*OPTIONS, "--compare", "blue", "west green")
    assert status == 0
    assert lines[:2] == ["BLUE", "WEST WEST GREEN"] and lines[2].strip() == "temperature 0"
    figures = lines[-2].split()
    assert figures[0] == "1-2" and figures[1] == "21" and figures[-1] == "yes"
    assert float(figures[3]) == pytest.approx(21 / int(figures[2]), abs=0.01)


def test_slower_than_plain_decoding_is_said(specdec, monkeypatch):
    slow = comparison.Summary(tokens=2, target_calls=2, plain_speed=2.0, speed=1.0, alpha=0.0)
    monkeypatch.setattr(cli, "COMPARE_REPEATS", 1)
    monkeypatch.setattr(comparison, "summarize", lambda _: slow)
    _, _, errors = specdec(*OPTIONS, "--compare", "blue")
    assert errors == [
        "warning: speculation was slower than plain decoding here; a smaller GAMMA or a smaller draft may help."
    ]


def test_an_output_stays_on_one_line():
    assert cli._line("a\nb\r\nc") == "a\\nb\\nc"


WRONG = {
    "unknown command": (["x"], "argument command: invalid choice: 'translate'"),
    "unknown flag": ([*OPTIONS, "--bogus", "x"], "unrecognized arguments: --bogus"),
    "abbreviated flag": ([*OPTIONS, "--comp", "x"], "unrecognized arguments: --comp"),
    "two modes": ([*OPTIONS, "--json", "--trace", "x"], "argument --trace: not allowed with argument --json"),
    "no gin file": (["x"], "no gin file is given; give one, such as --gin_file=configs/demo_ende.gin"),
    "missing gin file": (["--gin_file=no.gin", "x"], "--gin_file=no.gin: Unable to open file: no.gin. Searched"),
    "missing include": (["--gin_file=include.gin", "x"], "Unable to open file: nowhere.gin"),
    "gin syntax": (["--gin_file=syntax.gin", "x"], "--gin_file=syntax.gin: Couldn't parse statement"),
    "not text": (["--gin_file=binary.gin", "x"], "--gin_file=binary.gin: 'utf-8' codec can't decode"),
    "no value": ([*OPTIONS, "--gin.GAMMA", "x"], "--gin.GAMMA has no value; write --gin.NAME=value."),
    "no quotes": ([*OPTIONS, "--gin.TASK_PREFIX=a: ", "x"], "A string needs quotes: --gin.TASK_PREFIX=\"'text'\""),
    "unknown macro": (
        [*OPTIONS, "--gin.GAMA=3", "x"],
        "nothing uses the macro GAMA (did you mean GAMMA?); macros are ADAPT",
    ),
    "unset macro": ([*OPTIONS, "--gin.GAMMA=%FOO", "x"], "the macro FOO has no value; give --gin.FOO=value."),
    "unknown parameter": ([*OPTIONS, "--gin.generate.foo=3", "x"], "'generate' doesn't have a parameter named 'foo'"),
    "unknown configurable": ([*OPTIONS, "--gin.foo.bar=3", "x"], "No configurable matching 'foo'"),
    "unknown reference": ([*OPTIONS, "--gin.TARGET_CONFIG=@foo()", "x"], "No configurable matching reference '@foo()'"),
    "unsized config": ([*OPTIONS, "--gin.TARGET_CONFIG=@T5Config()", "x"], "'vocab_size'"),
    "required macro": (
        ["--gin_file=configs/generate.gin", "x"],
        "the macro TARGET_CHECKPOINT is required; give --gin.TARGET_CHECKPOINT=value. Not given either: "
        "DRAFT_CHECKPOINT, VOCABULARY.",
    ),
    "gamma 0": ([*OPTIONS, "--gin.GAMMA=0", "x"], "GAMMA is 0; it must be 1 or more."),
    "gamma text": ([*OPTIONS, "--gin.GAMMA='4'", "x"], "GAMMA is '4'; it must be of type int."),
    "gamma true": ([*OPTIONS, "--gin.GAMMA=True", "x"], "GAMMA is True; it must be of type int."),
    "top_p text": ([*OPTIONS, "--gin.TOP_P='all'", "x"], "TOP_P is 'all'; it must be of type float."),
    "ids text": ([*OPTIONS, "--gin.FORBIDDEN_IDS='7'", "x"], "FORBIDDEN_IDS is '7'; it must be of type tuple."),
    "a large number": ([*OPTIONS, f"--gin.TEMPERATURE={10**400}", "x"], "TEMPERATURE is inf; it must be a finite"),
    "not UTF-8": ([*OPTIONS, "a\udcff"], "input 1 is not UTF-8"),
    "ids of text": ([*OPTIONS, "--gin.FORBIDDEN_IDS=('a',)", "x"], "FORBIDDEN_IDS is ('a',); it must hold ids"),
    "rule": ([*OPTIONS, "--gin.RULE='x'", "x"], "RULE is 'x'; it must be one of 'token', 'block', 'coupled'"),
    "lenience": ([*OPTIONS, "--gin.LENIENCE=0", "x"], "LENIENCE is 0.0; it must be above 0 and at most 1"),
    "a class": ([*OPTIONS, "--gin.TARGET_CONFIG=@T5Config", "x"], "it must be of type T5Config or None."),
    "temperature": ([*OPTIONS, "--gin.TEMPERATURE=-1", "x"], "TEMPERATURE is -1.0; it must be a finite number"),
    "mesh": ([*OPTIONS, "--gin.MESH=(2, 4)", "x"], "MESH is (2, 4), which takes 8 devices, and there are 1; the two"),
    "half a mesh": ([*OPTIONS, "--gin.MESH=(2,)", "x"], "MESH is (2,); it must be two numbers of devices"),
    "mesh and batch": ([*OPTIONS, "--gin.MESH=(3, 1)", "x"], "BATCH_SIZE is 4; it must be a multiple of 3, the"),
    "dtype": ([*OPTIONS, "--gin.DTYPE='float16'", "x"], "DTYPE is 'float16'; it must be 'float32', 'bfloat16'"),
    "no input": (OPTIONS, "there is no input; give at least one text."),
    "empty text": ([*OPTIONS, "a", ""], "input 2 is empty; every input must hold text, so leave out empty lines."),
    "long text": ([*OPTIONS, "a" * 32], "MAX_INPUT_LENGTH is 32; input 1 has 33 tokens, its task prefix and end"),
    "no vocabulary": ([*OPTIONS, "--gin.VOCABULARY='/no.model'", "x"], "cannot read vocabulary '/no.model'"),
    "no checkpoint": ([*OPTIONS, "--gin.TARGET_CHECKPOINT='/no/where'", "x"], "/no/where: no such directory"),
    "no demo part": ([*OPTIONS, "--gin.TARGET_CHECKPOINT='demo:x'", "x"], "'demo:x' is not in"),
    "extra ids": ([*OPTIONS, "--gin.EXTRA_IDS=200", "x"], "the vocabulary has 459 ids and the model"),
    "other sizes": (
        [*OPTIONS, "--gin_file=gin/t5_1_1_small.gin", "--gin.TARGET_CONFIG=@t5_1_1_small/T5Config()", "x"],
        "parameters differ from those expected: missing decoder/layers_3/",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_are_one_line_and_status_2(specdec, tmp_path, case):
    (tmp_path / "include.gin").write_text("include 'nowhere.gin'\n")
    (tmp_path / "syntax.gin").write_text("GAMMA 3\n")
    (tmp_path / "binary.gin").write_bytes(b"\xff\xfe\x00")
    arguments, message = WRONG[case]
    command = "translate" if case == "unknown command" else "generate"
    status, lines, errors = specdec(*arguments, command=command)
    assert status == 2 and lines == [] and len(errors) == 1
    assert errors[0].startswith("error: ") and message in errors[0]
    assert "Traceback" not in errors[0] and " at 0x" not in errors[0] and "In call to" not in errors[0]


def test_a_terminal_is_not_waited_for(specdec):
    assert specdec(*OPTIONS, terminal=True)[2] == [
        "error: there is no input; give texts as arguments, or lines on stdin."
    ]


def test_demo_without_its_pair(specdec, tmp_path, monkeypatch):
    monkeypatch.setattr("specdec_jax.packaged.DEMO_DIRECTORY", tmp_path)
    status, _, errors = specdec(command="demo")
    assert status == 2 and len(errors) == 1 and "the demonstration pair is not there" in errors[0]
    assert specdec("--gin.GAMMA=0", command="demo")[2] == ["error: GAMMA is 0; it must be 1 or more."]
    assert "nothing uses the macro TOP_K" in specdec("--gin.TOP_K=1", command="demo")[2][0]


@pytest.mark.parametrize("command", ["generate", "demo"])
def test_help(capsys, command):
    with pytest.raises(SystemExit) as exit_:
        cli.main([command, "--help"])
    assert exit_.value.code == 0
    assert "--gin.NAME=VALUE" in capsys.readouterr().out

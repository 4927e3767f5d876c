"""Every command and example of the README runs."""

import io
import pathlib
import re
import shlex
import subprocess
import sys

import harness_grid_test
import pytest
from t5x_gin_parser import read_command, run, write_stand_ins

from specdec_jax import cli, configuration

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIXTURE = str(ROOT / "tests/fixtures/mini_{}/legacy_f32/checkpoint_1500")


def commands() -> list[str]:
    """The indented lines of the README, continuation lines joined."""
    text = README.replace("\\\n", " ")
    return [line.strip() for line in re.findall(r"(?m)^    (\S.*)$", re.sub(r"(?s)```.*?```", "", text))]


TABLES = [line for line in commands() if line.startswith("specdec table2 ")]
TPU = [line for line in commands() if line.startswith("specdec tpu ")]
TUNE = [line for line in commands() if line.startswith("specdec tune ")]
SPECDEC = [line for line in commands() if line.startswith("specdec ") and line not in TABLES + TPU + TUNE]
T5X = [line for line in commands() if line.startswith("python -m t5x")]
MAKE = [line for line in commands() if line.startswith("make ")]


def test_every_command_is_of_a_kind_that_is_tested():
    assert len(SPECDEC) >= 5 and MAKE == ["make demo", "make test"]
    assert sorted(SPECDEC + MAKE + T5X + TABLES + TPU + TUNE) == sorted(commands())
    assert len(T5X) == len(TPU) == len(TUNE) == 1  # drafter_commands_test tunes a pair that compiles fast
    assert [f"specdec table2 {harness_grid_test.RUN}"] == TABLES  # run there, with little to measure
    assert len(README.splitlines()) < 150


@pytest.mark.parametrize("line", SPECDEC)
def test_command(line, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    line, _, redirected = line.partition(" < ")
    if redirected:
        monkeypatch.setattr(sys, "stdin", io.StringIO("blue\n"))
    # Buckets cannot be reached from a test: the same command on checkpoints that are there.
    line = re.sub(r"'gs://[^']*xxl[^']*'", repr(FIXTURE.format("target")), line)
    line = re.sub(r"'gs://[^']*small[^']*'", repr(FIXTURE.format("draft")), line).replace("'spiece.model'", "'bytes'")
    few = ["--sequences=128", "--laws=1"] if line.startswith("specdec verify") else []  # instead of thousands
    assert cli.main([*shlex.split(line)[1:], "--gin.MAX_DECODE_LENGTH=16", *few]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip()
    if redirected:
        assert captured.out.strip() == "BLUE"


@pytest.mark.parametrize("line", TPU)
def test_flags_of_tpu_are_known(line):  # the compiler takes minutes for it; tpu_test runs it on something small
    bindings = [flag.removeprefix("--gin.") for flag in shlex.split(line)[2:]]
    options = configuration.configure(configuration.tpu, ["configs/tpu.gin"], bindings)
    assert (options.target_size, options.draft_size, options.gamma, options.topology) == ("xxl", "small", 7, "v4:1x1x1")


OTHERS = ["make test-slow", "make tpu-report", "make lint types", "make format", "make test-t5x"]


@pytest.mark.parametrize("line", [*MAKE, *OTHERS])
def test_make_knows_the_target(line):
    subprocess.run([*line.split(), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("line", T5X)
def test_launch_of_t5x_parses(line, tmp_path):
    (found,) = run([read_command(shlex.split(line)[1:])], write_stand_ins(tmp_path))
    assert "error" not in found and found["macros"]["DRAFT_CHECKPOINT_PATH"] in line


def test_python_example(monkeypatch, capsys):
    (example,) = re.findall(r"(?s)```python\n(.*?)```", README)
    monkeypatch.chdir(ROOT)
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("b'SUN RIVER'\nb'FISH BLUE'\n")


def test_files_that_the_readme_names_exist():
    for name in re.findall(r"`((?:specdec_jax|configs|gin)/[\w./]*)`", README) + re.findall(r"gin/\w+\.gin", README):
        assert (ROOT / name).exists(), name

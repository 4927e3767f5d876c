import dataclasses
import io
import json

import jax
import mini_pair
import numpy as np
import pytest
import tiny
from rich.console import Console

from specdec_jax import demo, packaged
from specdec_jax.checkpoints import t5x
from specdec_jax.settings import Settings
from specdec_jax.vocabularies import load_vocabulary, train_sentencepiece

OPTIONS = demo.Options(gamma=1, max_decode_length=6, max_input_length=32, seed=0, num_examples=1, num_repeats=1)


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A demonstration pair of tiny random models: what they write is nonsense."""
    rng = np.random.default_rng(0)
    for name in ("target", "draft_small"):
        shapes = tiny.model(vocab=384).param_shapes()
        weights = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)
        t5x.save_checkpoint(tmp_path / name, weights, step=1500)
    prefixes = [prefix + "the house and the tree" for prefix in demo.TASK_PREFIXES.values()]
    sentences = (mini_pair.FIXTURES / "README.md").read_text().splitlines()
    train_sentencepiece([*sentences, *prefixes * 20], tmp_path / "vocabulary.model", num_pieces=360)
    inputs = ["the house", "the " * 40, "the moon", "the tree"]
    examples = [dict(task=task, input=text, reference=text) for text in inputs for task in demo.TASK_PREFIXES]
    (tmp_path / "examples.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))
    monkeypatch.setattr(packaged, "DEMO_DIRECTORY", tmp_path)
    return tmp_path


def test_examples_are_short_enough_and_carry_their_prefix(stand_in):
    vocabulary = load_vocabulary(packaged.resolve("demo:vocabulary"))
    examples = demo.read_examples(vocabulary, Settings(gamma=1, max_input_length=32), per_task=2)
    assert list(examples) == ["ende", "summarize", "restore"]
    assert examples["restore"] == ["restore: the house", "restore: the moon"]
    with pytest.raises(ValueError, match="^max_input_length is 3; .* has no example of 'ende' that short"):
        demo.read_examples(vocabulary, Settings(gamma=1, max_input_length=3), per_task=2)


def test_run(stand_in, monkeypatch):
    monkeypatch.setattr(demo, "TEMPERATURES", (1.0,))  # each compiles programs of its own
    console = Console(file=io.StringIO(), width=80)
    rows = demo.run(OPTIONS, console)
    text = console.file.getvalue()
    assert "translate English to German: the house" in text  # the trace's input
    assert "  1 |" in text and "target calls" in text
    assert [(row.task, row.draft, row.temperature) for row in rows] == [
        (task, "draft_small", 1.0) for task in ("ende", "summarize", "restore")
    ]
    for row in rows:
        (comparison,) = row.comparisons
        assert comparison.speculative.tokens.shape == (1, 6)
        assert comparison.differences is None
        assert row.costs.c > 0 and row.costs.v > 0 and row.speedup > 0
    for part in ("gamma 1", "alpha", "speed", "law", "summarize", "float32 on cpu"):
        assert part in text
    assert "…" not in text.split("speculative decoding")[1]


def test_speedup_is_the_median_over_examples():
    from comparison_test import made

    ratios = [made([4], [2], [2], [1.0], seconds, 1.0) for seconds in (1.0, 5.0, 2.0)]
    assert demo.Row("ende", "draft_small", 0.0, demo.Costs(0.1, 1.0), ratios).speedup == 2.0


def test_what_is_missing_is_named(stand_in):
    with pytest.raises(ValueError, match="^num_examples is 0"):
        dataclasses.replace(OPTIONS, num_examples=0)
    (stand_in / "examples.jsonl").unlink()
    with pytest.raises(ValueError, match=r"cannot read .*examples\.jsonl \(No such file"):
        demo.run(OPTIONS, Console(quiet=True))
    (stand_in / "vocabulary.model").unlink()
    with pytest.raises(ValueError, match="'demo:vocabulary' is not in"):
        demo.run(OPTIONS, Console(quiet=True))

"""Launches of t5x on the mini pair, as a user would: this project's gin files, and a few of the user's own."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

from mini_pair import FIXTURES, greedy_outputs

ROOT = pathlib.Path(__file__).parent.parent
FEATURES = "{'inputs': 32, 'targets': 32}"

_TASKS = """
import json, pathlib, seqio, tensorflow as tf
from specdec_jax import t5x_adapter

def exact(targets, predictions):
    return {"exact": sum(t == p for t, p in zip(targets, predictions)) / len(targets)}

def examples(split, shuffle_files=False, seed=None):
    return tf.data.Dataset.from_tensor_slices(json.loads(pathlib.Path(__file__).with_name("examples.json").read_text()))

vocabulary = seqio.ByteVocabulary()
seqio.TaskRegistry.add(
    "mini_upper",
    source=seqio.FunctionDataSource(examples, splits=["train", "validation", "test"]),
    preprocessors=[seqio.preprocessors.tokenize_and_append_eos],
    output_features={"inputs": seqio.Feature(vocabulary), "targets": seqio.Feature(vocabulary)},
    metric_fns=[exact, t5x_adapter.speculation],
)
"""

_SIZES = """
  vocab_size = 384
  head_dim = 16
  mlp_activations = ('gelu', 'linear')
  logits_via_embedding = False
"""

_MODEL = f"""
from __gin__ import dynamic_registration
import mini_tasks
import seqio
from t5x import adafactor
from t5x import models
from t5x.examples.t5 import network

include 't5x/examples/t5/t5_1_1/tiny.gin'

VOCABULARY = @seqio.ByteVocabulary()
network.T5Config:
  emb_dim = 64
  num_heads = 4
  num_encoder_layers = 3
  num_decoder_layers = 3
  mlp_dim = 128
  dtype = %DTYPE
{_SIZES}
DTYPE = 'float32'
"""

_DRAFT = f"""
from __gin__ import dynamic_registration
from t5x.examples.t5 import network

include 'gin/t5x/speculative.gin'
DRAFT_DTYPE = 'float32'
draft/network.T5Config:
  emb_dim = 32
  num_heads = 2
  num_encoder_layers = 1
  num_decoder_layers = 1
  mlp_dim = 64
{_SIZES}
"""


def checkpoint(directory: pathlib.Path, which: str, kind: str = "legacy_f32") -> str:
    """A path of the mini pair's checkpoints: mini_target or mini_draft."""
    return str(directory / which / kind / "checkpoint_1500")


def prepare(directory: pathlib.Path) -> None:
    """Writes the user's own files; copies the checkpoints, since Orbax tidies up where it reads."""
    for which in ("mini_target", "mini_draft"):
        shutil.copytree(FIXTURES / which, directory / which)
    inputs = [line["inputs"] for line in greedy_outputs()]
    columns = {name: [row[f"{name}_pretokenized"] for row in inputs] for name in ("inputs", "targets")}
    (directory / "examples.json").write_text(json.dumps(columns))
    (directory / "mini_tasks.py").write_text(_TASKS)
    (directory / "mini_model.gin").write_text(_MODEL)
    (directory / "mini_draft.gin").write_text(_DRAFT)


def launch(
    program: str, directory: pathlib.Path, run: str, *bindings: str, draft: str | None = None, devices: int = 1
) -> str:
    """Runs one of t5x's programs; returns its log.

    Args:
      program: "infer", "eval" or "train".
      directory: where `prepare` wrote.
      run: a file in configs/t5x.
      *bindings: gin bindings.
      draft: the draft's checkpoint; None for no draft.
      devices: simulated devices.
    """
    files = ["mini_model.gin", f"configs/t5x/{run}"] + ["mini_draft.gin"] * (draft is not None)
    bindings += (f"DRAFT_CHECKPOINT_PATH={draft!r}",) * (draft is not None)
    command = [sys.executable, "-m", f"t5x.{program}", f"--gin_search_paths={directory},{ROOT}"]
    command += [f"--gin_file={file}" for file in files] + [f"--gin.{binding}" for binding in bindings]
    # Not the clone's root: with it, gin takes configs/ for a Python package and fails.
    path = os.pathsep.join([str(directory), *(place for place in sys.path if place not in ("", str(ROOT)))])
    flags = f"--xla_backend_optimization_level=0 --xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "PYTHONPATH": path, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def rows(output: pathlib.Path) -> list[dict]:
    """What t5x.infer wrote, each input once, in order."""
    (file,) = output.glob("*.jsonl-00000-of-00001")
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["inputs"]["inputs_pretokenized"] for row in found] == [
        row["inputs"]["inputs_pretokenized"] for row in greedy_outputs()
    ]
    return found

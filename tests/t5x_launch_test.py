"""Real launches of t5x on the mini pair; skipped where t5x cannot be imported."""

import json
import pathlib

import numpy as np
import pytest

pytest.importorskip("t5x", reason="t5x is not installed; it is not on PyPI, see scripts/t5x/setup_tpu_vm.sh")

from mini_pair import TARGET, greedy_outputs
from t5x_launch import FEATURES, checkpoint, launch, prepare, rows
from t5x_models import module, with_optimizer

from specdec_jax.checkpoints.t5x import load_params

pytestmark = [pytest.mark.t5x, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("t5x")
    prepare(directory)
    return directory


def infer(directory, name, *bindings, run="infer.gin", target="legacy_f32", **kwargs):
    task = (f"TASK_FEATURE_LENGTHS={FEATURES}", "OUTPUT_IDS=True", "BATCH_SIZE=4", "CHECKPOINT_PERIOD=2")
    if run == "infer.gin":
        task += ("MIXTURE_OR_TASK_NAME='mini_upper'", "MIXTURE_OR_TASK_MODULE='mini_tasks'")
    own = (
        f"CHECKPOINT_PATH={checkpoint(directory, 'mini_target', target)!r}",
        f"INFER_OUTPUT_DIR='{directory / name}'",
    )
    dtype = ("utils.RestoreCheckpointConfig.dtype='float32'", "decoding.temperature_sample.rescale_log_probs=False")
    log = launch("infer", directory, run, *task, *own, *dtype, *bindings, **kwargs)
    return rows(directory / name), log


def same_as_t5x(found):
    expected = greedy_outputs()
    assert [row["prediction"] for row in found] == [row["prediction"] for row in expected]
    assert [row["prediction_tokens"] for row in found] == [row["prediction_tokens"] for row in expected]
    for row, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(row["aux"]["scores"], theirs["aux"]["scores"], atol=2e-4)
        counts = row["aux"]
        assert counts["num_tokens"] == len(row["prediction_tokens"])
        assert 0 <= counts["accepted"] <= counts["trials"] <= counts["drafted"] and 0 <= counts["alpha"] <= 1 + 1e-5
        assert counts["num_tokens"] - counts["accepted"] <= counts["num_target_calls"] < counts["num_tokens"]


def test_without_a_draft_the_files_decode_as_t5x_does(directory):
    found, _ = infer(directory, "plain")
    assert [row["prediction_tokens"] for row in found] == [row["prediction_tokens"] for row in greedy_outputs()]


@pytest.mark.parametrize(
    ("devices", "target", "draft"),
    [
        (1, "legacy_f32", "legacy_f32"),
        (2, "orbax_f32", "legacy_f32"),
        (4, "legacy_f32", "orbax_f32"),  # on CPUs t5x's model axis has all devices: 4 do not divide the draft's 2 heads
    ],
)
def test_greedy_output_is_t5xs_own(directory, devices, target, draft):
    draft = checkpoint(directory, "mini_draft", draft)
    found, log = infer(directory, f"greedy_{devices}", target=target, draft=draft, devices=devices)
    same_as_t5x(found)
    assert ("whole on every device: heads is 2, not a multiple of the 4 devices" in log) == (devices == 4)


def test_inference_from_a_text_file(directory):
    (directory / "lines.txt").write_text(
        "".join(row["inputs"]["inputs_pretokenized"] + "\n" for row in greedy_outputs())
    )
    bindings = (f"TEXT_FILE='{directory / 'lines.txt'}'",)
    found, _ = infer(directory, "text", *bindings, run="infer_text.gin", draft=checkpoint(directory, "mini_draft"))
    same_as_t5x(found)


def test_scores_are_the_targets_own(directory):
    mode = ("MODE='score'",)
    plain, _ = infer(directory, "score_plain", *mode)
    found, _ = infer(directory, "score", *mode, draft=checkpoint(directory, "mini_draft"))
    assert [row["score"] for row in found] == [row["score"] for row in plain]


def test_evaluation_has_metrics_over_the_guesses(directory):
    bindings = (
        "MIXTURE_OR_TASK_NAME='mini_upper'",
        "MIXTURE_OR_TASK_MODULE='mini_tasks'",
        "BATCH_SIZE=4",
        f"CHECKPOINT_PATH={checkpoint(directory, 'mini_target')!r}",
        f"EVAL_OUTPUT_DIR='{directory / 'eval'}'",
        "utils.RestoreCheckpointConfig.dtype='float32'",
    )
    launch("eval", directory, "eval.gin", *bindings, draft=checkpoint(directory, "mini_draft"))
    found = json.loads((directory / "eval" / "inference_eval" / "mini_upper-metrics.jsonl").read_text())
    right = [row["prediction"] == row["inputs"]["targets_pretokenized"] for row in greedy_outputs()]
    assert found["exact"] == pytest.approx(np.mean(right))
    assert 0.9 < found["speculation/alpha"] <= 1 and 0.8 < found["speculation/accepted_fraction"] <= 1
    assert 3.5 < found["speculation/tokens_per_target_call"] <= 5


def test_a_few_steps_of_fine_tuning_and_a_launch_from_them(directory):
    tuned = with_optimizer(directory / "start", module(dtype="float32"), load_params(TARGET, progress=False), step=1500)
    bindings = (
        f"MODEL_DIR='{directory / 'tuned'}'",
        "MIXTURE_OR_TASK_NAME='mini_upper'",
        "MIXTURE_OR_TASK_MODULE='mini_tasks'",
        f"TASK_FEATURE_LENGTHS={FEATURES}",
        f"PRETRAINED_CHECKPOINT_PATH={tuned!r}",
        "TRAIN_STEPS=1503",
        "EVAL_PERIOD=3",
        "EVAL_STEPS=1",
        "BATCH_SIZE=2",
        "utils.SaveCheckpointConfig.period=3",
        "train/utils.DatasetConfig.pack=False",
        "train_eval/utils.DatasetConfig.pack=False",
    )
    launch("train", directory, "finetune_ende.gin", *bindings)
    bindings = (f"CHECKPOINT_PATH='{directory / 'tuned' / 'checkpoint_1503'}'",)
    found, _ = infer(directory, "after", *bindings, draft=checkpoint(directory, "mini_draft"))
    assert [row["prediction"] for row in found] == [row["prediction"] for row in greedy_outputs()]

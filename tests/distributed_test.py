"""Two processes decode a file together: every row once, in order, as one process does."""

import json
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from specdec_jax import cli, distributed
from specdec_jax.checkpoints import t5x
from specdec_jax.models.t5 import T5, T5Config

LINES = ["blue", "west green", "sun", "blue", "fish one"]  # not a multiple of the batch size


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """Two random models that, at temperature 1, write anything."""
    sizes = dict(vocab_size=264, emb_dim=8, num_heads=2, head_dim=4, mlp_dim=16)
    model = T5(T5Config(**sizes, num_encoder_layers=1, num_decoder_layers=1))
    rng, folder, paths = np.random.default_rng(0), tmp_path_factory.mktemp("pair"), {}
    for name in ("TARGET", "DRAFT"):
        weights = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), model.param_shapes())
        paths[name] = t5x.save_checkpoint(folder / name, weights, step=0)
    return [
        "--gin_file=gin/generate.gin",
        *(f"--gin.{name}_CHECKPOINT='{path}'" for name, path in paths.items()),
        "--gin.VOCABULARY='bytes'",
        "--gin.MAX_DECODE_LENGTH=8",
        "--gin.MAX_INPUT_LENGTH=32",
        "--gin.BATCH_SIZE=2",
        "--gin.TEMPERATURE=1.0",
        "--gin.GAMMA=2",
        "--json",
    ]


def run_two(options, inputs):
    """(exit status, stdout, stderr) of two processes that were given each its stdin."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environ = {**os.environ, distributed.ADDRESS: address, distributed.COUNT: "2", "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "specdec_jax.cli", "generate", "--distributed", *options],
            env={**environ, distributed.NUMBER: str(number)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        for process, text in zip(
            processes, inputs, strict=True
        ):  # both have to have theirs before either is waited for
            assert process.stdin is not None
            process.stdin.write(text)
            process.stdin.close()
            process.stdin = None
        told = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, told, strict=True)]


def test_every_row_once_in_order_and_as_one_process_has_it(options, capsys, monkeypatch, tmp_path):
    text = "\n".join(LINES) + "\n"
    first, second = run_two(options, [text, text])
    assert first[0] == second[0] == 0, first[2] + second[2]
    assert second[1:] == ("", "") and first[2] == ""
    monkeypatch.chdir(tmp_path)
    alone = []
    for mesh in ([], ["--gin.MESH=(1, 1)"]):
        assert cli.main(["generate", *options, *mesh, *LINES]) == 0
        alone.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
        for row in alone[-1]:
            del row["seconds"]
    assert alone[0] == alone[1]
    together = [json.loads(line) for line in first[1].splitlines()]
    assert [row["input"] for row in together] == LINES
    for row, wanted in zip(together, alone[0], strict=True):
        assert row["tokens"] == wanted["tokens"] and row["accept_counts"] == wanted["accept_counts"]
        np.testing.assert_allclose(row["scores"], wanted["scores"], atol=1e-4)


@pytest.mark.slow
def test_other_inputs_are_refused(options):
    for status, printed, error in run_two(options, ["blue\n", "green\n"]):
        assert status == 2 and printed == ""
        assert error == (
            "error: process 1 has other inputs or settings than process 0; give every process the same, and the same "
            "file on stdin.\n"
        )


def test_what_the_environment_has_to_say(monkeypatch):
    told = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args: told.append(args))
    distributed.initialize({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"})
    distributed.initialize({})  # a TPU pod
    assert told == [("a:1", 2, 1), (None, None, None)]
    with pytest.raises(ValueError, match="^JAX_PROCESS_ID is 'x' in the environment; it must be a whole number"):
        distributed.initialize({"JAX_PROCESS_ID": "x"})
    for address in ("host", ":1234", "host:99999"):
        with pytest.raises(ValueError, match=f"^JAX_COORDINATOR_ADDRESS is '{address}' in the .* must be host:port"):
            distributed.initialize({"JAX_COORDINATOR_ADDRESS": address})
    with pytest.raises(ValueError, match="^JAX_PROCESS_ID is 5 and JAX_NUM_PROCESSES is 2; the number must be below"):
        distributed.initialize({"JAX_PROCESS_ID": "5", "JAX_NUM_PROCESSES": "2"})


def test_what_the_environment_lacks_is_named(monkeypatch):
    def lost(*_):
        raise ValueError("Number of processes must be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", lost)
    with pytest.raises(ValueError, match="cannot start with .*; set JAX_NUM_PROCESSES, JAX_PROCESS_ID in the"):
        distributed.initialize({"JAX_COORDINATOR_ADDRESS": "a:1"})


def test_one_process_without_the_flag_is_left_alone():
    with distributed.together(False):
        pass

"""Tests of reading arrays: damage, and the memory it takes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from t5x_checkpoints import (
    DRAFT,
    DRAFT_BF16,
    DRAFT_ORBAX,
    FIXTURES,
    QUERY,
    QUERY_DIRECTORY,
    copy,
    edit_index,
    message,
)

from specdec_jax.checkpoints import t5x, t5x_arrays
from specdec_jax.checkpoints.t5x import load_params, save_checkpoint


@pytest.mark.parametrize("where", ["index", "array", "inlined"])
def test_uint16_is_refused(tmp_path, where):
    checkpoint = copy(tmp_path, DRAFT_BF16)

    def edit(index):
        attention = index["optimizer"]["target"]["decoder"]["layers_0"]["self_attention"]
        if where == "index":
            attention["query"]["kernel"]["dtype"] = "uint16"
        else:
            attention["query"]["kernel"] = np.zeros((32, 32), np.uint16)

    if where == "array":
        zarray = checkpoint / QUERY_DIRECTORY / ".zarray"
        zarray.write_text(zarray.read_text().replace("bfloat16", "<u2"))
    else:
        edit_index(checkpoint, edit)
    text = message(checkpoint)
    assert f"parameter {QUERY} is uint16: version 2" in text


def test_missing_array(tmp_path):
    checkpoint = copy(tmp_path)
    shutil.rmtree(checkpoint / QUERY_DIRECTORY)
    text = message(checkpoint)
    assert text.startswith(f"{checkpoint}/{QUERY_DIRECTORY}: parameter {QUERY}: the array is missing")


def test_damaged_array_metadata(tmp_path):
    checkpoint = copy(tmp_path)
    (checkpoint / QUERY_DIRECTORY / ".zarray").write_text("{")
    assert f"parameter {QUERY}: the array cannot be opened" in message(checkpoint)


def test_array_of_another_shape_than_the_index_says(tmp_path):
    checkpoint = copy(tmp_path)
    zarray = checkpoint / QUERY_DIRECTORY / ".zarray"
    zarray.write_text(zarray.read_text().replace('"shape":[32,32]', '"shape":[32,16]'))
    assert f"parameter {QUERY} has shape [32, 16], where the index says [32, 32]" in message(checkpoint)


@pytest.mark.parametrize("source", [DRAFT, DRAFT_BF16])
def test_missing_chunk(tmp_path, source):
    checkpoint = copy(tmp_path, source)
    (checkpoint / QUERY_DIRECTORY / "0.0").unlink()
    assert f"{QUERY_DIRECTORY}: parameter {QUERY}: chunk 0.0 is missing" in message(checkpoint)


def test_missing_chunks_of_many(tmp_path, monkeypatch):
    monkeypatch.setattr(t5x, "_CHUNK_BYTES", 64)
    path = save_checkpoint(tmp_path, {"a": {"b": np.ones((8, 8), np.float32)}}, step=1)
    for key in ["1.0", "1.1"]:
        (Path(path) / "target.a.b" / key).unlink()
    assert "parameter a/b: chunk 1.0 and 1 more is missing" in message(path)


def test_chunks_left_out_for_a_declared_fill_value(tmp_path):
    path = Path(save_checkpoint(tmp_path, {"a": np.ones(4, np.float32)}, step=1))
    zarray = path / "target.a/.zarray"
    zarray.write_text(zarray.read_text().replace('"fill_value":null', '"fill_value":2.0'))
    (path / "target.a/0").unlink()
    np.testing.assert_array_equal(load_params(path)["a"], np.full(4, 2.0, np.float32))


@pytest.mark.parametrize("keep", [0, 5, 0.5, 0.95])
def test_truncated_chunk(tmp_path, keep):
    checkpoint = copy(tmp_path)
    chunk = checkpoint / QUERY_DIRECTORY / "0.0"
    size = chunk.stat().st_size
    os.truncate(chunk, keep if isinstance(keep, int) else int(size * keep))
    assert f"{QUERY_DIRECTORY}: parameter {QUERY}: a chunk cannot be read" in message(checkpoint)


def test_damaged_chunk(tmp_path):
    checkpoint = copy(tmp_path)
    chunk = checkpoint / QUERY_DIRECTORY / "0.0"
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 0x10
    chunk.write_bytes(content)
    assert f"parameter {QUERY}: a chunk cannot be read" in message(checkpoint)


def largest_ocdbt_file(checkpoint):
    """The file of an OCDBT store that holds the arrays."""
    return max((checkpoint / "state/ocdbt.process_0/d").iterdir(), key=lambda file: file.stat().st_size)


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: os.truncate(file, file.stat().st_size // 2)])
def test_damaged_ocdbt_data(tmp_path, damage):
    checkpoint = copy(tmp_path, DRAFT_ORBAX)
    damage(largest_ocdbt_file(checkpoint))
    text = message(checkpoint)
    assert "parameter decoder/layers_0/" in text
    assert "cannot be" in text


def test_array_missing_from_ocdbt(tmp_path):
    checkpoint = copy(tmp_path, DRAFT_ORBAX)
    metadata = (checkpoint / "state/_METADATA").read_text()
    (checkpoint / "state/_METADATA").write_text(metadata.replace('"key": "query"', '"key": "quest"'))
    text = message(checkpoint)
    assert "self_attention/quest/kernel: the array is missing from the OCDBT store" in text.replace(
        "encoder_decoder_attention", "self_attention"
    )


class FakeRequest:
    """What a Window waits for."""


def test_window_bounds_the_bytes_in_flight():
    window = t5x_arrays.Window(100)
    in_flight, peak, order = 0, 0, []
    for number, nbytes in enumerate([40, 40, 40, 10, 300, 60, 60]):

        def finish(future, number=number, nbytes=nbytes):
            nonlocal in_flight
            in_flight -= nbytes
            order.append(number)

        window.make_room(nbytes)
        in_flight += nbytes
        if nbytes != 300:
            peak = max(peak, in_flight)
        else:
            assert in_flight == 300  # let in alone
        window.add(FakeRequest(), nbytes, finish)
    window.finish()
    assert in_flight == 0
    assert order == list(range(7))
    assert 80 <= peak <= 100


MEASURE = """
import sys
from pathlib import Path
import jax
from specdec_jax.checkpoints import t5x_arrays
from specdec_jax.checkpoints.t5x import load_params

def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))

t5x_arrays.MAX_BYTES_IN_FLIGHT = 4 * 2**20
load_params(sys.argv[2])  # what loading needs once: threads, caches
Path("/proc/self/clear_refs").write_text("5")  # resets the peak
before = memory("VmRSS")
params = load_params(sys.argv[1], dtype="bfloat16")
print(sum(leaf.nbytes for leaf in jax.tree.leaves(params)), memory("VmHWM") - before)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's peak memory")
def test_peak_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(t5x, "_CHUNK_BYTES", 2**20)
    # Repeats within gzip's window, so that it is quick to write.
    array = np.resize(np.random.default_rng(0).standard_normal(1024, np.float32), (2048, 2048))
    path = save_checkpoint(tmp_path, {str(i): array for i in range(6)}, step=0)
    command = [sys.executable, "-c", MEASURE, path, str(DRAFT)]
    environment = os.environ | {"PYTHONPATH": str(FIXTURES.parent.parent)}
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    result, peak = map(int, output.split())
    assert result == 6 * array.nbytes // 2  # 48 MiB
    # 53 MiB; 84 without a bound on the bytes in flight, 144 if cast at the end.
    assert result <= peak <= result + 24 * 2**20

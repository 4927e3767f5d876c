"""The real decoding program as TPU's compiler makes it; libtpu compiles without a TPU. See also hlo_test.py."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from specdec_jax import tpu_topology
from specdec_jax.models.t5_config import T5Config
from specdec_jax.tpu_compiler import Options
from specdec_jax.tpu_topology import find_devices, read_topology

ROOT = pathlib.Path(__file__).parent.parent
TINY = T5Config(
    vocab_size=64, emb_dim=8, num_heads=2, head_dim=4, mlp_dim=16, num_encoder_layers=1, num_decoder_layers=1
)
GUARD = """
import json, jax, jax.numpy as jnp
from specdec_jax import hlo, tpu_compiler
from specdec_jax.models.t5_config import T5Config

sizes = dict(vocab_size=32128, head_dim=64)
small = T5Config(emb_dim=512, num_heads=6, mlp_dim=1024, num_encoder_layers=8, num_decoder_layers=8, **sizes)
tiny = T5Config(emb_dim=128, num_heads=2, mlp_dim=256, num_encoder_layers=1, num_decoder_layers=2, **sizes)
compiler = tpu_compiler.Compiler(
    tpu_compiler.Options(sizes={"small": small, "tiny": tiny}, target_size="small", draft_size="tiny", gamma=4)
)
programs, parse = [], hlo.parse
hlo.parse = lambda text: programs.append(parse(text)) or programs[-1]
target, draft = compiler.model("small", target=True), compiler.model("tiny", target=False)
found = compiler.decoding(target, draft, 4)
program = programs[0]
calls = [
    (i.num_bytes, times)
    for i, times in program.scheduled(program.outer_loop)
    if "logits_dense" in i.op_name and program.kind(i) in (hlo.MATRIX, hlo.VECTOR)
]
weights = sum(2 * x.size for model in (target, draft) for x in jax.tree.leaves(compiler.params(model)))
compiler.resized(batch_size=4).decoding(draft, draft, 4)
batched = programs[-1]
loops = [i.op_name for i in batched.computations[batched.outer_loop] if i.opcode == "while"]
print(json.dumps({
    "argument_bytes": found.argument_bytes, "weights": weights, "copies": found.copies, "calls": calls,
    "batched_loops": loops, "host": found.host_transfers, "seconds": found.seconds, "cycles": found.cycles,
}))
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install '.[tpu]'")
def test_the_speculative_loop_on_a_v4_chip():
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PYTHONPATH")}
    done = subprocess.run(
        [sys.executable, "-c", GUARD],
        cwd=ROOT,
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["batched_loops"]) == 1, "only that of the draft: none goes from row to row"
    assert found["host"] == 0 and found["copies"] == []
    assert found["argument_bytes"] == pytest.approx(found["weights"], rel=0.05)
    assert sum(times for _, times in found["calls"]) == 1 + 4  # of the target, and of the draft
    assert found["cycles"].get("products on the vector unit", 0) < 0.2 * sum(found["cycles"].values())
    assert 1e-4 < found["seconds"] < 1e-2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_size": "huge"}, "target_size is 'huge'; sizes are tiny"),
        ({"gamma": 0}, "gamma is 0; it must be 1 to 100"),
        ({"topology": "v4"}, "topology is 'v4'; give a generation and its chips, such as v4:1x1x1, v5e:1x1"),
        ({"topology": "v9:1x1"}, "topology is 'v9:1x1'"),
        ({"topology": "v4:2x2"}, "topology is 'v4:2x2'"),
        ({"topology": "v4:2x2x1"}, r"mesh is \(1, 1\) and topology v4:2x2x1 has 4 chips"),
        ({"topology": "v4:2x2x1", "mesh": (4, 1)}, "batch_size is 1; it must be a multiple of the mesh's 4"),
        ({"mesh": (-1, -1)}, r"mesh is \(-1, -1\)"),
        ({"mesh": ("a", "b")}, "mesh is"),
        ({"gamma": 10**6}, "gamma is 1000000; it must be 1 to 100"),
        ({"max_decode_length": 10**22}, "max_decode_length is 10000000000000000000000"),
        ({"layouts": "mine"}, "layouts is 'mine'"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"temperature": -1.0}, "temperature is -1.0"),
    ],
)
def test_what_cannot_be_compiled_is_refused(changes, message):
    fields = {"sizes": {"tiny": TINY}, "target_size": "tiny", "draft_size": "tiny"}
    with pytest.raises(ValueError, match=message):
        Options(**fields | changes)


def test_topologies_are_read():
    assert read_topology("v4:2x2x1") == ("v4", (2, 2, 1)) and read_topology("v5e:2x4") == ("v5e", (2, 4))


def test_without_libtpu_it_is_named(monkeypatch):
    def missing(package):
        raise tpu_topology.importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(tpu_topology.importlib.metadata, "version", missing)
    with pytest.raises(ValueError, match=r"libtpu is not installed: pip install 'specdec_jax\[tpu\]'"):
        find_devices("v4:1x1x1")

"""Measures the peak memory of loading a T5X checkpoint.

    python scripts/measure_load_memory.py                # T5 1.1 large: 3.1 GB of float32 read as bfloat16
    python scripts/measure_load_memory.py --size small --dtype float32

Writes a checkpoint of random parameters (3 GB of disk for large, two minutes), loads it in a new process and
deletes it. Exits with 1 if the peak is above the size of the result plus 1 GiB. Linux only.
"""

import argparse
import dataclasses
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from specdec_jax.checkpoints.t5x import load_params, save_checkpoint
from specdec_jax.models.t5 import T5, T5Config

LARGE = T5Config(
    vocab_size=32128,
    emb_dim=1024,
    num_heads=16,
    head_dim=64,
    mlp_dim=2816,
    num_encoder_layers=24,
    num_decoder_layers=24,
)
SMALL = dataclasses.replace(LARGE, emb_dim=512, num_heads=6, mlp_dim=1024, num_encoder_layers=8, num_decoder_layers=8)
SIZES = {"small": SMALL, "large": LARGE}
MIB = 2**20


def memory(field: str) -> int:
    """A field of /proc/self/status in bytes: VmRSS is now, VmHWM the peak.

    Not getrusage's ru_maxrss, which a process inherits from its parent.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def make(directory: str, size: str) -> str:
    """Writes a checkpoint of random float32 parameters, which hardly compress; returns its path."""
    shapes = T5(SIZES[size]).param_shapes()
    largest = max(leaf.size for leaf in jax.tree.leaves(shapes))
    noise = np.random.default_rng(0).standard_normal(largest, np.float32)
    params = jax.tree.map(lambda leaf: noise[: leaf.size].reshape(leaf.shape), shapes)
    return save_checkpoint(directory, params, step=0)


def measure(checkpoint: str, dtype: str) -> bool:
    """Loads the checkpoint and prints what it took; whether that is within the bound."""
    before = memory("VmRSS")
    begin = time.monotonic()
    params = load_params(checkpoint, dtype=dtype)
    seconds = time.monotonic() - begin
    result = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    peak = memory("VmHWM") - before
    print(
        f"result {result / MIB:.0f} MiB, peak {peak / MIB:.0f} MiB above the imports "
        f"(result + {(peak - result) / MIB:.0f} MiB), {seconds:.1f} s"
    )
    return peak <= result + 1024 * MIB


def main() -> int:
    """Makes, measures and cleans up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="large", help="which T5 1.1")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="dtype to load as")
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="where to put the checkpoint meanwhile")
    parser.add_argument("--load", metavar="CHECKPOINT", help="only measure, in this process, on this checkpoint")
    args = parser.parse_args()
    if args.load:
        return 0 if measure(args.load, args.dtype) else 1
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        checkpoint = make(directory, args.size)
        command = [sys.executable, __file__, "--load", checkpoint, "--dtype", args.dtype]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

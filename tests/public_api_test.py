import subprocess
import sys

import specdec_jax


def test_every_public_name_is_there():
    assert sorted(specdec_jax.__all__) == sorted(specdec_jax._MODULE_OF) == sorted(dir(specdec_jax))
    for name in specdec_jax.__all__:
        assert getattr(specdec_jax, name) is not None


def test_importing_loads_neither_tensorflow_nor_t5x_and_is_quick():
    code = (
        "import sys, time, jax; start = time.process_time(); import specdec_jax;"
        "assert time.process_time() - start < 1, time.process_time() - start;"
        "import specdec_jax.decoding, specdec_jax.cli;"
        "loaded = {'tensorflow', 't5x', 'seqio', 'torch'} & set(sys.modules); assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

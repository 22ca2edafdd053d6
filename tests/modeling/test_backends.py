"""Which backend a forward gets, and that a mesh changes nothing of what the kernels compute."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from refusion_jax.config import ConfigError, ModelConfig
from refusion_jax.decoding.kv_cache import empty_cache
from refusion_jax.modeling import KVCache, Visibility, backends, buffer_attention, cudnn, splash
from refusion_jax.modeling.attention import LongVisibility
from refusion_jax.sharding import AXES

CONFIG = ModelConfig(
    num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, head_dim=128, dtype="bfloat16", attention_chunk=0
)
ROWS, LONG, SHORT = 2, backends.LONG, 128


def planned(config=CONFIG, rows=ROWS, length=LONG, buffers=(), **labels):
    """The type of what the layers share, without computing any of it."""

    def plan():
        visibility = Visibility.causal(rows, length).replace(**labels)
        return backends.plan(config, visibility, [empty_cache(config, batch, 256) for batch in buffers])[1]

    return type(jax.eval_shape(plan))


@pytest.fixture
def on(monkeypatch):
    def platform(name, devices=1, capability="9.0"):
        monkeypatch.setattr(jax, "default_backend", lambda: name)
        monkeypatch.setattr(jax, "device_count", lambda: devices)
        monkeypatch.setattr(jax, "local_devices", lambda: [type("Device", (), {"compute_capability": capability})])

    return platform


XLA = jax.ShapeDtypeStruct  # of a bias


@pytest.mark.parametrize(
    ("case", "tpu", "gpu"),
    [
        ({}, splash.CausalRows, cudnn.MaskedRows),
        ({"length": SHORT}, XLA, XLA),
        ({"length": LONG + 2}, XLA, cudnn.MaskedRows),
        ({"in_buffer_order": False}, XLA, XLA),
        ({"length": 16, "buffers": (ROWS,)}, buffer_attention.BufferedRows, XLA),
        ({"length": 16, "buffers": (1,)}, XLA, XLA),
        ({"length": 16, "buffers": (1, ROWS)}, XLA, XLA),
        ({"length": 512, "buffers": (ROWS,)}, XLA, XLA),
    ],
    ids=lambda part: str(part) if isinstance(part, dict) else part.__name__,
)
def test_what_auto_takes(case, tpu, gpu, on):
    assert planned(**case) is XLA
    on("tpu")
    assert planned(**case) is tpu
    on("gpu")
    assert planned(**case) is gpu
    assert planned(dataclasses.replace(CONFIG, attention="xla"), **case) is XLA


def test_auto_takes_no_kernel_where_it_cannot(on):
    on("gpu", capability="7.5")
    assert planned() is XLA
    on("tpu", devices=4)  # and no mesh in use that says what they share
    assert planned() is XLA
    assert planned(length=16, buffers=(ROWS,)) is XLA
    assert planned(dataclasses.replace(CONFIG, attention="splash")) is splash.CausalRows
    on("tpu")
    assert planned(dataclasses.replace(CONFIG, attention_chunk=256), in_buffer_order=False) is LongVisibility


def test_a_mesh_says_the_platform_and_must_divide_rows_and_heads():
    config = dataclasses.replace(CONFIG, attention="splash")

    def on_mesh(data, tensor, rows, kv_heads=2):
        mesh = jax.sharding.AbstractMesh((data, 1, tensor), AXES)
        with jax.sharding.use_abstract_mesh(mesh):
            return planned(dataclasses.replace(config, num_key_value_heads=kv_heads), rows)

    assert on_mesh(2, 2, rows=2) is splash.CausalRows
    assert on_mesh(4, 1, rows=2) is XLA
    assert on_mesh(1, 4, rows=2) is XLA
    assert on_mesh(1, 4, rows=2, kv_heads=8) is splash.CausalRows


def test_a_named_kernel_takes_short_rows_and_leaves_the_rest():
    assert planned(dataclasses.replace(CONFIG, attention="splash"), length=SHORT) is splash.CausalRows
    assert planned(dataclasses.replace(CONFIG, attention="splash"), length=SHORT, buffers=(ROWS,)) is XLA
    assert planned(dataclasses.replace(CONFIG, attention="pallas"), length=SHORT) is XLA


def test_a_backend_of_another_platform_is_refused(on):
    with pytest.raises(ConfigError, match=r"model.attention is 'cudnn', .*platform 'cpu'; use 'auto' or 'xla'"):
        planned(dataclasses.replace(CONFIG, attention="cudnn"))
    on("gpu", capability="7.5")
    with pytest.raises(ConfigError, match=r"model.attention is 'cudnn', .*compute capability 8.0 or more; use 'auto'"):
        planned(dataclasses.replace(CONFIG, attention="cudnn"))
    for name in ("splash", "pallas"):
        with pytest.raises(ConfigError, match=f"model.attention is '{name}', .*platform 'gpu'"):
            planned(dataclasses.replace(CONFIG, attention=name))


def outputs(*shape):
    """What each kernel makes of the same random rows, on a mesh of this shape."""
    rng = np.random.default_rng(0)
    rows, heads, kv_heads, length, width = 4, 4, 2, 128, 128
    query = rng.normal(size=(rows, length, heads, width)).astype(np.float32)
    key, value = rng.normal(size=(2, rows, kv_heads, length, width)).astype(np.float32)
    buffers = rng.normal(size=(2, 2, rows, kv_heads, 32, width)).astype(np.float32)
    segment = rng.integers(1, 3, (rows, length)).astype(np.int32)
    config = dataclasses.replace(CONFIG, num_attention_heads=heads, num_key_value_heads=kv_heads, dtype="float32")

    @jax.jit
    def all_of_them(query, key, value, buffers, segment):
        labels = Visibility.causal(rows, length).replace(segment=segment)
        cache = KVCache(*buffers, jnp.array([0, 5, 32, 16], jnp.int32))

        def by(attention, *caches):
            _, shared = backends.plan(dataclasses.replace(config, attention=attention), labels, caches)
            return backends.mix(jnp.int32(1), query, key, value, shared)

        masked = cudnn.cudnn_attention(query, key, value, cudnn.MaskedRows.of(labels), implementation="xla")
        return by("splash"), by("pallas", cache), masked

    mesh = Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), AXES)
    with jax.set_mesh(mesh):
        return all_of_them(query, key, value, buffers, segment)


def test_devices_share_rows_and_heads():
    """On eight simulated devices, which have to be asked for before JAX starts: this file runs as a script."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert max(result["differences"]) < 1e-5
    assert result["shares"] == [[1, 128, 2 * 128]] * 3


if __name__ == "__main__":
    pairs = list(zip(outputs(1, 1, 1), outputs(2, 2, 2), strict=True))
    differences = [float(np.abs(np.asarray(alone) - np.asarray(shared)).max()) for alone, shared in pairs]
    shares = [shared.sharding.shard_shape(shared.shape) for _, shared in pairs]
    print(json.dumps({"differences": differences, "shares": shares}))

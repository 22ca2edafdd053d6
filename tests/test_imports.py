"""What the package needs to be imported, and to compute."""

import subprocess
import sys

# A machine that only computes may have none of these.
OPTIONAL = (
    "array_record", "grain", "huggingface_hub", "jinja2", "matplotlib", "ml_collections", "safetensors", "tensorboardX",
    "tensorflow", "tensorflow_datasets", "tokenizers", "torch", "tqdm", "transformers",
)  # fmt: skip


def test_computing_needs_no_data_and_checkpoint_libraries():
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {OPTIONAL}:
            raise ImportError(name)
sys.meta_path.insert(0, Absent())
import refusion_jax, refusion_jax.data, refusion_jax.huggingface, refusion_jax.training.loop
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr

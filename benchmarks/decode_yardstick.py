"""What the forwards of the authors' PyTorch decoding cost, at the pace `benchmarks/decode.py` sets.

An eager float32 `transformers` Qwen3 repeats recorded forwards: as many rows, query tokens and cached tokens, whatever
the tokens. Selecting, comparing and committing tokens, and cutting rejected ones from the cache, are left out, in its
favour. It runs in a process of its own, as `benchmarks/yardstick.py` does:

    stdin                                                        stdout, one JSON object each
    {"checkpoint": "DIRECTORY", "calls": [[]], "threads": 2}     {"versions": {}}, once warm, or {"error": ""}
    "all"                                                        {"seconds": 6.5}, of all forwards together
    ...
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a script finds its own directory only

from benchmarks.yardstick import serve


class Replay:
    """Repeats forwards of given shapes."""

    def __init__(self, checkpoint: str):
        import torch
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
        self._model = model.float().eval()

    def forward(self, rows: int, length: int, cached: int) -> float:
        """Seconds of one forward; making the cache it finds is not part of them."""
        import torch
        from transformers import DynamicCache

        config = self._model.config
        cache = DynamicCache()
        for layer in range(config.num_hidden_layers if cached else 0):
            keys, values = torch.randn(2, rows, config.num_key_value_heads, cached, config.head_dim)
            cache.update(keys, values, layer)
        tokens = torch.randint(config.vocab_size, (rows, length))
        position_ids = torch.arange(cached, cached + length).expand(rows, length)
        with torch.inference_mode():
            began = time.perf_counter()
            self._model(input_ids=tokens, position_ids=position_ids, past_key_values=cache, use_cache=True)
            return time.perf_counter() - began


def prepare(request: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    """Loads the model and warms up; returns what repeats all forwards once."""
    replay = Replay(request["checkpoint"])

    def measure(_: Any) -> dict[str, Any]:
        return {"seconds": sum(replay.forward(*call) for call in request["calls"])}

    measure(None)
    return measure


if __name__ == "__main__":
    serve(prepare)

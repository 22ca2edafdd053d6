"""What a training step of the authors' PyTorch code spends its time on, at the pace `benchmarks/train.py` sets.

An eager float32 `transformers` Qwen3 with random weights runs forward, cross-entropy and backward on padded batches;
drawing the training view and the optimizer's update are left out, in its favour. It runs in a process of its own,
since PyTorch and JAX may live in different environments and would disturb each other in one process:

    stdin                                          stdout, one JSON object each
    {"model": {}, "lengths": [[]], "threads": 2}   {"versions": {}}, once warm, or {"error": ""}
    3.0                                            {"seconds": 3.01, "tokens": 36000, "step_seconds": [0.1]}
    ...
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

WARM_UP_STEPS = 4
_NO_TARGET = -100


def padded(lengths: Sequence[int], vocab_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Returns token IDs and mask of examples of these lengths, padded to the longest; (examples, longest) each."""
    longest = max(lengths)
    tokens = [[(7 * row + 3 * i) % vocab_size for i in range(longest)] for row in range(len(lengths))]
    mask = [[int(i < length) for i in range(longest)] for length in lengths]
    return tokens, mask


def make_steps(request: dict[str, Any]) -> Iterator[int]:
    """Builds the model, then does a training step per batch, round and round; yields the batch's useful tokens."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(**request["model"])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().train()
    batches = []
    for lengths in request["lengths"]:
        tokens, mask = map(torch.tensor, padded(lengths, config.vocab_size))
        batches.append((tokens, mask, tokens.masked_fill(mask == 0, _NO_TARGET).reshape(-1), sum(lengths)))
    while True:
        for tokens, mask, targets, useful in batches:
            model.zero_grad()
            logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
            torch.nn.functional.cross_entropy(logits.reshape(len(targets), -1), targets).backward()
            yield useful


def measure(step: Callable[[], int], seconds: float) -> dict[str, Any]:
    """Steps until `seconds` have passed; `step` returns the useful tokens it trained on."""
    tokens, step_seconds = 0, []
    began = now = time.perf_counter()
    while now - began < seconds:
        tokens += step()
        before, now = now, time.perf_counter()
        step_seconds.append(now - before)
    return {"seconds": now - began, "tokens": tokens, "step_seconds": step_seconds}


def prepare(request: dict[str, Any]) -> Callable[[float], dict[str, Any]]:
    """Builds and warms up; returns what trains for so many seconds."""
    steps = make_steps(request)
    for _ in range(WARM_UP_STEPS):
        next(steps)
    return lambda seconds: measure(lambda: next(steps), seconds)


def serve(prepare: Callable[[dict[str, Any]], Callable[[Any], dict[str, Any]]]) -> None:
    """Answers on stdout the lines of stdin: the request, then whatever the prepared measurement takes."""
    # Whatever the libraries print must not come between the answers.
    answers, sys.stdout = sys.stdout, sys.stderr

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    request = json.loads(sys.stdin.readline())
    try:
        import torch
        import transformers
    except ImportError as error:
        answer({"error": str(error)})
        return
    torch.set_num_threads(request["threads"])
    measure = prepare(request)
    answer({"versions": {"torch": torch.__version__, "transformers": transformers.__version__}})
    for line in sys.stdin:
        answer(measure(json.loads(line)))


if __name__ == "__main__":
    serve(prepare)

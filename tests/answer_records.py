"""Records of answers, as an evaluation's journal has them."""


def record(tokens, process=0, started=1.0, elapsed=1.0, **fields):
    return {
        "tokens": tokens, "forwards": 2, "latency": 0.5, "prompt_tokens": 7, "cut_tokens": 0, "unknown_tokens": 0,
        "finish_reason": "eos", "process": process, "started": started, "elapsed": elapsed, "compiling": 0.25, **fields,
    }  # fmt: skip

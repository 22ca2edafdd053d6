"""What the harness's own Hugging Face model says of 50 requests to the recorded checkpoint, read from left to right.

PYTHONPATH=tests python -m parity.harness_scores     # with PyTorch, transformers and lm-eval; rewrites the recording
"""

import json
import shutil
import tempfile
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

REFERENCE = Path(__file__).parents[1] / "data" / "reference"
RECORDING = Path(__file__).parents[1] / "data" / "harness" / "likelihoods.json"
SPECIAL = ("<pad>", "<eos>", "<mask>", "<bos>")
NUM_REQUESTS = 50


def cases():
    return json.loads((REFERENCE / "cases" / "decode.json").read_text())


def write_checkpoint(directory):
    """The recorded checkpoint, with a tokenizer of one character each: those that its tasks are written in."""
    ids = {}
    for case in cases():
        ids |= dict(zip(case["question"], case["prompt"], strict=True))
    vocabulary = {token: number for number, token in enumerate(SPECIAL)}
    vocabulary |= ids
    free = set(range(64)) - set(vocabulary.values())
    vocabulary |= {f"<{number}>": number for number in free}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=f"<{min(free)}>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    directory.mkdir(parents=True, exist_ok=True)
    for path in (REFERENCE / "checkpoint").iterdir():
        shutil.copy(path, directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "bos_token": None,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def requests():
    """Pairs of context and continuation: answers, wrong ones, their ends, single tokens, and one without a context.

    No two are the same text, cut at another place: of such the harness's model scores only the first right.
    """
    found = cases()
    pairs = [("", found[0]["question"])]
    for number in range(NUM_REQUESTS // 3 + 1):
        right, other, end, token = (found[number + offset] for offset in (0, 1, 50, 100))
        pairs.append((right["question"], right["gold"] if number % 2 else other["gold"][: 5 + number % 7]))
        pairs.append((end["question"] + end["gold"][:7], end["gold"][7:]))
        pairs.append((token["question"] + token["gold"][: 1 + number], token["gold"][1 + number]))
    return pairs[:NUM_REQUESTS]


def instances(pairs):
    """The requests as the harness gives them."""
    from lm_eval.api.instance import Instance

    return [Instance("loglikelihood", {}, pair, i, ("recorded", i, 1)) for i, pair in enumerate(pairs)]


def hugging_face_scores(directory):
    """(log-likelihood, is greedy) of each request, by the harness's own model."""
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=str(directory), device="cpu", dtype="float32", batch_size=8)
    return [(float(value), bool(greedy)) for value, greedy in model.loglikelihood(instances(requests()))]


def main():
    with tempfile.TemporaryDirectory() as place:
        scores = hugging_face_scores(write_checkpoint(Path(place) / "checkpoint"))
    RECORDING.parent.mkdir(exist_ok=True)
    lines = [
        json.dumps({"context": c, "continuation": r, "value": round(value, 6), "is_greedy": greedy})
        for (c, r), (value, greedy) in zip(requests(), scores, strict=True)
    ]
    RECORDING.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print(f"{RECORDING}: {len(lines)} requests")


if __name__ == "__main__":
    main()

"""A little byte-level BPE tokenizer in the files of a Hugging Face checkpoint."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

TEMPLATES = Path(__file__).parent / "data" / "chat_templates"
CORPUS = [
    "the cat sat on the mat, and the dog on the log", "user assistant system think", "naïve café", "日本語の文章",
    "S:7+1? A:8. 12 34 56\n\n  two  spaces\tand\na line\n",
] * 4  # fmt: skip
# Qwen3's: what the merges of BPE never cross.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN = ("<think>", "</think>")  # added as Qwen3 adds them: text that stays when special tokens are skipped


def train(texts, vocab_size, special=SPECIAL, plain=PLAIN):
    """A tokenizer of the `tokenizers` library, like Qwen3's."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens(list(plain))
    return tokenizer


def write(directory, *, template="qwen3", generation=None, tokenizer=None, **config):
    """Writes the files of a tokenizer into a directory and returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    (tokenizer or train(CORPUS, 320)).save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None} | config
    if template:
        config["chat_template"] = (TEMPLATES / f"{template}.jinja").read_text()
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory

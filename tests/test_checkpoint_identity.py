"""Which checkpoint answers are of."""

from refusion_jax.checkpoint_identity import checkpoint_identity


def test_a_run_directory_is_known_by_its_newest_checkpoint(tmp_path):
    def fingerprint():
        return checkpoint_identity(str(tmp_path))["checkpoint_content"]

    def put(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    for name in ("config.json", "tokenizer/tokenizer.model", "checkpoints/9/params/d/a", "checkpoints/10/params/d/b"):
        put(name, name)
    before = fingerprint()
    for name in (
        "metrics.jsonl",
        "tensorboard/events",
        "out.jsonl",
        "checkpoints/9/params/d/a",
        "checkpoints/10/rest/c",
    ):
        put(name, "new")
    assert fingerprint() == before
    for name in ("config.json", "tokenizer/tokenizer.model", "checkpoints/10/params/d/b", "checkpoints/11/params/d/b"):
        put(name, "new")
        assert fingerprint() != before
        before = fingerprint()

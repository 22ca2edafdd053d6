"""The examples in the pages run."""

import re
from pathlib import Path

import pytest

import refusion_jax as rf

DOCS = Path(__file__).parents[1] / "docs"


def code_blocks(page):
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_rules_page(tiny_run):
    blocks = code_blocks("rules.md")
    assert len(blocks) == 4
    names = {"rf": rf, "model": rf.load(tiny_run), "prompts": ["R:ab?", "S:1+2?"]}
    names["config"] = rf.DecodeConfig(gen_length=8, slot_size=4)
    for block in blocks:
        exec(compile(block, "docs/rules.md", "exec"), names)
    assert {"least", "nearly_best", "repair_when_sure"} <= set(names)


@pytest.mark.usefixtures("quick_compilation")
def test_evaluation_page(chat_model):
    (block,) = code_blocks("evaluation.md")
    names = {"rf": rf, "model": chat_model, "prompts": ["Hi", "Hi"], "responses": [" you", " there"]}
    exec(compile(block, "docs/evaluation.md", "exec"), names)
    assert len(names["out"].values) == 2

"""Little data sets in the files of GSM8K and HumanEval."""

import gzip
import json

import pytest

from refusion_jax.evaluation import sandbox

QUESTIONS = [("What is 1+1?", "1+1=2\n#### 2"), ("What is 2+2?", "2+2=4\n#### 4"), ("What is 3+3?", "#### 6")]
PROBLEMS = [("add", "return a + b", "assert f(1, 2) == 3"), ("twice", "return 2 * a", "assert f(2, 0) == 4")]


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder with gsm8k/ and humaneval/."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "gsm8k").mkdir()
    (folder / "humaneval").mkdir()
    lines = "".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in QUESTIONS)
    for split in ("train", "test"):
        (folder / "gsm8k" / f"{split}.jsonl").write_text(lines)
    with gzip.open(folder / "humaneval" / "HumanEval.jsonl.gz", "wt") as file:
        for number, (name, body, check) in enumerate(PROBLEMS):
            problem = {
                "task_id": f"HumanEval/{number}",
                "prompt": f"def {name}(a, b):\n",
                "entry_point": name,
                "canonical_solution": f"    {body}\n",
                "test": f"def check(f):\n    {check}\n",
            }
            file.write(json.dumps(problem) + "\n")
    return folder


@pytest.fixture
def isolation():
    """Skips where programs cannot be isolated."""
    try:
        sandbox.check_sandbox()
    except sandbox.SandboxError as error:
        pytest.skip(str(error))

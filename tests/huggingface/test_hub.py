"""What is asked of the Hub, and what is said when it does not answer."""

import sys

import pytest
from huggingface_hub import errors

import refusion_jax as rf
from refusion_jax.config import ModelConfig
from refusion_jax.huggingface import CheckpointError, local_directory
from refusion_jax.training.weights import initial_params


class Response:
    """As much of an answer as the errors look at."""

    headers, status_code, request = {}, 401, None


@pytest.fixture
def hub(monkeypatch):
    """Replaces the download: what was asked is listed, and `answer` is returned or raised."""

    class Hub:
        asked, answer = [], None

    def download(name, **options):
        Hub.asked.append((name, options["revision"]))
        Hub.patterns = options["allow_patterns"]
        if isinstance(Hub.answer, Exception):
            raise Hub.answer
        return str(Hub.answer)

    Hub.asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return Hub


def message(name):
    with pytest.raises(CheckpointError) as caught:
        rf.load(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_model_of_the_hub(hub, checkpoint):
    hub.answer = checkpoint
    model = rf.load("org/na.me-1")
    assert model.config.hidden_size == 128
    assert local_directory("org/name@v1.0") == checkpoint
    assert hub.asked == [("org/na.me-1", None), ("org/name", "v1.0")]
    assert not [pattern for pattern in hub.patterns if pattern.endswith((".bin", ".pt", ".py", "*"))]
    initial = initial_params("org/name", model.config)
    assert (initial["norm"]["scale"] == model.params["norm"]["scale"]).all()


@pytest.mark.parametrize("name", ["./org/name", "../org/name", "nothing", "a/b/c", "org/name@"])
def test_what_looks_like_a_path_is_never_asked_of_the_hub(name, hub):
    assert "is not a directory; give a run directory" in message(name)
    assert hub.asked == []


def test_paths_that_exist_or_are_absolute(hub, tmp_path, monkeypatch):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert "config.json is missing" in message("runs/mine")
    assert "is not a directory" in message(str(tmp_path / "other"))
    assert "is not a directory" in message(tmp_path.relative_to(tmp_path) / "runs" / "other")
    assert hub.asked == []


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (errors.GatedRepoError("Access\nis", response=Response), "org/name is gated on the Hugging Face Hub: accept"),
        (
            errors.RepositoryNotFoundError("x\ny", response=Response),
            "org/name is neither a directory here nor a model on",
        ),
        (
            errors.RevisionNotFoundError("x\ny", response=Response),
            "org/name has no revision 'v2' on the Hugging Face Hub",
        ),
        (errors.HFValidationError("x"), "org/name is neither a directory here nor a name that the Hub can have."),
        (
            errors.LocalEntryNotFoundError("Got: ConnectError.\nAn error"),
            "cannot be reached (Got: ConnectError): download",
        ),
        (errors.OfflineModeIsEnabled("offline"), "cannot be reached (offline): download it elsewhere and give the"),
        (errors.HfHubHTTPError("500", response=Response), "the Hugging Face Hub cannot be reached (500"),
    ],
)
def test_what_the_hub_refuses(error, sentence, hub):
    hub.answer = error
    assert sentence in message("org/name@v2")


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert message("org/name") == (
        "org/name is not a directory, and the Hugging Face Hub needs huggingface_hub: pip install 'refusion_jax[hf]', "
        "or download it elsewhere and give the directory."
    )


def test_a_machine_without_a_network(monkeypatch, tmp_path):
    """The library itself, told to ask nobody."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert "org/name is not a directory here, and the Hugging Face Hub cannot be reached" in message("org/name")


def test_training_begins_with_a_model_of_the_hub_that_is_another(hub, checkpoint):
    hub.answer = checkpoint
    with pytest.raises(
        CheckpointError, match=r"^org/name holds the weights of another model: model\.hidden_size is 128"
    ):
        initial_params("org/name", ModelConfig(vocab_size=64, hidden_size=64))

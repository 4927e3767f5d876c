import pytest

from specdec_jax import packaged


@pytest.fixture
def directory(tmp_path):
    for model, steps in {"target": (7,), "draft_small": (3, 4)}.items():
        for step in steps:
            (tmp_path / model / f"checkpoint_{step}").mkdir(parents=True)
            (tmp_path / model / f"checkpoint_{step}" / "checkpoint").touch()
    (tmp_path / "vocabulary.model").touch()
    return tmp_path


def test_resolve(directory):
    assert packaged.resolve("demo:target", directory) == str(directory / "target" / "checkpoint_7")
    assert packaged.resolve("demo:vocabulary", directory) == str(directory / "vocabulary.model")
    assert packaged.resolve("/a/path", directory) == "/a/path" and packaged.resolve("bytes") == "bytes"
    assert packaged.model_names(directory) == ["draft_small", "target"]


def test_names_that_do_not_resolve(directory):
    with pytest.raises(ValueError, match="'demo:huge' is not in .*; it holds demo:draft_small, demo:target, demo:voc"):
        packaged.resolve("demo:huge", directory)
    with pytest.raises(ValueError, match=r"'demo:draft_small' is ambiguous: .* holds the checkpoints \[3, 4\]"):
        packaged.resolve("demo:draft_small", directory)
    with pytest.raises(ValueError, match="the demonstration pair is not there"):
        packaged.resolve("demo:vocabulary", directory / "nowhere")

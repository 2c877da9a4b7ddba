"""Options of the library: what the command line's parser refuses, a call refuses too, before anything is written."""

from __future__ import annotations

import pytest
import torch

import convert
from convert.errors import UsageError
from tests.fixtures import make_hf


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_hf(tmp_path_factory.mktemp("choices") / "hf", "gqa8").path


@pytest.mark.parametrize(
    ("target", "option", "value"),
    [
        ("scratch", "dtype", "int8"),
        ("scratch", "dtype", "float33"),
        ("scratch", "dtype", 3),
        ("scratch", "dtype", "q8_0"),
        ("scratch", "format", "zip"),
        ("scratch", "qk_layout", "half"),
        ("scratch", "layout", "huggingface"),
        ("scratch", "tie", "yes"),
        ("scratch", "context", 0),
        ("hf", "max_shard_size", 0),
        ("hf", "max_shard_size", "5GB"),
        ("meta", "model_parallel", 0),
        ("meta", "model_parallel", -2),
        ("meta", "model_parallel", True),
    ],
)
def test_values_that_an_option_does_not_have(made, tmp_path, target, option, value):
    with pytest.raises(UsageError, match=option) as caught:
        convert.convert_checkpoint(made, tmp_path / "out", to=target, **{option: value})
    assert repr(value) in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", ["float16", torch.float16, "torch.float16", "F16", "keep", None])
def test_types_in_every_spelling(made, tmp_path, value):
    convert.convert_checkpoint(made, tmp_path / "out", to="scratch", dtype=value)
    with convert.open_checkpoint(tmp_path / "out") as found:
        assert found.dtype == ("F32" if value in ("keep", None) else "F16")


@pytest.mark.parametrize(("option", "value"), [("qk_layout", "half"), ("layout", "zz"), ("tie", 1), ("context", -3)])
def test_opening(made, option, value):
    with pytest.raises(UsageError, match=option):
        convert.open_checkpoint(made, **{option: value})


@pytest.mark.parametrize("threads", [0, -1, True, 1.5])
def test_no_threads_are_refused_and_not_waited_for(tmp_path, threads):
    """With none at work, a run waited for ever for room among the pieces that are at work."""
    made = make_hf(tmp_path / "m", "gqa8").path
    out, other = tmp_path / "out", tmp_path / "other"
    convert.convert_checkpoint(made, out, to="scratch", threads=1)  # the control
    for work in (
        lambda: convert.convert_checkpoint(made, other, to="scratch", threads=threads),
        lambda: convert.repair(made, other, fixes=["unpermute-qk"], threads=threads),
        lambda: convert.check(out, source=made, threads=threads),
        lambda: convert.diff(made, out, threads=threads),
    ):
        with pytest.raises(convert.UsageError, match=r"threads=.* is no whole number of at least 1"):
            work()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "out"]
    # one fix is a text, not its letters
    assert convert.repair(made, other, fixes="unpermute-qk").as_json()["fixes"][0]["fix"] == "unpermute-qk"

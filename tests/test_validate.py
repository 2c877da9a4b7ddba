"""Validation: sound checkpoints pass, and each kind of damage is found, alone and by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from convert.cli import cli, run
from convert.errors import UsageError
from convert.validate import validate
from tests.fixtures import make_gguf, make_hf, make_meta, make_scratch

State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    return {
        "hf": make_hf(root / "hf", "std", dtype="bfloat16"),
        "three": make_hf(root / "three", "std", sharded=3),
        "bias": make_hf(root / "bias", "gqa8", attention_bias=True, mlp_bias=True),
        "bin": make_hf(root / "bin", "tied", format="bin", sharded=2),
        "meta": make_meta(root / "meta", "h32kv8", mp=8, rope_freqs=True),
        "meta2": make_meta(root / "meta2", "mha", mp=2, embedding_axis="llama2", vocab_minus_one=True),
        "scratch": make_scratch(root / "scratch", "std", format="pth", strided=True),
        "wrapped": make_scratch(root / "wrapped", "std", format="pth", wrapper="model_state_dict"),
        "gguf": make_gguf(root / "model.gguf", "std"),
        "q8": make_gguf(root / "q8.gguf", "kquant", type="q8_0"),
        "q4k": make_gguf(root / "q4k.gguf", "kquant", type="q4_k"),
    }


@pytest.mark.parametrize(
    "name", ["hf", "three", "bias", "bin", "meta", "meta2", "scratch", "wrapped", "gguf", "q8", "q4k"]
)
def test_sound_checkpoints(made, name):
    found = validate(made[name].path, scan=True)
    assert found.ok and found.exit_code == 0, found.lines()
    assert found.problems == []
    assert found.lines()[0].startswith("ok: ") and "every value read" in found.lines()[0]


def changed(made, tmp_path: Path, change: Callable[[State], object], name: str = "hf") -> Path:
    folder = Path(shutil.copytree(made[name].path, tmp_path / name))
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")
    return folder


def kinds(found) -> list[tuple[str, str | None]]:
    return sorted((p.kind, p.tensor) for p in found.problems)


K1 = "model.layers.1.self_attn.k_proj.weight"
DAMAGE: dict[str, tuple[Callable[[State], object], list[tuple[str, str | None]]]] = {
    "missing": (lambda s: s.pop(K1), [("missing_tensor", K1)]),
    "no head": (lambda s: s.pop("lm_head.weight"), [("missing_head", "lm_head.weight")]),
    "extra": (lambda s: s.update(x=torch.ones(2)), [("unexpected_tensor", "x")]),
    "a layer more": (
        lambda s: s.update({"model.layers.2.mlp.up_proj.weight": torch.ones(80, 48)}),
        [("unexpected_tensor", "model.layers.2.mlp.up_proj.weight")],
    ),
    "transposed": (
        lambda s: s.update(
            {"model.layers.0.mlp.up_proj.weight": s["model.layers.0.mlp.up_proj.weight"].T.contiguous()}
        ),
        [("shape", "model.layers.0.mlp.up_proj.weight")],
    ),
    "fewer kv rows": (lambda s: s.update({K1: s[K1][:8].contiguous()}), [("shape", K1)]),
    "another rank": (lambda s: s.update({"model.norm.weight": torch.ones(1, 48)}), [("shape", "model.norm.weight")]),
    "integers": (lambda s: s.update({K1: s[K1].to(torch.int32)}), [("dtype", K1)]),
    "two at once": (
        lambda s: (s.pop(K1), s.update(x=torch.ones(2))),
        [("missing_tensor", K1), ("unexpected_tensor", "x")],
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage(made, tmp_path, name):
    change, wanted = DAMAGE[name]
    found = validate(changed(made, tmp_path, change))
    assert not found.ok and found.exit_code == 1
    assert kinds(found) == wanted
    assert all(p.message and p.hint for p in found.problems)


VALUES: dict[str, tuple[Callable[[State], object], tuple[str, str]]] = {
    "nan": (lambda s: s[K1].__setitem__((5, 3), float("nan")), ("nan", "row is 5.")),
    "inf": (lambda s: s["lm_head.weight"].__setitem__((95, 47), float("-inf")), ("inf", "row is 95.")),
    "zeros": (lambda s: s[K1].zero_(), ("zeros", "all zeros")),
    "a norm of zeros": (lambda s: s["model.norm.weight"].zero_(), ("zeros", "all zeros")),
}


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
def test_json_has_no_word_for_infinity(made, tmp_path, key, value):
    folder = changed(made, tmp_path, lambda _: None)
    said = json.loads((folder / "config.json").read_text())
    said = {k: v for k, v in said.items() if k != "rope_parameters"} | {key: value}
    (folder / "config.json").write_text(json.dumps(said))
    found = validate(folder)
    assert not found.ok and str(value) in found.problems[0].message
    text = json.dumps(found.as_json(), allow_nan=False)  # raises where the object is no JSON
    assert json.loads(text)["problems"][0]["found"] == str(value)


@pytest.mark.parametrize("name", VALUES)
def test_values_are_seen_with_a_scan_only(made, tmp_path, name):
    change, (kind, words) = VALUES[name]
    folder = changed(made, tmp_path, change)
    assert validate(folder).ok
    found = validate(folder, scan=True)
    assert [p.kind for p in found.problems] == [kind]
    assert words in found.problems[0].message


def test_biases_of_zeros_are_a_note(made, tmp_path):
    def change(state: State) -> None:
        for layer in (0, 1):
            state[f"model.layers.{layer}.self_attn.q_proj.bias"].zero_()

    found = validate(changed(made, tmp_path, change, "bias"), scan=True)
    assert found.ok
    assert "all zeros: model.layers.{0-1}.self_attn.q_proj.bias" in found.notes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_key_value_heads": 3}, "fit num_key_value_heads = 2"),
        ({"intermediate_size": 81}, "fit intermediate_size = 80"),
        ({"vocab_size": 97}, "fit vocab_size = 96"),
        ({"num_hidden_layers": 3}, "missing"),
        ({"num_hidden_layers": 1}, "has no place"),
        ({"attention_bias": True}, "missing"),
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_size": "x"}, "hidden_size"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 4}}, "longrope"),
        ({"num_attention_heads": None}, "num_attention_heads"),
    ],
)
def test_config_against_tensors(made, tmp_path, change, words):
    folder = Path(shutil.copytree(made["hf"].path, tmp_path / "m"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    found = validate(folder)
    assert not found.ok
    assert any(words in f"{p.message} {p.hint}" for p in found.problems), found.lines()


@pytest.mark.parametrize("name", ["hf", "three", "bin", "meta", "scratch", "wrapped", "gguf", "q8"])
@pytest.mark.parametrize("keep", [0.98, 0.5, 0.0])
def test_truncated_files(made, tmp_path, name, keep):
    source = made[name].path
    if source.is_dir():
        target = Path(shutil.copytree(source, tmp_path / "m"))
        files = [p for p in sorted(target.iterdir()) if p.suffix in (".safetensors", ".pth", ".bin")]
        file = files[-1]
    else:
        target = file = Path(shutil.copy(source, tmp_path / source.name))
    raw = file.read_bytes()
    file.write_bytes(raw[: int(len(raw) * keep)])
    found = validate(target)
    assert not found.ok
    assert any(file.name in f"{p.message} {p.file}" for p in found.problems), found.lines()


@pytest.mark.parametrize("name", ["three", "bin", "meta"])
def test_all_damaged_files_are_named_at_once(made, tmp_path, name):
    folder = Path(shutil.copytree(made[name].path, tmp_path / "m"))
    files = [p for p in sorted(folder.iterdir()) if p.suffix in (".safetensors", ".pth", ".bin")][:2]
    for file in files:
        file.write_bytes(file.read_bytes()[:-300])
    said = " ".join(f"{p.message} {p.file}" for p in validate(folder).problems)
    assert all(file.name in said for file in files)


def test_fake_files(made, tmp_path):
    folder = Path(shutil.copytree(made["three"].path, tmp_path / "m"))
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 247164560\n"
    (folder / "model-00001-of-00003.safetensors").write_bytes(pointer)
    (folder / "model-00003-of-00003.safetensors").write_bytes(b"<!DOCTYPE html><title>Sign in</title>")
    found = validate(folder)
    assert [p.kind for p in found.problems] == ["not_weights", "not_weights"]  # both at once
    assert "git lfs pull" in "\n".join(found.lines())


def test_files_of_another_model_among_metas(made, tmp_path):
    folder = Path(shutil.copytree(made["meta"].path, tmp_path / "m"))
    state = torch.load(folder / "consolidated.03.pth")
    state["norm.weight"] = state["norm.weight"] + 1
    del state["layers.0.attention.wq.weight"]
    torch.save(state, folder / "consolidated.03.pth")
    found = validate(folder)
    assert kinds(found) == [("missing_tensor", "layers.0.attention.wq.weight"), ("replica", "norm.weight")]
    assert "7 of 8" in "\n".join(found.lines())


def test_warnings_do_not_fail(made, tmp_path):
    folder = Path(shutil.copytree(made["three"].path, tmp_path / "m"))
    index = folder / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    assert not any("total_size" in n for n in validate(folder).notes)
    raw["metadata"]["total_size"] += 1
    index.write_text(json.dumps(raw))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    found = validate(folder)
    assert found.ok and found.exit_code == 0
    assert any("total_size" in n for n in found.notes)
    assert any("float16" in n for n in found.notes)


def test_a_tie_flag_that_the_tensors_contradict_is_said(tmp_path):
    found = validate(make_hf(tmp_path / "m", "std", tie_flag=True).path)
    assert found.ok and any("tie_word_embeddings" in n for n in found.notes)
    found = validate(make_hf(tmp_path / "e", "tied", head="equal").path)
    assert found.ok and not any("tie_word_embeddings" in n for n in found.notes)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tie_word_embeddings", "false", "tie_word_embeddings is 'false'"),
        ("architectures", "LlamaForCausalLM", "no list of class names"),
        ("architectures", [3], "no list of class names"),
    ],
)
def test_config_values_of_the_wrong_kind(made, tmp_path, key, value, words):
    folder = Path(shutil.copytree(made["hf"].path, tmp_path / "m"))
    place = folder / "config.json"
    good = json.loads(place.read_text())
    place.write_text(json.dumps(good | {key: value}))
    (problem,) = validate(folder).problems
    assert problem.kind == "config" and words in problem.message and problem.hint
    place.write_text(json.dumps(good | {"tie_word_embeddings": False, "architectures": ["LlamaForCausalLM"]}))
    assert validate(folder).ok  # the control


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
def test_small_files_that_a_conversion_would_refuse(made, tmp_path, name):
    folder = Path(shutil.copytree(made["hf"].path, tmp_path / "m"))
    (folder / name).write_text("{}")
    assert validate(folder).ok  # the control
    (folder / name).write_text('{"eos_token_id": 2, ')
    (problem,) = validate(folder).problems
    assert name in problem.message and problem.kind == ("config" if "gen" in name else "tokenizer")


def test_the_tokenizer_of_another_model(tmp_path, capsys):
    made = make_hf(tmp_path / "m", "gqa8", tokenizer=120)
    found = validate(made.path)
    assert found.ok and "tokenizer.json (" in found.checked  # the control
    place = made.path / "tokenizer.json"
    tree = json.loads(place.read_text())
    tree["model"]["vocab"]["stranger"] = made.config["vocab_size"]
    place.write_text(json.dumps(tree))
    (made.path / "generation_config.json").write_text('{"eos_token_id": 100000}')
    assert run(cli, ["validate", str(made.path)]) == 1
    said = capsys.readouterr().out
    assert "2 problems" in said and "it belongs to another model" in said and "eos_token_id is 100000" in said
    assert "--no-tokenizer" in said.partition("What to do:")[2]


@pytest.mark.parametrize(
    ("change", "words"),
    [({"decisions": [5]}, "its decisions is [5]"), ({"target": {"files": 7}}, "the files of its target are 7")],
)
def test_a_record_that_cannot_be_used_is_named(tmp_path, change, words):
    from convert.check import check
    from convert.errors import ConvertError

    made = make_hf(tmp_path / "m", "gqa8")
    import convert

    convert.convert_checkpoint(made.path, tmp_path / "out", to="hf")
    assert check(tmp_path / "out").ok and not any("passed over" in n for n in validate(tmp_path / "out").notes)
    place = tmp_path / "out" / "conversion.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | change))
    found = validate(tmp_path / "out")
    assert found.ok and any("conversion.json was passed over" in n and words in n for n in found.notes)
    with pytest.raises(ConvertError) as caught:
        check(tmp_path / "out")
    assert words in str(caught.value) and caught.value.problems[0].hint
    place.unlink()
    place.symlink_to("nowhere")
    assert any("conversion.json was passed over" in n for n in validate(tmp_path / "out").notes)


def test_json(made, tmp_path, capsys):
    folder = changed(made, tmp_path, lambda s: s.pop(K1))
    assert run(cli, ["validate", str(folder), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["schema"] == "convert.validate/1" and said["ok"] is False
    assert set(said["problems"][0]) == {"kind", "tensor", "file", "found", "wanted", "hint", "message"}
    assert said["problems"][0]["tensor"] == K1 and said["problems"][0]["wanted"] == [16, 48]
    assert run(cli, ["validate", str(made["hf"].path), "--json", "--scan"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []


def test_screen(made, tmp_path, capsys):
    def change(state: State) -> None:
        for layer in (0, 1):
            del state[f"model.layers.{layer}.mlp.up_proj.weight"]

    assert run(cli, ["validate", str(changed(made, tmp_path, change))]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("NOT ok: ") and "2 problems" in lines[0]
    assert sum("up_proj" in line for line in lines) == 1 and "{0-1}" in lines[1]
    assert "What to do:" in lines
    assert run(cli, ["validate", str(made["hf"].path), "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_nothing_there_is_a_usage_error(tmp_path, capsys):
    with pytest.raises(UsageError):
        validate(tmp_path / "absent")
    assert run(cli, ["validate", str(tmp_path / "absent")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_module(made):
    modules = pytest.importorskip("convert.modules")
    if not hasattr(modules, "check_module"):
        pytest.skip("convert.modules has no check_module yet")
    book = pytest.importorskip("llms_from_scratch.llama3")
    fixture = made["scratch"]
    cfg = dict(fixture.config) | {"dtype": torch.float32}
    assert validate(fixture.path, model=book.Llama3Model(cfg)).ok
    found = validate(fixture.path, model=book.Llama3Model(cfg | {"hidden_dim": 81, "n_layers": 3}))
    assert not found.ok
    assert any("ff.fc1" in str(p.tensor) or "ff.fc1" in p.message for p in found.problems)


def test_a_module_with_names_of_its_own(tmp_path):
    """`names` are the module's; the source has Hugging Face's, or the module's own."""
    import importlib.util

    import convert

    examples = Path(__file__).parent.parent / "examples"
    spec = importlib.util.spec_from_file_location("own_model", examples / "own_model.py")
    assert spec and spec.loader
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    made = make_hf(tmp_path / "hf", "gqa8")
    module = example.OwnLlama(made.config)
    names = examples / "own_names.toml"
    convert.convert_checkpoint(made.path, tmp_path / "own", to="scratch", names=names)
    for source in (made.path, tmp_path / "own"):
        assert validate(source, model=module, names=names).ok
        wider = example.OwnLlama(made.config | {"intermediate_size": 97})
        found = validate(source, model=wider, names=names)
        assert not found.ok and any("shrink" in str(p.as_json()) for p in found.problems)

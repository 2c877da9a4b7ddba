"""Layer by layer: the figures of the model in memory for every family, where a fault begins, one layer in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from convert import ggml, layerwise
from convert.checkpoint import open_checkpoint
from convert.cli import cli, run
from convert.errors import ConvertError, UsageError
from convert.layerwise import Buffers, LayeredModel, gather
from convert.prompt import read_prompts, shortened
from convert.reference.loading import load_reference
from convert.rounding import Change, perturb
from convert.running import logits
from convert.source import Source
from convert.table import families
from convert.verify import VerifyResult, verify
from tests.families.mixed import converted, prompt
from tests.fixtures.hf import make_hf
from tests.fixtures.meta import make_meta
from tests.fixtures.shapes import get_shape
from tests.fixtures.weights import Tensors, tokens
from tests.reference.models import StandIn, TensorSource, interleaved, one_thread, stand_in  # noqa: F401

verify_module = import_module("convert.verify")  # as an attribute of the package, that name is the function
#: Whose tests are called otherwise.
_TESTS = {"llama": "llama_relatives"}
LAYERS = 5
DEEP = replace(get_shape("gqa8"), layers=LAYERS)


@torch.inference_mode()
def hidden_states(ckpt, ids, *, dtype=torch.float32, logits=True) -> list[tuple[str, torch.Tensor]]:
    """The hidden states after each step: ``embed``, ``layer 0`` …, then ``logits`` in slabs of the vocabulary."""
    model = LayeredModel(ckpt, device="cpu", dtype=dtype)
    tokens = torch.as_tensor(ids, dtype=torch.long).reshape(1, -1)
    with model.front():
        x = model.embed(tokens)
        context = model.context(tokens.shape[1])
    steps = [("embed", x[0])]
    for layer in range(model.n_layers):
        with model.layer(layer) as block:
            x = block(x, context)
        steps.append((f"layer {layer}", x[0]))
    return steps + [("logits", head(x)[0]) for head in (model.slabs(x.shape[1]) if logits else ())]


def whole_states(ckpt: Any, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Hidden states of the model as it is loaded whole, ``[T, D]`` each."""
    model = load_reference(ckpt, dtype=dtype)
    with torch.inference_mode():
        x = model.embed(ids)
        context, states = model.context(ids.shape[1]), [x[0]]
        for layer in range(model.n_layers):
            x = model.block(layer)(x, context)
            states.append(x[0])
    return states


def same(a: VerifyResult, b: VerifyResult) -> None:
    """Nothing but the way to run differs."""
    one, other = a.as_json(), b.as_json()
    assert (one.pop("layerwise"), other.pop("layerwise")) == (False, True)
    if a.dtype.endswith("float16"):  # torch's 16-bit products on a CPU depend on where the numbers lie
        assert (a.verdict, a.first_diff_position) == (b.verdict, b.first_diff_position)
        assert one["nmse"] == pytest.approx(other["nmse"], rel=0.1)
        assert one["noise"] == pytest.approx(other["noise"], rel=0.1)
        assert (a.departs and a.departs[0]) == (b.departs and b.departs[0])
        return
    assert one == other
    assert a.detail() == b.detail()


class Planted:
    """A checkpoint with one tensor replaced by its negative."""

    def __init__(self, ckpt: Any, name: str) -> None:
        self.ckpt, self.name = ckpt, name

    def __getattr__(self, key: str) -> Any:
        return getattr(self.ckpt, key)

    def reference_tensors(self) -> Iterator[tuple[str, Source]]:
        for name, source in self.ckpt.reference_tensors():
            if name == self.name:
                source = TensorSource(-torch.from_numpy(source.read(0, source.shape[0]).copy()))
            yield name, source


@pytest.fixture(scope="module", params=families())
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model of a family as transformers saved it, and as a GGUF file."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp(request.param)
    module = import_module(f"tests.families.test_{_TESTS.get(request.param, request.param)}")
    made = module.make(folder / "hf")
    return made.path, converted(made.path, folder, "gguf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_family_computes_the_same_layer_by_layer(family, dtype):
    """Against the model loaded whole by ``load_reference``, which shares no code with the filling here."""
    for path in family:
        with open_checkpoint(path) as opened:
            ids = prompt(opened.config["vocab_size"])
            wanted = logits(load_reference(opened, dtype=dtype), ids)
            steps = hidden_states(opened, ids, dtype=dtype)
            states = whole_states(opened, ids, dtype)
        got = torch.cat([x for name, x in steps if name == "logits"], 1)
        names = ["embed", *(f"layer {i}" for i in range(len(states) - 1)), "logits"]
        assert [name for name, _ in steps][: len(names)] == names
        for state, (_, found) in zip(states, steps, strict=False):
            assert float((state.float() - found.float()).abs().max()) <= 1e-6
        assert float((got.float() - wanted).abs().max()) <= 1e-6


def test_every_family_is_verified_the_same_way(family):
    """hf against gguf: the same verdict and figures; a tensor of the last layer spoilt: fail, there."""
    with open_checkpoint(family[0]) as a, open_checkpoint(family[1]) as b:
        whole, got = (verify(a, b, device="cpu", n_tokens=48, layerwise=way) for way in (False, True))
        assert got.verdict == "pass", got.message
        same(whole, got)
        ending = (".out_proj.weight", ".o_proj.weight")
        spoilt = [name for name, _ in b.reference_tensors() if name.endswith(ending)][-1]
        layer = int(spoilt.split(".")[1])
        assert layer > 0
        broken = verify(a, Planted(b, spoilt), device="cpu", n_tokens=48, layerwise=True)
        assert broken.verdict == "fail"
        assert broken.departs[0] == f"layer {layer}"
        assert f"first part in layer {layer} of {layer + 1} (relative error" in " ".join(broken.hints)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_same_figures_in_any_arithmetic(dtype, stored):
    """The roundings too, which are pseudo-random: their signs follow from the names, not from the order."""
    a = stand_in("gqa6")
    b = replace(stand_in("gqa6", pairing="interleaved", dtype=stored))
    same(*(verify(a, b, device="cpu", dtype=dtype, layerwise=way) for way in (False, True)))
    same(*(verify(b, a, device="cpu", dtype=dtype, layerwise=way) for way in (False, True)))
    b.pairing = "half"
    broken = [verify(a, b, device="cpu", dtype=dtype, layerwise=way) for way in (False, True)]
    same(*broken)
    assert broken[1].verdict == "fail"
    assert broken[1].departs[0] == "layer 0"
    assert "once B is run with" in " ".join(broken[1].hints)


def test_tied_heads_and_other_shapes():
    for shape in ("tied", "hd6", "hd16", "mha"):
        a, b = stand_in(shape), stand_in(shape, pairing="interleaved")
        same(*(verify(a, b, device="cpu", layerwise=way) for way in (False, True)))


@pytest.mark.parametrize("kind", ["meta", "scratch", "q8_0", "q4_k_m"])
def test_layouts_and_quantised_files(tmp_path, kind):
    """Two model-parallel files, our own files, and block types, whose rows come in whole blocks; both ways round."""
    shape = "kquant" if kind.startswith("q") else "gqa8"
    hf = make_hf(tmp_path / "hf", shape=shape).path
    if kind == "meta":
        other = make_meta(tmp_path / "meta", mp=2).path
    else:
        out, options = tmp_path / "out.gguf", ["--type", kind, "--no-tokenizer"]
        if kind == "scratch":
            out, options = tmp_path / "scratch", []
        if kind == "q4_k_m" and not ggml.available():
            pytest.skip("needs the extra: quantize")
        words = [f"hf-to-{'scratch' if kind == 'scratch' else 'gguf'}", str(hf), str(out), *options]
        assert run(cli, words) == 0
        other = out
    for one, second in ((hf, other), (other, hf)):
        whole, got = (verify(one, second, device="cpu", layerwise=way) for way in (False, True))
        assert got.verdict in ("pass", "weak") if kind == "q4_k_m" else got.verdict == "pass"
        same(whole, got)


def test_command(tmp_path, capsys):
    hf, meta = str(make_hf(tmp_path / "hf").path), str(make_meta(tmp_path / "meta").path)
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps([list(range(20)), list(range(30, 60))]))
    words = ["verify", hf, meta, "--device", "cpu"]
    assert run(cli, [*words, "--layerwise", "--prompts", str(file), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["verdict"], value["layerwise"], len(value["prompts"])) == ("pass", True, 2)
    assert run(cli, [*words, "--layerwise"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("layer by layer", "rounding", "tolerance", "broken copy"))
    assert run(cli, [*words, "--prompts", str(file), "--text", "x"]) == 2
    assert "not both" in capsys.readouterr().err
    assert run(cli, [*words, "--prompts", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def swap(layer: int, one: str, other: str) -> Any:
    def change(state: Tensors) -> None:
        a, b = (f"model.layers.{layer}.{name}.weight" for name in (one, other))
        state[a], state[b] = state[b], state[a]

    return change


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_fault_is_said_to_begin_where_it_was_planted(layer, dtype):
    a = stand_in(DEEP)
    for change in (
        swap(layer, "mlp.gate_proj", "mlp.up_proj"),
        swap(layer, "input_layernorm", "post_attention_layernorm"),
        swap(layer, "self_attn.k_proj", "self_attn.v_proj"),
    ):
        got = verify(a, stand_in(DEEP, pairing="interleaved", change=change, dtype=dtype), device="cpu", layerwise=True)
        assert (got.verdict, got.departs[0]) == ("fail", f"layer {layer}")
        layers = got.detail()["layers"]
        assert [x["name"] for x in layers] == ["embed", *(f"layer {i}" for i in range(LAYERS)), "logits"]
        assert all(x["error"] <= 4 * x["noise"] for x in layers[: layer + 1])
        assert layers[layer + 1]["error"] > 20 * layers[layer + 1]["noise"]
        json.dumps(got.as_json(), allow_nan=False)


def test_faults_outside_the_layers_are_said_to_lie_there():
    def roll(key: str) -> Any:
        def change(state: Tensors) -> None:
            state[key] = state[key].roll(1, 0)

        return change

    a = stand_in(DEEP)
    for key, step, words in (
        ("model.embed_tokens.weight", "embed", "part at the embedding already"),
        ("lm_head.weight", "head", f"agree through all {LAYERS} layers"),
        ("model.norm.weight", "head", "the final norm or the head differs"),
    ):
        for way in (False, True):
            got = verify(a, stand_in(DEEP, change=roll(key)), device="cpu", layerwise=way)
            assert (got.verdict, got.departs[0]) == ("fail", step)
            assert words in " ".join(got.hints)
    assert verify(a, a, device="cpu").departs is None


def test_one_layer_is_in_memory_at_a_time(monkeypatch):
    held: list[int] = []
    fill = LayeredModel._fill

    def spy(self: LayeredModel, names: list[str]) -> None:
        fill(self, names)
        held.append(len(self._filled))

    monkeypatch.setattr(LayeredModel, "_fill", spy)
    a, b = stand_in(DEEP), stand_in(DEEP, pairing="interleaved")
    assert verify(a, b, device="cpu", layerwise=True).verdict == "pass"
    assert max(held) == 9  # a layer's parameters
    held.clear()
    assert verify(a, b, device="cpu", layerwise=False).verdict == "pass"
    assert max(held) == 9 * LAYERS


def test_layers_use_one_memory():
    buffers = Buffers()
    model = LayeredModel(stand_in(DEEP), buffers=buffers)
    places = []
    for layer in range(LAYERS):
        with model.layer(layer) as block:
            places.append({p.data_ptr() for p in block.parameters()})
            assert not any(p.is_meta for p in block.parameters())
        assert all(p.is_meta for p in block.parameters())
    assert all(p == places[0] for p in places)
    other = LayeredModel(stand_in(DEEP, seed=1), buffers=buffers)
    with other.layer(0) as block:
        assert {p.data_ptr() for p in block.parameters()} == places[0]


def test_rows_of_the_embedding_are_gathered_and_the_head_comes_in_slabs(monkeypatch):
    ckpt, kept = stand_in(), {}
    plain = ckpt.reference_tensors

    def sources() -> Iterator[tuple[str, Source]]:
        for name, source in plain():
            yield name, kept.setdefault(name, source)

    monkeypatch.setattr(ckpt, "reference_tensors", sources)
    monkeypatch.setattr(layerwise, "SLAB_ROWS", 50)
    ids = torch.tensor([[5, 9, 5, 77]])
    steps = hidden_states(ckpt, ids)
    assert sorted(kept["tok_emb.weight"].reads) == [(5, 6), (9, 10), (77, 78)]
    assert kept["out_head.weight"].reads == [(0, 50), (50, 100), (100, 128)]
    assert [tuple(x.shape) for name, x in steps if name == "logits"] == [(4, 50), (4, 50), (4, 28)]
    assert torch.equal(torch.cat([x for n, x in steps if n == "logits"], 1), logits(load_reference(ckpt), ids))
    kept.clear()
    assert [name for name, _ in hidden_states(ckpt, [5, 9], logits=False)] == ["embed", "layer 0", "layer 1"]
    assert kept["out_head.weight"].reads == []
    slabs = verify(ckpt, stand_in(pairing="interleaved"), device="cpu")
    monkeypatch.setattr(layerwise, "SLAB_ROWS", 4096)
    whole = verify(ckpt, stand_in(pairing="interleaved"), device="cpu")
    assert slabs.distance.by_position == pytest.approx(whole.distance.by_position, rel=1e-6)
    assert slabs.control.as_json() == pytest.approx(whole.control.as_json())
    assert slabs.detail()["logits"] == whole.detail()["logits"]


def test_gathering_respects_alignment():
    tensor = torch.randn(40, 6)
    source = TensorSource(tensor, align=16)
    assert torch.equal(gather(source, torch.tensor([3, 15, 16, 39]), torch.float32), tensor[[3, 15, 16, 39]])
    assert all(start % 16 == 0 for start, _ in source.reads)


def test_changes_do_not_depend_on_how_much_is_at_hand():
    """A layer, a slab, and gathered rows change as the whole model does."""
    ckpt = stand_in("gqa6")
    change = Change({"out_head.weight": "BF16"}, shake=0.01, seed=3)
    whole = load_reference(ckpt)
    perturb(whole, through=change.through, shake=0.01, seed=3)
    model = LayeredModel(ckpt)
    for layer in range(model.n_layers):
        with model.layer(layer) as block:
            model.change(change)
            for name, param in whole.block(layer).named_parameters():
                assert torch.equal(param, dict(block.named_parameters())[name])
    ids = tokens(get_shape("gqa6"), 20)
    with model.front():
        model.change(change)
        assert torch.equal(model.embed(ids), whole.embed(ids))
    with torch.inference_mode():
        x = torch.randn(1, 4, 48, generator=torch.Generator().manual_seed(0))
        wanted = whole.head(x)
        for head in model.slabs(4):
            plain = head(x)
            head.change(change)
            assert torch.equal(head(x), wanted[..., head.start : head.stop])
            assert not torch.equal(plain, head(x))


def test_what_does_not_fit_runs_layer_by_layer_and_says_so(monkeypatch):
    a, said = stand_in(), []
    monkeypatch.setattr(verify_module, "available_memory", lambda: verify_module.BESIDE + 1000)
    got = verify(a, a, device="cpu", on_step=said.append)
    assert got.layerwise
    assert got.as_json()["layerwise"] is True
    assert "do not fit" in said[0]
    assert not verify(a, a, device="cpu", layerwise=False).layerwise
    for free in (1 << 40, None):
        monkeypatch.setattr(verify_module, "available_memory", lambda free=free: free)
        assert not verify(a, a, device="cpu").layerwise
        assert verify(a, a, device="cpu", layerwise=True).layerwise


def test_tensors_that_do_not_fit_the_model_are_refused_before_anything_is_read():
    broken = stand_in()
    del broken.state["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ConvertError, match=r"trf_blocks\.1\.ff\.fc2\.weight"):
        LayeredModel(broken)


@pytest.mark.parametrize("way", [False, True])
def test_sides_of_other_depths_and_widths_differ(way):
    """Their hidden states cannot be compared, which is said."""
    a = stand_in()
    for other in (replace(get_shape("gqa8"), layers=3), replace(get_shape("gqa8"), hidden=48, ff=80)):
        for one, second in ((a, stand_in(other)), (stand_in(other), a)):
            got = verify(one, second, device="cpu", layerwise=way)
            assert (got.verdict, got.departs) == ("fail", None)
            assert "different numbers of layers" in got.detail()["absent"]["layers"]


def test_nan_in_a_layer_never_passes():
    def change(state: Tensors) -> None:
        state["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")

    got = verify(stand_in(), stand_in(change=change), device="cpu", layerwise=True)
    assert got.verdict == "fail"
    assert "finite" in got.message


# Several prompts


def test_prompts_are_run_together_and_the_worst_is_named():
    """A fault in one row of the embedding: only the prompt with that token shows it."""

    def change(state: Tensors) -> None:
        state["model.embed_tokens.weight"][77] *= -1

    a, b = stand_in(), stand_in(pairing="interleaved", change=change)
    clean, dirty = list(range(20, 60)), [*range(0, 30), 77, *range(30, 40)]
    for way in (False, True):
        got = verify(a, b, prompts=[clean, dirty, clean[:20]], device="cpu", layerwise=way)
        assert (got.verdict, got.n_tokens) == ("fail", len(clean) + len(dirty) + 20)
        assert [p.within for p in got.prompts] == [True, False, True]
        assert got.worst_prompt is got.prompts[1]
        assert got.first_diff_position == got.prompts[1].first_diff_position == 30
        value = got.as_json()
        assert [p["n_tokens"] for p in value["prompts"]] == [40, 41, 20]
        assert value["worst_prompt"] == shortened(dirty)
        assert f"from position 30 on of {shortened(dirty)!r}" in got.message
    alone = verify(a, b, tokens=clean, device="cpu")
    assert alone.verdict == "pass"  # the negative control: without that token nothing is wrong
    assert alone.distance.nmse == pytest.approx(got.prompts[0].distance.nmse)
    assert alone.tolerance == pytest.approx(got.prompts[0].tolerance)
    assert "prompts" not in alone.as_json()
    both = verify(a, stand_in(pairing="interleaved"), prompts=[clean, dirty], device="cpu")
    assert both.verdict == "pass"
    assert len(both.detail()["positions"]["kl"]) == 81


def test_short_prompts_are_weak_together():
    a = stand_in()
    assert verify(a, a, prompts=[[1, 2, 3], [4, 5, 6]], device="cpu").verdict == "weak"


def test_prompt_files(tmp_path):
    file = tmp_path / "prompts"
    file.write_text("one prompt\n\n  and another \n")
    assert read_prompts(file) == ["one prompt", "  and another "]
    file.write_text('["a", [1, 2], "b\\nc"]')
    assert read_prompts(file) == ["a", [1, 2], "b\nc"]
    for text, why in (("", "no prompts"), ("[]", "no prompts"), ("[1", "is none"), ('["a", {}]', "no prompt"),
                      ("[[1, true]]", "no prompt"), ('[""]', "no prompt")):  # fmt: skip
        file.write_text(text)
        with pytest.raises(UsageError, match=why):
            read_prompts(file)
    with pytest.raises(UsageError, match="cannot be read"):
        read_prompts(tmp_path / "none")
    a = stand_in()
    with pytest.raises(UsageError, match="no prompts"):
        verify(a, a, prompts=[])
    with pytest.raises(UsageError, match="Give prompts, or"):
        verify(a, a, prompts=["a"], text="b")
    with pytest.raises(UsageError, match="outside the vocabulary"):
        verify(a, a, prompts=[[1, 2], [128]])


# What a page draws


def test_details_are_the_figures_themselves():
    a, b = stand_in(), stand_in(pairing="interleaved", change=swap(1, "mlp.gate_proj", "mlp.up_proj"))
    got = verify(a, b, device="cpu", tokens=tokens(get_shape("gqa8"), 60)[0].tolist())
    found = got.detail()
    ids = tokens(get_shape("gqa8"), 60)
    x, y = (logits(load_reference(side), ids).double() for side in (a, b))
    kl = torch.nn.functional.kl_div(y.log_softmax(-1), x.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(torch.tensor(found["positions"]["kl"]), kl.float(), rtol=1e-4, atol=1e-6)
    error = (x - y).square().sum(-1) / x.square().sum(-1)
    torch.testing.assert_close(torch.tensor(found["positions"]["nmse"]), error.float(), rtol=1e-4, atol=1e-6)
    assert len(found["positions"]["noise_nmse"]) == len(found["positions"]["control_kl"]) == 60
    states = zip(whole_states(a, ids), whole_states(b, ids), strict=True)
    for entry, (one, other) in zip(found["layers"], states, strict=False):
        wanted = float((one - other).double().square().sum() / one.double().square().sum())
        assert entry["error"] == pytest.approx(wanted, rel=1e-4)
    assert found["layers"][-1]["error"] == got.distance.nmse
    sample = found["logits"]
    assert len(sample["a"]) == len(sample["b"]) == len(sample["control"]) == 2000
    pairs = {(round(float(p), 4), round(float(q), 4)) for p, q in zip(x.flatten(), y.flatten(), strict=True)}
    assert sum((round(p, 4), round(q, 4)) in pairs for p, q in zip(sample["a"], sample["b"], strict=True)) > 1900
    assert found["departs"]["step"] == "layer 1"
    assert found["sides"]["a"]["dtypes"] == {"F32": 21}
    assert verify(a, b, device="cpu").detail()["logits"] == verify(a, b, device="cpu").detail()["logits"]
    assert len(verify(a, b, device="cpu", tokens=[1, 2, 3]).detail()["logits"]["a"]) == 3 * 128
    json.dumps(found, allow_nan=False)

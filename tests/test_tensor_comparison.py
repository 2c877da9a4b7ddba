"""The tensor comparison against torch: every pair of layouts, types, and planted differences with exact numbers."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
from convert import tensor_comparison, tensor_delta
from convert.tensor_comparison import compare_tensors
from convert.tensor_delta import Rules, TensorDelta, measure
from tests.fixtures import make_gguf, make_hf, make_meta, make_scratch
from tests.fixtures.weights import to_interleaved

MAKERS = {"hf": make_hf, "meta": make_meta, "scratch": make_scratch, "gguf": make_gguf}
K = "model.layers.1.self_attn.k_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A path per layout, shape and seed, made when first asked for."""
    root, found = tmp_path_factory.mktemp("made"), {}

    def make(layout: str, shape: str, seed: int = 0) -> Path:
        key = (layout, shape, seed)
        if key not in found:
            folder = root / f"{layout}-{shape}-{seed}"
            found[key] = MAKERS[layout](folder / "m.gguf" if layout == "gguf" else folder, shape, seed=seed).path
        return found[key]

    return make


def changed_copy(folder: Path, change, shape: str = "gqa8", **options: object) -> tuple[Path, Path]:
    """A Hugging Face folder and a copy in which ``change`` has been at the tensors."""
    good = make_hf(folder / "good", shape, **options)
    state = {k: t.clone() for k, t in good.tensors.items()}
    change(state)
    bad = folder / "bad"
    bad.mkdir()
    (bad / "config.json").write_text((good.path / "config.json").read_text())
    save_file(state, bad / "model.safetensors", metadata={"format": "pt"})
    return good.path, bad


def deltas(a: Path, b: Path, **options: object) -> dict[str, TensorDelta]:
    with convert.open_checkpoint(a) as first, convert.open_checkpoint(b) as second:
        return {d.name: d for d in compare_tensors(first, second, **options)}


def figures(a: torch.Tensor, b: torch.Tensor) -> dict[str, float]:
    """The figures by torch, in float64."""
    x, y = a.double().flatten(), b.double().flatten()
    return {
        "max_abs": float((x - y).abs().max()),
        "error": float((x - y).norm() / x.norm()),
        "cosine": float(torch.nn.functional.cosine_similarity(x, y, dim=0)),
        "changed": float((x != y).double().mean()),
        "count": int((x != y).sum()),
    }


def check(delta: TensorDelta, a: torch.Tensor, b: torch.Tensor) -> None:
    """Figures as torch has them; the place of the largest difference is one."""
    for name, wanted in figures(a, b).items():
        assert getattr(delta, name) == pytest.approx(wanted, rel=1e-6, abs=1e-12), name
    assert delta.where is not None
    assert float((a.double() - b.double())[delta.where].abs()) == pytest.approx(delta.max_abs, rel=1e-6)


@pytest.fixture(params=[1 << 20, 2048], ids=["whole", "in blocks"])
def blocks(request, monkeypatch):
    monkeypatch.setattr(tensor_comparison, "BLOCK", request.param)
    monkeypatch.setattr(tensor_delta, "PIECE", max(256, request.param // 4))


@pytest.mark.parametrize(("first", "second"), list(itertools.product(MAKERS, MAKERS)))
@pytest.mark.parametrize("shape", ["gqa8", "tied", "hd6", "h32kv4"])
def test_every_pair_of_layouts_is_equal(made, blocks, first, second, shape):
    found = deltas(made(first, shape), made(second, shape))
    turned = {n for n, d in found.items() if d.relation == "turned"}
    half = {"hf", "scratch"}
    assert all(
        d.relation in ("equal", "turned") and (d.max_abs, d.changed, d.cosine) == (0, 0, 1) for d in found.values()
    )
    assert turned == (
        {n for n in found if "q_proj" in n or "k_proj" in n} if (first in half) != (second in half) else set()
    )
    heads = {"meta", "scratch"}  # these always store one
    instead = shape == "tied" and (first in heads) != (second in heads)
    note = f"{'B' if first in heads else 'A'} stores none and takes the embedding"
    assert ("lm_head.weight" in found) == (shape != "tied" or first in heads or second in heads)
    assert [d.note for d in found.values() if d.note] == ([note] if instead else [])


@pytest.mark.parametrize(("first", "second"), list(itertools.product(MAKERS, MAKERS)))
def test_control_other_weights_are_different_in_every_pair(made, first, second):
    assert {d.relation for d in deltas(made(first, "gqa8"), made(second, "gqa8", seed=1)).values()} == {"different"}


def test_rows_in_the_wrong_order_are_not_equal(tmp_path, blocks):
    def permute(state):
        state[K] = to_interleaved(state[K], 2)

    good, bad = changed_copy(tmp_path, permute)
    found = deltas(good, bad)
    assert {n for n, d in found.items() if d.relation != "equal"} == {K}
    assert found[K].relation == "reordered"
    check(found[K], load_file(good / "model.safetensors")[K], load_file(bad / "model.safetensors")[K])
    # The same file, said to be in Meta's order: now it is what the words say.
    with convert.open_checkpoint(good) as a, convert.open_checkpoint(bad, qk_layout="meta") as b:
        assert {d.name: d.relation for d in compare_tensors(a, b)}[K] == "turned"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_planted_values_have_torchs_figures(tmp_path, blocks, dtype):
    def plant(state):
        state[GATE][95, 63] += 1
        state[GATE][3, 5] *= -1
        state[K] = state[K] * 1.5
        state["model.norm.weight"] = -state["model.norm.weight"]

    if dtype == "float64":
        good, bad = changed_copy(tmp_path, lambda s: s.update({k: t.double() for k, t in s.items()}))
        state = load_file(bad / "model.safetensors")
        state[GATE][0, 0] += 1e-12
        save_file(state, bad / "model.safetensors")
        found = deltas(bad, good)
        assert found[K].relation == "equal" and found[GATE].count == 1
        check(found[GATE], state[GATE], load_file(good / "model.safetensors")[GATE])
        return
    good, bad = changed_copy(tmp_path, plant, dtype=dtype)
    found = deltas(good, bad)
    a, b = load_file(good / "model.safetensors"), load_file(bad / "model.safetensors")
    wrong = {GATE, K, "model.norm.weight"}
    assert {n for n, d in found.items() if d.relation != "equal"} == wrong
    for name in wrong:
        check(found[name], a[name], b[name])
    assert {found[name].relation for name in wrong} == {"different"}  # turned signs are no other order of rows
    assert found[GATE].count == 2 and found[GATE].where == (95, 63)
    assert found["model.norm.weight"].cosine == pytest.approx(-1) and found["model.norm.weight"].error == pytest.approx(
        2
    )


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(["float32", "bfloat16", "float16"], 2)))
def test_a_narrower_type_is_rounding(tmp_path, blocks, one, other):
    wide = make_hf(tmp_path / "a", "gqa8", dtype=one)
    narrow = tmp_path / "b"
    narrow.mkdir()
    (narrow / "config.json").write_text((wide.path / "config.json").read_text())
    state = {k: t.to(getattr(torch, other)) for k, t in wide.tensors.items()}
    save_file(state, narrow / "model.safetensors")
    exact = {k for k, t in state.items() if torch.equal(t.double(), wide.tensors[k].double())}
    found = deltas(wide.path, narrow)
    for name, delta in found.items():
        assert delta.relation == ("equal" if name in exact else "rounded"), name
        if name not in exact:
            assert delta.note == f"equal after rounding to {other}"
            check(delta, wide.tensors[name], state[name])
    # The control: cut off instead of rounded is not equal.
    if (one, other) == ("float32", "bfloat16"):
        cut = {k: (t.view(torch.int32) & -65536).view(torch.float32).bfloat16() for k, t in wide.tensors.items()}
        save_file(cut, narrow / "model.safetensors")
        assert {d.relation for d in deltas(wide.path, narrow).values()} == {"different"}


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
def test_block_types_are_close_and_faults_are_not(tmp_path, blocks, kind):
    good = make_hf(tmp_path / "hf", "gqa8")
    blocked = make_gguf(tmp_path / "m.gguf", "gqa8", type=kind)
    found = deltas(good.path, blocked.path)
    for name, delta in found.items():
        assert delta.relation == ("equal" if delta.dtypes[1] == "F32" else "close"), name
        if delta.relation == "close":
            assert delta.note == f"within the rounding of {kind}" and delta.dtypes == ("F32", kind.upper())
            check(delta, good.tensors[name], blocked.hf[name])
    same = deltas(blocked.path, make_gguf(tmp_path / "n.gguf", "gqa8", type=kind).path)
    assert {d.relation for d in same.values()} == {"equal"}
    wrong = dict(good.tensors)
    wrong[K] = to_interleaved(wrong[K], 2)
    wrong[GATE] = wrong[GATE] * 1.5
    save_file(wrong, good.path / "model.safetensors")
    found = deltas(good.path, blocked.path)
    assert {n for n, d in found.items() if not d.same} == {K, GATE}


@pytest.mark.parametrize("kind", ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k"])
def test_k_types_are_close(tmp_path, kind):
    pytest.importorskip("convert.ggml").available() or pytest.skip("no ggml")
    good = make_hf(tmp_path / "hf", "kquant")
    convert.convert_checkpoint(good.path, tmp_path / "m.gguf", to="gguf", type=kind, tokenizer=False)
    found = deltas(good.path, tmp_path / "m.gguf")
    assert all(d.same for d in found.values()), {n: d.relation for n, d in found.items() if not d.same}
    assert kind.upper() in {d.dtypes[1] for d in found.values()}
    reader = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}["blk.0.ffn_gate.weight"]
    check(found[GATE], good.tensors[GATE], torch.from_numpy(gguf.quants.dequantize(reader.data, reader.tensor_type)))


def test_a_quantised_file_and_its_dequantised_copy(tmp_path, blocks):
    blocked = make_gguf(tmp_path / "m.gguf", "gqa8", type="q8_0")
    convert.convert_checkpoint(blocked.path, tmp_path / "f32", to="hf", dtype="float32")
    convert.convert_checkpoint(blocked.path, tmp_path / "bf16", to="scratch", dtype="bfloat16")
    assert {d.relation for d in deltas(blocked.path, tmp_path / "f32").values()} == {"equal", "turned"}
    assert {d.relation for d in deltas(blocked.path, tmp_path / "bf16").values()} == {"rounded"}


def test_missing_extra_and_shape(tmp_path):
    small, large = make_hf(tmp_path / "a", "gqa8"), make_hf(tmp_path / "b", "gqa8", vocab=136)
    found = deltas(small.path, large.path)
    assert {n for n, d in found.items() if d.relation == "shape"} == {"model.embed_tokens.weight", "lm_head.weight"}
    assert found["lm_head.weight"].shapes == ((128, 64), (136, 64))
    assert found[K].relation == "different"  # other random numbers
    good, bad = changed_copy(tmp_path / "c", lambda s: (s.pop(K), s.update({"extra.weight": torch.ones(3)})))
    found = deltas(good, bad)
    assert {d.name: d.relation for d in found.values() if not d.same} == {K: "only_a", "extra.weight": "only_b"}
    assert list(found)[-1] == "extra.weight" and found[K].max_abs is None


def test_a_lost_head_is_missing_and_a_tied_one_is_not(tmp_path):
    good, bad = changed_copy(tmp_path, lambda s: s.pop("lm_head.weight"))
    assert deltas(good, bad)["lm_head.weight"].relation == "only_a"  # the config says untied
    tied = make_hf(tmp_path / "tied", "tied", head="equal").path
    other = make_hf(tmp_path / "other", "tied", head="different").path
    plain = make_hf(tmp_path / "plain", "tied").path
    assert deltas(plain, tied)["lm_head.weight"].relation == "equal"
    found = deltas(plain, other)["lm_head.weight"]
    assert (
        found.relation == "reordered"
        and found.note == "A stores none and takes the embedding; the same rows in another order"
    )


def test_nan_and_infinity(tmp_path, blocks):
    def plant(state):
        state[GATE][1, 2], state[GATE][1, 3], state[GATE][4, 4] = float("nan"), float("inf"), 7.0
        state[K][:] = float("nan")

    good, bad = changed_copy(tmp_path, plant)
    found = deltas(good, bad)
    a = load_file(good / "model.safetensors")[GATE]
    assert (found[GATE].relation, found[GATE].not_finite, found[GATE].count) == ("different", 2, 3)
    assert "not in these numbers: 2" in found[GATE].note
    assert found[GATE].max_abs == pytest.approx(abs(7 - float(a[4, 4]))) and found[GATE].where == (4, 4)
    assert found[K].not_finite == found[K].count == 16 * 64 and found[K].max_abs == 0
    assert {d.relation for d in deltas(bad, bad).values()} == {"equal"}
    assert deltas(good, bad, tolerance=(1e9, 0))[K].relation == "different"


def test_signs_of_zeros_are_bits_and_within_a_tolerance_of_nothing(tmp_path):
    def zero(sign):
        return lambda s: s.update({"model.norm.weight": torch.full((64,), sign * 0.0)})

    _, plus = changed_copy(tmp_path / "a", zero(1))
    _, minus = changed_copy(tmp_path / "b", zero(-1))
    found = deltas(plus, minus)["model.norm.weight"]
    assert (found.relation, found.note, found.max_abs, found.cosine) == (
        "different",
        "only signs of zeros differ",
        0,
        None,
    )
    assert deltas(plus, minus, tolerance=(0, 0))["model.norm.weight"].relation == "close"


def test_tolerance(tmp_path, blocks):
    good, bad = changed_copy(tmp_path, lambda s: s[GATE].mul_(1.001))
    a, b = (load_file(p / "model.safetensors")[GATE] for p in (good, bad))
    for atol, rtol in ((0, 1.1e-3), (2e-4, 0), (0, 0.9e-3), (1e-9, 1e-9)):
        beyond = int(((a.float() - b.float()).abs() > atol + rtol * a.abs()).sum())
        found = deltas(good, bad, tolerance=(atol, rtol))[GATE]
        assert found.beyond == pytest.approx(beyond, abs=2) and (found.relation == "close") == (beyond == 0)
    assert deltas(good, bad)[GATE].beyond is None


def test_values_whose_squares_overflow():
    big = np.full(5000, 3e38, np.float32)
    tally = measure(big, big * np.float32(0.5), Rules(("F32", "F32"), ("F32", "F32")), 0)
    assert tally.not_finite == 0 and math.sqrt(tally.dd / tally.aa) == pytest.approx(0.5)
    assert tally.largest == pytest.approx(1.5e38, rel=1e-6)


def test_only_and_threads(tmp_path):
    a, b = make_hf(tmp_path / "a", "gqa8").path, make_hf(tmp_path / "b", "gqa8", seed=1).path
    assert set(deltas(a, b, only="k_proj")) == {K, K.replace("1", "0")}
    assert set(deltas(a, b, only="model.layers.1.*k_proj*")) == {K}
    one, four = deltas(a, b, threads=1), deltas(a, b, threads=4)
    assert list(one) == list(four) and one == four
    told: list[int] = []
    deltas(a, b, progress=told.append)
    assert sum(told) == sum(t.numel() * 4 for t in load_file(a / "model.safetensors").values()) * 2


def test_experts_and_fused_tensors(tmp_path):
    transformers = pytest.importorskip("transformers")  # noqa: F841
    from tests.families.test_qwen3_moe import make as make_moe

    tiny = make_moe(tmp_path / "moe")
    convert.convert_checkpoint(tmp_path / "moe", tmp_path / "out", to="scratch", tokenizer=False)
    assert {d.relation for d in deltas(tmp_path / "moe", tmp_path / "out").values()} == {"equal"}
    state = load_file(tmp_path / "out" / "model.safetensors")
    name = next(n for n in state if "1.ff" in n and ".3." in n)
    state[name][2, 1] += 1
    save_file(state, tmp_path / "out" / "model.safetensors")
    found = [d for d in deltas(tmp_path / "moe", tmp_path / "out").values() if d.relation != "equal"]
    assert len(found) == 1 and found[0].where == (3, 2, 1) and found[0].count == 1
    assert found[0].max_abs == pytest.approx(1, rel=1e-6) and tiny is not None
    for number in range(2):
        convert.convert_checkpoint(
            tmp_path / "moe", tmp_path / f"{number}.gguf", to="gguf", type="q8_0", tokenizer=False
        )
    assert {d.relation for d in deltas(tmp_path / "0.gguf", tmp_path / "1.gguf").values()} == {"equal"}
    found = [d for d in deltas(tmp_path / "moe", tmp_path / "0.gguf").values() if "experts" in d.name]
    assert {(d.dtypes[1], d.relation) for d in found} <= {("Q8_0", "close"), ("F16", "rounded")} and found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_torch_and_bounded_memory(tmp_path):
    """Two threads hold a few blocks, whatever the tensor's size; nothing imports torch."""
    for name, seed in (("a", 0), ("b", 1)):
        make_hf(tmp_path / name, "gqa8", vocab=200_000, seed=seed)  # a tensor of 51 MB, twice
    program = (
        "import pathlib, sys, json, convert\n"
        "d = convert.diff(sys.argv[1], sys.argv[2])\n"
        "lines = pathlib.Path('/proc/self/status').read_text().splitlines()\n"
        "peak = next(x for x in lines if x.startswith('VmHWM'))\n"  # since exec: the parent's peak is not in it
        "print(json.dumps([d.verdict, 'torch' in sys.modules, int(peak.split()[1]) >> 10]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "a"), str(tmp_path / "b")],
        capture_output=True,
        text=True,
        check=True,
    )
    verdict, torch_there, peak = json.loads(done.stdout)
    assert (verdict, torch_there) == ("different", False)
    assert peak < 110, peak


def test_types_that_are_none_of_weights_are_compared_as_bytes(tmp_path):
    """Integers, for instance: the checkpoint is refused elsewhere, and compared here as far as it goes."""

    def narrow(state):
        state[GATE] = (1000 * state[GATE]).to(torch.int16)

    good, bad = changed_copy(tmp_path, narrow)
    found = deltas(good, bad)[GATE]
    assert (found.relation, found.dtypes, found.max_abs) == ("different", ("F32", "I16"), None)
    assert {d.relation for d in deltas(bad, bad).values()} == {"equal"}
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((bad / "config.json").read_text())
    state = load_file(bad / "model.safetensors")
    state[GATE][1, 2] ^= 1
    save_file(state, other / "model.safetensors")
    found = deltas(bad, other)[GATE]
    assert (found.relation, found.count, found.changed) == ("different", 1, 1 / (96 * 64))
    assert found.note == "compared as bytes, for the type is none of weights"


def test_strided_tensors(tmp_path, blocks):
    """A .pth whose matrices are stored transposed, against the same values stored plainly."""
    a = make_scratch(tmp_path / "a", "gqa8", format="pth", strided=True).path
    b = make_scratch(tmp_path / "b", "gqa8").path
    assert {d.relation for d in deltas(a, b).values()} == {"equal"}
    assert {d.relation for d in deltas(a, make_hf(tmp_path / "c", "gqa8", seed=2).path).values()} == {"different"}


def test_a_view_is_compared_as_what_it_shows(tmp_path):
    from convert.faults import FAULTS

    with convert.open_checkpoint(make_hf(tmp_path / "a", "gqa8").path) as ckpt:
        view = FAULTS["k-permuted"].undo(ckpt)
        found = {d.name: d.relation for d in compare_tensors(ckpt, view)}
    assert {n for n, relation in found.items() if relation == "reordered"} == {n for n in found if "k_proj" in n}
    assert set(found.values()) == {"equal", "reordered"} and len(found) == 21

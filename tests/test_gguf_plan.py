"""GGUF files as we write them, read back with the ``gguf`` package: every value, every type, every substitution."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
from convert import ggml
from convert.errors import ConvertError, UsageError
from tests.fixtures import make_gguf, make_hf, make_meta, make_scratch
from tests.fixtures.ggml import gguf_state, rope_divisors
from tests.fixtures.weights import hf_state, llama3_scaling
from tests.gguf_files import pieces, tensors, values

needs_ggml = pytest.mark.skipif(not ggml.available(), reason="needs the extra quantize")


def export(source: Path, out: Path, type: str = "f32", **options: object) -> convert.conversion.Summary:
    """Convert without a tokenizer."""
    return convert.convert_checkpoint(source, out, to="gguf", type=type, **{"tokenizer": False, **options})


def same(found: dict[str, np.ndarray], wanted: dict[str, torch.Tensor]) -> bool:
    """The same names, shapes and bits as float32."""
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())
    return all(
        found[k].shape == tuple(v.shape) and np.array_equal(found[k], v.float().numpy()) for k, v in wanted.items()
    )


# ---- values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("maker", [make_hf, make_meta, make_scratch])
@pytest.mark.parametrize("shape", ["gqa8", "gqa6", "mha", "tied", "hd6", "h32kv4"])
def test_every_source_gives_the_tensors_that_others_code_writes(tmp_path, maker, shape):
    made = maker(tmp_path / "source", shape)
    export(made.path, tmp_path / "a.gguf")
    wanted = gguf_state(hf_state(made.shape), made.shape)
    assert same(values(tmp_path / "a.gguf"), wanted)
    wanted["blk.0.attn_k.weight"] = wanted["blk.0.attn_k.weight"].roll(1, 0)
    assert not same(values(tmp_path / "a.gguf"), wanted)  # the control: another order of K's rows is seen


def test_biases_and_scaling(tmp_path):
    made = make_hf(tmp_path / "source", "gqa8", attention_bias=True, mlp_bias=True, scaling=8)
    export(made.path, tmp_path / "a.gguf")
    found = values(tmp_path / "a.gguf")
    assert next(iter(found)) == "rope_freqs.weight"
    divisors = found.pop("rope_freqs.weight")
    np.testing.assert_allclose(divisors, rope_divisors(made.shape, llama3_scaling(8)), rtol=1e-6)
    assert divisors.max() == 8 and divisors.min() == 1
    assert same(found, gguf_state(made.hf, made.shape))
    assert any(k.endswith("attn_q.bias") for k in found) and any(k.endswith("ffn_down.bias") for k in found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("type", ["f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
def test_bytes_of_each_type_are_those_of_the_package(tmp_path, type, dtype):
    """Matrices in the type (Q6_K for the head where the mixture says so), vectors in float32."""
    made = make_hf(tmp_path / "source", "gqa8", dtype=dtype)
    export(made.path, tmp_path / "a.gguf", type)
    found = tensors(tmp_path / "a.gguf")
    kind = gguf.GGMLQuantizationType[type.upper()]
    checked = 0
    for name, tensor in gguf_state(made.hf, made.shape).items():
        if tensor.ndim == 1:
            assert found[name][0] == "F32" and np.array_equal(found[name][1], tensor.float().numpy())
        elif found[name][0] == kind.name:
            wanted = gguf.quants.quantize(tensor.float().numpy(), kind)
            assert found[name][1].tobytes() == wanted.tobytes(), name
            checked += 1
    assert checked >= 15, checked  # all but the head


@needs_ggml
@pytest.mark.parametrize("type", ["q2_k", "q3_k_m", "q4_k_s", "q4_k_m", "q5_k_m", "q6_k"])
def test_k_mixtures_hold_the_model(tmp_path, type):
    """Read back by the package, whose dequantisers are not ours: the error is that of the type, and order shows."""
    made = make_hf(tmp_path / "source", "kquant")
    export(made.path, tmp_path / "a.gguf", type)
    found, wanted = values(tmp_path / "a.gguf"), gguf_state(made.hf, made.shape)
    kinds = {name: kind for name, (kind, _) in tensors(tmp_path / "a.gguf").items()}
    limit = {"Q2_K": 0.45, "Q3_K": 0.25, "Q4_K": 0.12, "Q5_K": 0.06, "Q6_K": 0.03, "F32": 0.0}
    for name, tensor in wanted.items():
        error = np.abs(found[name] - tensor.numpy()).mean() / 0.2
        assert error <= limit[kinds[name]], (name, kinds[name], error)
    assert kinds["output.weight"] == "Q6_K" and kinds["blk.0.attn_norm.weight"] == "F32"
    assert kinds["blk.1.ffn_gate.weight"] == f"Q{type[1]}_K"


# ---- choosing types --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "kind", "number"), [("bfloat16", "BF16", 32), ("float16", "F16", 1), ("float32", "F16", 1)]
)
def test_auto_keeps_16_bits(tmp_path, dtype, kind, number):
    made = make_hf(tmp_path / "source", "gqa8", dtype=dtype)
    summary = export(made.path, tmp_path / "a.gguf", "auto")
    found = tensors(tmp_path / "a.gguf")
    assert {found[n][0] for n in found if n.endswith("norm.weight")} == {"F32"}
    assert {found[n][0] for n in found if not n.endswith("norm.weight")} == {kind}
    assert gguf.GGUFReader(tmp_path / "a.gguf").fields["general.file_type"].contents() == number
    assert any("--type auto" in note for note in summary.notes)
    if dtype != "float32":  # 16-bit values are the source's own bits
        head = made.hf["lm_head.weight"].view(torch.int16).numpy().tobytes()
        assert found["output.weight"][1].tobytes() == head


def test_rows_that_are_no_whole_blocks_are_known_before_writing_with_their_price(tmp_path):
    made = make_hf(tmp_path / "source", "std")  # 48 columns, 80 in ffn_down
    plan = convert.plan_conversion(made.path, "gguf", type="q8_0", tokenizer=False)
    matrices = [t for t in made.hf.values() if t.ndim == 2]
    price = sum(t.numel() * 2 - t.numel() * 34 // 32 for t in matrices)
    by_columns = [n for n in plan.notes if "F16 in place of Q8_0" in n]
    assert len(by_columns) == len({t.shape[1] for t in matrices}) == 2
    assert any("blk.{0-1}.attn_q.weight" in n and "rows of 48 are not a multiple of 32" in n for n in by_columns)
    assert any(f"{len(matrices)} tensors, {price:+,} bytes in all" in n for n in plan.notes), (price, plan.notes)
    with pytest.raises(UsageError) as caught:
        export(made.path, tmp_path / "no.gguf", "q8_0", fallback=False)
    assert "token_embd.weight" in str(caught.value.problems[0].message) and caught.value.exit_code == 2
    assert not (tmp_path / "no.gguf").exists()
    export(made.path, tmp_path / "a.gguf", "q8_0")
    assert {k for k, _ in tensors(tmp_path / "a.gguf").values()} == {"F16", "F32"}
    other = make_hf(tmp_path / "even", "gqa8")
    export(other.path, tmp_path / "b.gguf", "q8_0", fallback=False)  # the control: rows of 64 and 96


def test_a_type_for_some_tensors(tmp_path):
    made = make_hf(tmp_path / "source", "gqa8")
    export(
        made.path,
        tmp_path / "a.gguf",
        "q8_0",
        tensor_types=[("*.ffn_down.weight", "f16"), ("blk.1.ffn_down.*", "q4_0")],
    )
    kinds = {name: kind for name, (kind, _) in tensors(tmp_path / "a.gguf").items()}
    assert kinds["blk.0.ffn_down.weight"] == "F16" and kinds["blk.1.ffn_down.weight"] == "Q4_0"
    assert kinds["blk.0.ffn_up.weight"] == "Q8_0"
    with pytest.raises(UsageError, match="fits no tensor"):
        export(made.path, tmp_path / "b.gguf", "q8_0", tensor_types=[("model.layers.*", "f16")])


@pytest.mark.parametrize(("type", "reason"), [("iq4_xs", "importance matrix"), ("q2_k_s", "matrix"), ("q9", "no type")])
def test_types_that_are_refused_say_why(tmp_path, type, reason):
    made = make_hf(tmp_path / "source", "gqa8")
    with pytest.raises(UsageError, match=reason):
        export(made.path, tmp_path / "a.gguf", type)


def test_without_ggml_the_package_quantises_the_same_bytes_and_says_so(tmp_path, monkeypatch):
    made = make_hf(tmp_path / "source", "gqa8")
    export(made.path, tmp_path / "with.gguf", "q8_0")
    monkeypatch.setattr(ggml, "available", lambda: False)
    summary = export(made.path, tmp_path / "without.gguf", "q8_0")
    assert sum("gguf package" in n for n in summary.notes) == 1
    with_, without = tensors(tmp_path / "with.gguf"), tensors(tmp_path / "without.gguf")
    assert all(with_[n][1].tobytes() == without[n][1].tobytes() for n in with_)
    with pytest.raises(UsageError, match="ggml"):
        export(made.path, tmp_path / "k.gguf", "q4_k_m")


# ---- values that stop ------------------------------------------------------------------------------------------


def spoil(folder: Path, name: str, row: int, value: float, count: int = 1) -> None:
    """Write ``value`` into a stored tensor."""
    state = load_file(folder / "model.safetensors")
    state[name][row, :count] = value
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("type", ["f32", "f16", "bf16", "q8_0", "q4_0", pytest.param("q4_k_m", marks=needs_ggml)])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_one_value_that_is_not_finite_stops(tmp_path, type, dtype, value):
    made = make_hf(tmp_path / "source", "kquant" if type == "q4_k_m" else "gqa8", dtype=dtype)
    spoil(made.path, "model.layers.1.mlp.up_proj.weight", 17, value)
    with pytest.raises(ConvertError) as caught:
        export(made.path, tmp_path / "a.gguf", type)
    (problem,) = caught.value.problems
    assert problem.tensor == "blk.1.ffn_up.weight" and problem.found == {"row": 17, "count": 1}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"], "something was left behind"


def test_a_value_of_70000_does_not_become_float16(tmp_path):
    made = make_hf(tmp_path / "source", "gqa8", dtype="bfloat16")
    spoil(made.path, "model.layers.0.mlp.down_proj.weight", 3, 70000.0, count=4)
    with pytest.raises(ConvertError) as caught:
        export(made.path, tmp_path / "a.gguf", "f16")
    (problem,) = caught.value.problems
    assert problem.kind == "overflow" and problem.tensor == "blk.0.ffn_down.weight"
    assert problem.found == {"row": 3, "count": 4} and "--tensor-type blk.0.ffn_down.weight=bf16" in problem.hint
    assert not list(tmp_path.glob("a.gguf*"))
    export(made.path, tmp_path / "b.gguf", "f16", tensor_types=[("blk.0.ffn_down.weight", "bf16")])  # the hint helps
    export(made.path, tmp_path / "c.gguf", "bf16")
    spoil(made.path, "model.layers.0.mlp.down_proj.weight", 3, 65280.0, count=4)
    export(made.path, tmp_path / "d.gguf", "f16")  # the control: the largest bfloat16 that float16 holds
    assert values(tmp_path / "d.gguf")["blk.0.ffn_down.weight"][3, :4].tolist() == [65280.0] * 4


# ---- several files, and GGUF as the source ---------------------------------------------------------------------


def test_split_files_hold_what_one_file_holds(tmp_path):
    made = make_hf(tmp_path / "source", "gqa8", tokenizer=True)
    export(made.path, tmp_path / "one.gguf", "f32", tokenizer=True)
    size = (tmp_path / "one.gguf").stat().st_size
    summary = export(made.path, tmp_path / "many.gguf", "f32", tokenizer=True, split_max_size=int(size * 0.4))
    paths = pieces(tmp_path / "many.gguf")
    assert [p.name for p in paths] == [f"many-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert not (tmp_path / "many.gguf").exists() and summary.files[0] == paths[0].name
    one, many = tensors(tmp_path / "one.gguf"), tensors(*paths)
    assert list(one) == list(many) and all(one[n][1].tobytes() == many[n][1].tobytes() for n in one)
    readers = [gguf.GGUFReader(p) for p in paths]
    assert [r.fields["split.no"].contents() for r in readers] == [0, 1, 2]
    assert {r.fields["split.tensors.count"].contents() for r in readers} == {len(one)}
    assert "general.architecture" in readers[0].fields and "general.architecture" not in readers[1].fields
    convert.convert_checkpoint(paths[1], tmp_path / "back", to="hf")  # any piece opens all
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == made.hf.keys() and all(torch.equal(back[k], made.hf[k]) for k in back)
    with pytest.raises(UsageError, match="exists already"):
        export(made.path, tmp_path / "many.gguf", "f32", tokenizer=True, split_max_size=int(size * 0.4))
    paths[2].unlink()
    with pytest.raises(ConvertError, match=r"many-00003-of-00003\.gguf"):
        convert.open_checkpoint(paths[0])


def test_gguf_to_gguf_joins_and_keeps_every_byte(tmp_path):
    made = make_gguf(tmp_path / "m.gguf", "gqa8", type="q8_0")
    size = made.path.stat().st_size
    convert.convert_checkpoint(made.path, tmp_path / "s.gguf", to="gguf", split_max_size=size // 2)
    convert.convert_checkpoint(pieces(tmp_path / "s.gguf")[0], tmp_path / "j.gguf", to="gguf")
    before, after = tensors(made.path), tensors(tmp_path / "j.gguf")
    assert before.keys() == after.keys()
    assert all(before[n][0] == after[n][0] and before[n][1].tobytes() == after[n][1].tobytes() for n in before)
    old, new = gguf.GGUFReader(made.path).fields, gguf.GGUFReader(tmp_path / "j.gguf").fields
    lost = [k for k in old if not k.startswith("GGUF.") and (k not in new or old[k].contents() != new[k].contents())]
    assert not lost, lost


def test_unchanged_blocks_move_inside_the_kernel(tmp_path):
    made = make_gguf(tmp_path / "m.gguf", "kquant", type="q4_0")
    with convert.plan_conversion(made.path, "gguf").source as opened:
        plan = convert.plan_conversion(opened, "gguf", tensor_types=[("output.weight", "q8_0")])
        moved = {o.targets[0].name for o in plan.outputs if o.source.extent(0, 1) is not None}
    matrices = {n for n, t in made.tensors.items() if t.ndim == 2}
    assert moved == matrices - {"output.weight"}


def test_gguf_to_gguf_re_types_through_float32(tmp_path):
    made = make_gguf(tmp_path / "m.gguf", "gqa8", type="q8_0")
    summary = convert.convert_checkpoint(made.path, tmp_path / "a.gguf", to="gguf", type="q4_0")
    assert any("quantised again" in n for n in summary.notes)
    found = tensors(tmp_path / "a.gguf")
    for name, tensor in made.tensors.items():  # the dequantised values
        if tensor.ndim == 2 and found[name][0] == "Q4_0":
            wanted = gguf.quants.quantize(tensor.numpy(), gguf.GGMLQuantizationType.Q4_0)
            assert found[name][1].tobytes() == wanted.tobytes(), name
    convert.convert_checkpoint(made.path, tmp_path / "b.gguf", to="gguf", type="f32")
    assert same(values(tmp_path / "b.gguf"), made.tensors)


def test_what_is_in_the_way_is_not_replaced(tmp_path):
    made = make_gguf(tmp_path / "m.gguf", "gqa8")
    with pytest.raises(UsageError, match="source itself"):
        convert.convert_checkpoint(made.path, made.path, to="gguf", overwrite=True)
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(UsageError, match="is a folder"):
        convert.convert_checkpoint(made.path, tmp_path / "folder.gguf", to="gguf")
    with pytest.raises(UsageError, match="no name for a GGUF file"):
        convert.convert_checkpoint(made.path, tmp_path / "out", to="gguf")
    shutil.copy(made.path, tmp_path / "n.gguf")
    with pytest.raises(UsageError, match="exists already"):
        convert.convert_checkpoint(made.path, tmp_path / "n.gguf", to="gguf")
    convert.convert_checkpoint(made.path, tmp_path / "n.gguf", to="gguf", overwrite=True)
    (tmp_path / "n.gguf").unlink()
    convert.convert_checkpoint(made.path, tmp_path / "n.gguf", to="gguf")  # its record alone is in nobody's way
    with pytest.raises(UsageError, match="--type"):
        convert.plan_conversion(made.path, "gguf", dtype="float16")
    with pytest.raises(UsageError, match="GGUF target"):
        convert.plan_conversion(made.path, "hf", type="q8_0")

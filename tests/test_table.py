"""The strict loader: every kind of mistake is an error that names file and row."""

from __future__ import annotations

from pathlib import Path

import pytest

from convert.errors import TableError, UsageError
from convert.table import Ignore, families, load_table, read_table
from convert.table_files import merge, resolve

HEAD = 'family = "mine"\nextends = "llama"\n'


def read(tmp_path: Path, text: str, name: str = "mine.toml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return read_table(path)


def test_the_negative_control_loads(tmp_path):
    table = read(tmp_path, HEAD)
    assert table.family == "mine"
    assert list(table.rows) == list(load_table("llama").rows)


MISTAKES = {
    "unknown top key": ("colour = 1", "colour"),
    "unknown row key": ('[block.attn.q]\ncolour = "x"', r"block\.attn\.q.*colour"),
    "not a row": ('[block.attn]\nq = "x"', r"block\.attn\.q"),
    "key of a block": ("[block.attn]\nq = 3", r"block\.attn\.q"),
    "fused part": ('[[fused]]\nlayout = "hf"\nname = "qkv"\nparts = ["block.attn.z"]', r"qkv.*block\.attn\.z"),
    "fused key": ('[[fused]]\nlayout = "hf"\nname = "qkv"\nparts = ["block.attn.q"]\ncolour = 1', "fused.*colour"),
    "fused without name": ('[[fused]]\nlayout = "hf"\nparts = ["block.attn.q"]', "fused.*name"),
    "ignore without reason": ('[[ignore]]\nlayout = "hf"\nname = "x"', "ignore.*reason"),
    "refuse without reason": ('[[refuse]]\nlayout = "hf"\nwhen = "H > 1"', "refuse.*reason"),
    "refuse expression": ('[[refuse]]\nlayout = "hf"\nwhen = "colour"\nreason = "x"', "colour"),
    "presence": ('[presence]\nqk_norm = "block.attn.z"', r"presence\.qk_norm.*block\.attn\.z"),
    "tied_to": ('[top.output]\ntied_to = "top.nothing"', r"top\.output.*top\.nothing"),
    "two rows, one name": (
        '[block.attn.x]\nshape = ["D"]\nhf = "mlp.up_proj.weight"',
        r"mlp\.up_proj\.weight.*block\.",
    ),
    "config key": ('[block.attn.q]\nshape = ["colour", "D"]', r"block\.attn\.q.*colour"),
    "config key in when": ('[block.attn.q]\nwhen = "colour > 1"', r"block\.attn\.q.*colour"),
    "config key in rope": ('[block.attn.q]\nrope = "colour"', r"block\.attn\.q.*colour"),
    "config key in rotary": ('[block.attn.q]\nrotary = "colour"', r"block\.attn\.q.*colour"),
    "config key in an operation": (
        '[block.attn.q]\nto.gguf = [{ op = "tile_heads", groups = "colour", per_group = 1, head = 1 }]',
        r"block\.attn\.q.*colour",
    ),
    "operation": ('[block.attn.q]\nto.gguf = [{ op = "colour" }]', r"block\.attn\.q: to\.gguf.*colour"),
    "argument of an operation": (
        '[block.attn.q]\nto.gguf = [{ op = "squeeze", colour = 1 }]',
        r"block\.attn\.q: to\.gguf.*colour.*nothing",
    ),
    "missing argument of an operation": (
        '[block.attn.q]\nto.gguf = [{ op = "tile_columns", groups = 2, head = 1 }]',
        r"block\.attn\.q: to\.gguf.*per_group",
    ),
    "config key in metadata": ('[[metadata]]\nkey = "x"\ntype = "u32"\nvalue = ["1", "colour"]', r"metadata.*colour"),
    "config key in dims": ('[dims]\nX = "colour // 2"', r"dims\.X.*colour"),
    "layout in config": ('[config.colour]\nnano = "x"', r"config\.colour.*nano"),
    "gguf key": ('[config.colour]\ngguf = { key = "x", kind = "u32" }', r"config\.colour.*kind"),
    "convention value": ('[convention]\nhf = { rope = "sideways" }', "convention.hf.*sideways"),
    "convention kind": ('[convention]\nhf = { colour = "half" }', "convention.hf.*colour"),
    "convention layout": ('[convention]\nnano = { rope = "half" }', r"convention\.nano"),
    "call": ('[block.attn.q]\nshape = ["max(H, K)", "D"]', r"block\.attn\.q.*Call"),
    "attribute": ('[block.attn.q]\nshape = ["H.real", "D"]', r"block\.attn\.q.*Attribute"),
    "comprehension": ('[block.attn.q]\nshape = ["[x for x in H]", "D"]', r"block\.attn\.q.*ListComp"),
    "syntax": ('[block.attn.q]\nshape = ["H *", "D"]', r"block\.attn\.q.*expression"),
    "bad TOML": ("[block", "not valid TOML"),
    "a key twice": ('[top.x]\nshape = ["D"]\nshape = ["D"]', "not valid TOML"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(tmp_path, name):
    text, pattern = MISTAKES[name]
    with pytest.raises(TableError, match=rf"(?s)mine\.toml.*{pattern}") as error:
        read(tmp_path, HEAD + text)
    assert error.value.exit_code == 1


@pytest.mark.parametrize("key", ["family", "dims", "prefix", "top", "block"])
def test_a_missing_section(tmp_path, key):
    parts = {
        "family": 'family = "x"\n',
        "dims": '[dims]\nD = "hidden_size"\nL = "n"\n[config.hidden_size]\n[config.n]\n',
        "prefix": '[prefix]\nhf = "h.{l}."\n',
        "top": '[top.a]\nshape = ["D"]\nhf = "a"\n',
        "block": '[block.b]\nshape = ["D"]\nhf = "b"\n',
    }
    whole = "".join(parts.values())
    assert len(read(tmp_path, whole).rows) == 2
    with pytest.raises(TableError, match=rf"mine\.toml.*'{key}'"):
        read(tmp_path, "".join(v for k, v in parts.items() if k != key))


def test_a_row_in_a_layout_without_prefix(tmp_path):
    with pytest.raises(TableError, match=r"mine\.toml.*block\.b.*meta"):
        read(
            tmp_path,
            'family = "x"\n[dims]\nD = "hidden_size"\n[config.hidden_size]\n[prefix]\nhf = "h.{l}."\n'
            '[top.a]\nshape = ["D"]\nhf = "a"\n[block.b]\nshape = ["D"]\nhf = "b"\nmeta = "b"\n',
        )


def test_two_levels_of_extends_and_no_third(tmp_path):
    for name, base in (("one", "llama"), ("two", "one"), ("three", "two")):
        (tmp_path / f"{name}.toml").write_text(f'family = "{name}"\nextends = "{base}"\n', encoding="utf-8")
    assert read_table(tmp_path / "two.toml").family == "two"
    with pytest.raises(TableError, match="at most 2 levels"):
        read_table(tmp_path / "three.toml")


def test_what_begins_anew_is_not_taken_over(tmp_path):
    table = read(
        tmp_path, HEAD + 'anew = ["refuse", "sizes"]\n[[refuse]]\nlayout = "hf"\nwhen = "H > 9"\nreason = "r"\n'
    )
    assert [r.reason for r in table.refuse] == ["r"] and not table.sizes and "Llama3Model" in table.classes
    with pytest.raises(TableError, match="anew: 'blocks' is none of"):
        read(tmp_path, HEAD + 'anew = ["blocks"]\n')


def test_extends_itself_ends(tmp_path):
    with pytest.raises(TableError, match="at most 2 levels"):
        read(tmp_path, 'family = "mine"\nextends = "mine"\n')


def test_extends_nothing(tmp_path):
    with pytest.raises(TableError, match=r"nowhere\.toml"):
        read(tmp_path, 'family = "mine"\nextends = "nowhere"\n')


@pytest.mark.parametrize("base", ["../llama", "a/b", "/etc/x", "..", ""])
def test_extends_is_a_plain_name(tmp_path, base):
    with pytest.raises(TableError, match=r"mine\.toml"):
        read(tmp_path, f'family = "mine"\nextends = "{base}"\n')


def test_not_utf8_and_not_there(tmp_path):
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(TableError, match=r"x\.toml: not valid TOML"):
        read_table(tmp_path / "x.toml")
    with pytest.raises(TableError, match="cannot be read"):
        read_table(tmp_path / "absent.toml")
    with pytest.raises(UsageError, match="llama"):
        load_table("nothing")


def test_merge():
    base = {"a": {"b": 1, "c": {"d": 2}}, "fused": [1], "layouts": ["hf", "meta"]}
    over = {"a": {"c": {"e": 3}}, "fused": [2], "layouts": ["hf"]}
    assert merge(base, over) == {"a": {"b": 1, "c": {"d": 2, "e": 3}}, "fused": [1, 2], "layouts": ["hf"]}
    assert merge(base, {"a": False}) == {"fused": [1], "layouts": ["hf", "meta"]}
    assert base == {"a": {"b": 1, "c": {"d": 2}}, "fused": [1], "layouts": ["hf", "meta"]}


def test_a_child_can_remove_a_row_and_add_one(tmp_path):
    table = read(
        tmp_path,
        HEAD + '[block.attn]\nv = false\n[block.attn.q_norm]\nshape = ["hd"]\nhf = "self_attn.q_norm.weight"\n',
    )
    assert "block.attn.v" not in table.rows
    assert table.rows["block.attn.q_norm"].role in ("attn", "norm")
    assert "block.attn.v" in load_table("llama").rows


def test_conditions_of_a_block_reach_its_rows(tmp_path):
    text = HEAD + '[block.extra]\nwhen = "H > K"\n[block.extra.a]\nwhen = "D > 1"\nshape = ["D"]\nhf = "extra.a"\n'
    assert [e.text for e in read(tmp_path, text).rows["block.extra.a"].when] == ["H > K", "D > 1"]


@pytest.mark.parametrize("family", families())
def test_our_tables_load_and_are_whole(family):
    table = load_table(family)
    assert table.family == family
    assert table.sizes
    for layout in table.layouts:
        named = {r.id for r in table.rows.values() if layout in r.names}
        named |= {p for f in table.fused if f.layout == layout for p in f.parts}
        assert {r.id for r in table.rows.values() if not r.when and not r.tied_to} - named <= set()
    for path in (resolve(Path(__file__).parent.parent / "mappings" / f"{family}.toml"),):
        assert "extends" not in path


def test_ignore_patterns():
    rule = Ignore("hf", "*.rotary_emb.inv_freq", "x")
    assert rule.matches("model.layers.3.self_attn.rotary_emb.inv_freq")
    assert rule.matches("rotary_emb.inv_freq")
    assert not rule.matches("rotary_emb.inv_freq.weight")
    assert not rule.matches("model.inv_freq")
    assert Ignore("gguf", "rope_freqs.weight", "x").matches("rope_freqs.weight")
    assert not Ignore("gguf", "rope_freqs.weight", "x").matches("a.rope_freqs.weight")
    assert Ignore("hf", "a.*.b", "x").matches("a.7.b")


WRONG_TYPES = [
    '[block.attn.q]\nshape = "H"',
    "[block.attn.q]\nshape = 3",
    "[block.attn.q]\nhf = 3",
    "[block.attn.q]\ntied_to = 3",
    "[block.attn.q]\nwhen = [1]",
    "[block.attn.q]\nrope = {}",
    "[block.attn.q]\nshape = [[1]]",
    "prefix = 3",
    "[prefix]\nhf = 3",
    "dims = 3",
    "[dims]\nX = []",
    '[block.attn.q]\nrotary = ["1"]',
    '[[metadata]]\nkey = "x"\ntype = "u32"\nvalue = []',
    '[[metadata]]\nkey = "x"\ntype = "u32"\nvalue = [{}]',
    "[dims]\nX = { a = 1 }",
    "[sizes]\nx = 3",
    "fused = 3",
    "fused = [3]",
    '[[fused]]\nlayout = "hf"\nname = "x"\nparts = "block.attn.q"',
    '[[fused]]\nlayout = 3\nname = "x"\nparts = ["block.attn.q"]',
    '[[fused]]\nlayout = "hf"\nname = "x"\nparts = ["block.attn.q"]\naxis = "0"',
    "[defaults]\nhf = 3",
    "[config]\nx = 3",
    "[config]\nx = { hf = 3 }",
    "[config]\nx = { gguf = { type = 'u32' } }",
    "[convention]\nhf = 3",
    "layouts = 3",
    "layouts = ['nano']",
    "model_types = 3",
    "refuse = [3]",
    "[presence]\nx = 3",
    "top = 3",
]


@pytest.mark.parametrize("text", WRONG_TYPES)
def test_a_value_of_a_wrong_type_is_named(tmp_path, text):
    with pytest.raises(TableError, match=r"mine\.toml"):
        read(tmp_path, (text + "\n" + HEAD) if not text.startswith("[") else HEAD + text)

"""The README says nothing that is not so: its tables load, its commands and options exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_names_example_is_the_file_and_loads():
    from convert.names import load_names

    shown = tomllib.loads(blocks("toml")[0])
    stored = tomllib.loads((ROOT / "examples" / "own_names.toml").read_text(encoding="utf-8"))
    stored.pop("title")
    assert shown == stored
    assert load_names(ROOT / "examples" / "own_names.toml").family == "llama"


def test_family_example_loads_and_a_slip_in_it_is_seen(tmp_path):
    from convert.errors import TableError
    from convert.table import load_table, read_table

    text = blocks("toml")[1]
    path = tmp_path / "normllama.toml"
    path.write_text(text, encoding="utf-8")
    assert len(read_table(path).rows) == len(load_table("llama").rows) + 1
    path.write_text(text.replace("shape ", "shapes"), encoding="utf-8")
    with pytest.raises(TableError, match=r"normllama\.toml"):
        read_table(path)


def test_commands_and_options_exist():
    import click

    from convert.cli import cli

    context = click.Context(cli)
    commands = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    lines = [line.split("#")[0].split() for block in blocks("sh") for line in block.splitlines()]
    used = [words[1] for words in lines if words and words[0] == "convert"]
    used += re.findall(r"`convert ([a-z][a-z-]+)", TEXT)
    assert len(used) > 10
    assert set(used) <= set(commands), sorted(set(used) - set(commands))
    known = {o for c in commands.values() for p in c.params for o in p.opts} | {o for p in cli.params for o in p.opts}
    for row in re.findall(r"^\| (`--.*?) \| ", TEXT, re.MULTILINE):
        for option in re.findall(r"--[a-z-]+", row.replace("\\|", " ")):
            assert option in known, option


def test_every_documented_name_is_public():
    import convert

    lines = [x for block in blocks("python") for x in block.splitlines() if not x.startswith("from ")]
    names = set(re.findall(r"convert\.([a-zA-Z_]+)\(?", "\n".join(lines))) | {"ConvertError"}
    assert len(names) >= 8
    missing = sorted(n for n in names if not hasattr(convert, n))
    assert not missing, missing

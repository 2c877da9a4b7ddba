"""Files of prompts: read as far as any file of prompts is long, whatever they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from convert.errors import UsageError
from convert.prompt import read_prompts, read_text


def test_prompts_are_lines_or_a_list(tmp_path):
    file = tmp_path / "prompts"
    file.write_bytes("größer\r\n\r\nzwei\n".encode())
    assert read_prompts(file) == ["größer", "zwei"]
    file.write_text('["a b", [1, 2]]')
    assert read_prompts(file) == ["a b", [1, 2]]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[" * 100_000, "nested too deep"),
        (b"[1.5]", "1.5 in prompts is no prompt"),
        (b'["' + b"a" * 100_000 + b'", []]', "no prompt"),
        (b"[[" + b"[1]," * 50_000 + b"1]]", "no prompt"),
        (b"\xff\xfe", "no UTF-8"),
        (b"\n\n", "no prompts"),
        (b"a" * (16 << 20) + b"b", "more than 16 MiB"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_file_of_prompts_is_refused_in_a_few_words(tmp_path, content, words):
    file = tmp_path / "prompts"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=words) as error:
        read_prompts(file)
    assert len(str(error.value)) < 400 and error.value.problems[0].file == str(file)


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="there are no device nodes here")
def test_a_device_has_an_end(tmp_path):
    with pytest.raises(UsageError, match="more than 16 MiB"):
        read_text(Path("/dev/zero"))
    with pytest.raises(UsageError, match="cannot be read"):
        read_text(tmp_path)

"""Chat templates against transformers' own rendering."""

from __future__ import annotations

import sys

import pytest

from convert.chat import render
from convert.errors import ConvertError
from tests.fixtures import save_tokenizer
from tests.fixtures.tokenizer import BOS, EOS

CHATML = """{{ bos_token }}{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
        {{- '<|system|>' + {'a': "ü & <b>"} | tojson }}
    {% endif %}
    {% if message['role'] == 'tool' %}{% continue %}{% endif %}
{{ '<|' + message['role'] + '|>' + message['content'] | trim + eos_token }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""

MESSAGES = [
    {"role": "user", "content": "  What do llamas eat? "},
    {"role": "tool", "content": "x"},
    {"role": "assistant", "content": "Hay."},
]


@pytest.mark.parametrize("generation", [True, False])
def test_rendered_as_transformers_does(tmp_path, generation):
    transformers = pytest.importorskip("transformers")
    save_tokenizer(tmp_path, 320, template=CHATML)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    wanted = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=generation)
    got = render(CHATML, MESSAGES, special={"bos_token": BOS, "eos_token": EOS}, generation=generation)
    assert got == wanted
    assert "ü & <b>" in got


def test_a_template_that_refuses_or_is_broken():
    with pytest.raises(ConvertError, match="The chat template fails: only tools here"):
        render("{{ raise_exception('only tools here') }}", MESSAGES, special={})
    with pytest.raises(ConvertError, match="The chat template fails"):
        render("{% for x in %}", MESSAGES, special={})
    with pytest.raises(ConvertError, match="The chat template fails"):
        render("{{ messages[0].content + 1 }}", MESSAGES, special={})


def test_templates_run_in_a_sandbox():
    with pytest.raises(ConvertError, match="The chat template fails"):
        render("{{ ''.__class__.__mro__[1].__subclasses__() }}", MESSAGES, special={})


def test_without_jinja(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConvertError, match="needs the package jinja2") as error:
        render(CHATML, MESSAGES, special={})
    assert "pip install jinja2" in error.value.problems[0].hint

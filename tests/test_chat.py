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


#: What templates of strangers can do without leaving Jinja's sandbox.
EXPLOSIVE = {
    "{{ 9 ** (9 ** 9) }}": "too long",
    "{{ 'a' * 10 ** 9 }}": "MiB of memory",
    "{{ [1] * 10 ** 9 }}": "MiB of memory",
    "{{ '%999999999d' % 1 }}": "MiB of memory",
    "{{ 'x' | center(999999999) }}": "MiB of memory",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "too long",
    "{% for i in range(99999) %}{% for j in range(99999) %}"
    + "a" * 99
    + "{% endfor %}{% endfor %}": "4,000,000 charac",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "without end",
    "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}": "nested too deep",
    "{% if 1 %}" * 20000 + "{% endif %}" * 20000: "nested too deep",
    "x" * (2 << 20): "at most 1,048,576",
    "{{ 1 / 0 }}": "division by zero",
    "{{ messages[5].content }}": "no element 5",
    "{% include '/etc/passwd' %}": "no loader",
    "{{ cycler.__init__.__globals__.os.system('touch canary') }}": "unsafe",
    "{{ raise_exception('\\x1b[2J' * 100000) }}": r"fails: \\x1b\[2J",
    "{{ '\\ud800' }}": "half a surrogate",
}


@pytest.mark.parametrize("template", EXPLOSIVE, ids=lambda t: t[:30])
def test_templates_that_explode(template, monkeypatch, tmp_path):
    """They are stopped within about a second, in little memory, and what they say is short and printable."""
    import resource

    monkeypatch.chdir(tmp_path)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(ConvertError, match=EXPLOSIVE[template]) as error:
        render(template, MESSAGES, special={})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10
    assert len(str(error.value)) < 1000 and str(error.value).isprintable()
    assert not list(tmp_path.iterdir())


def test_the_process_of_a_template_may_not_reach_out(monkeypatch, tmp_path):
    """Were the sandbox left, the process would still refuse: its audit hook is what is tried here."""
    from convert.engines import chat_child

    for event in (("os.system", ("id",)), ("socket.connect", ()), ("open", ("/tmp/x", "w", 0))):
        with pytest.raises(PermissionError):
            chat_child._watch(*event)
    chat_child._watch("open", ("/usr/lib/x.py", "rb", 0))


def test_without_jinja(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConvertError, match="needs the package jinja2") as error:
        render(CHATML, MESSAGES, special={})
    assert "pip install jinja2" in error.value.problems[0].hint

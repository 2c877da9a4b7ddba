"""The ``Modelfile`` that lets ``ollama create`` take a GGUF file as it is.

Ollama's templates are Go's, a GGUF file's chat template is Jinja. One is not turned into the other here: Ollama
recognises the usual Jinja templates in the file by itself, and a plain pass-through is written only where the file
has none, because then it is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from convert.plan import ConversionPlan

_IDS = ("eos", "eot", "eom")


def modelfile(plan: ConversionPlan, name: str) -> bytes:
    """The Modelfile for ``name``, which lies beside it.

    Args:
        plan: A plan with a GGUF target; its key-values tell the template and the ends of text.
        name: The GGUF file's name.
    """
    values = plan.metadata
    lines = [f"FROM ./{name}"]
    if "tokenizer.chat_template" in values:
        lines.append("# The chat template lies in the file, in Jinja; Ollama takes it from there where it knows it.")
    else:
        lines.append('TEMPLATE """{{ .Prompt }}"""')
    lines += [f"PARAMETER stop {_quoted(text)}" for text in _ends(values)]
    arch = values.get("general.architecture")
    context = values.get(f"{arch}.context_length")
    if context is not None:
        lines.append(f"# The model was made for {context} positions; Ollama's own default is smaller.")
        lines.append(f"# PARAMETER num_ctx {context}")
    return ("\n".join(lines) + "\n").encode()


def _ends(values: Mapping[str, Any]) -> list[str]:
    """The texts of all tokens that end a text or a turn."""
    tokens = values.get("tokenizer.ggml.tokens", ())
    ids = [values.get(f"tokenizer.ggml.{role}_token_id") for role in _IDS]
    ids += list(values.get("convert.eos_token_ids", ()))
    found = dict.fromkeys(int(i) for i in ids if i is not None)
    return [tokens[i] for i in found if 0 <= i < len(tokens)]


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

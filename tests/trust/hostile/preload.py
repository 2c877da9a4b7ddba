"""Imports what the commands import, so that a forked child starts at once; kept lean: no torch."""

import sys

import convert.check
import convert.cli
import convert.commands.check
import convert.commands.conversions
import convert.commands.diagnose
import convert.commands.diff
import convert.commands.inspect
import convert.commands.metadata
import convert.commands.validate
import convert.conversion
import convert.formats.gguf
import convert.formats.safetensors
import convert.formats.tf_checkpoint
import convert.formats.torch_zip
import convert.inspect
import convert.run
import convert.tokenizer.source
import convert.validate
import convert.wrappers
import convert.writer  # noqa: F401

assert "torch" not in sys.modules and "pytest" not in sys.modules

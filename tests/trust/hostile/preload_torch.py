"""Imports what commands that run models import besides; the server that has it answers for these alone."""

import tokenizers  # noqa: F401
import torch

import convert.chat
import convert.commands.generate
import convert.commands.verify
import convert.generate
import convert.measurement
import convert.modules
import convert.reference.generation
import convert.reference.llama
import convert.reference.loading
import convert.scratch_config
import convert.text_tokenizer
import convert.verify  # noqa: F401

torch.set_num_threads(1)  # threads do not survive a fork

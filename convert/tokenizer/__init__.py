"""Tokenizers: read from any layout, written for Hugging Face and for GGUF.

Nothing here touches weights, torch or transformers, and no tokenizer library is needed to convert.

* :mod:`convert.tokenizer.from_gguf` - a GGUF header's keys to Hugging Face tokenizer files
* :mod:`convert.tokenizer.source` - finding and reading the tokenizer of a folder
* :mod:`convert.tokenizer.to_gguf` - a tokenizer to the keys of a GGUF file
* :mod:`convert.tokenizer.pretokenizers` - which regexes each pre-tokenizer name stands for
"""

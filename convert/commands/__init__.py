"""One module per command: its options and what it prints."""

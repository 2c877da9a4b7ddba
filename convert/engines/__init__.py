"""Other programs that can run a checkpoint, as witnesses that share no code with this one.

Each runs in a process of its own, and gives log-probabilities of the whole vocabulary.
"""

"""The usual ways to do the same work, each a small script that is run as its own process."""

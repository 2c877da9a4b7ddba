"""The arithmetic of byte pair encoding: merges from ranks or scores, scores from merges.

SentencePiece and tiktoken files hold no merges: any two neighbours whose text together is a token may join,
the best-scored (or lowest-ranked) result first. Hugging Face files hold the merges and no scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

Piece = TypeVar("Piece", str, bytes)


def splits(piece: Piece, ids: Mapping[Piece, int]) -> list[tuple[Piece, Piece]]:
    """Every way to put ``piece`` together from two tokens, ordered by the ids of the parts."""
    pairs = []
    for cut in range(1, len(piece)):
        left = ids.get(piece[:cut])
        if left is not None and (right := ids.get(piece[cut:])) is not None:
            pairs.append((left, right, cut))
    pairs.sort()
    return [(piece[:cut], piece[cut:]) for _, _, cut in pairs]


def from_order(pieces: Iterable[Piece], ids: Mapping[Piece, int]) -> Iterator[tuple[Piece, Piece]]:
    """The merges that are equal to "join whatever makes the earliest of ``pieces``".

    Args:
        pieces: Tokens that merging can make, the most preferred first.
        ids: Every token that can be a part of another.
    """
    return (pair for piece in pieces for pair in splits(piece, ids))


def order_by_score(tokens: Sequence[str], scores: Sequence[float], usable: Iterable[int]) -> list[str]:
    """The tokens with the given ids, best score first, equal scores in id order."""
    return [tokens[index] for index in sorted(usable, key=lambda index: (-scores[index], index))]


def scores_from(merges: Sequence[tuple[str, str]], tokens: Sequence[str]) -> tuple[list[float], list[int]]:
    """Scores that make "join the best-scored pair" do what the merges do.

    A token scores minus the rank of the first merge that makes it; single characters, which nothing makes, score 0
    (nothing looks at it).

    Returns:
        The scores by id, and the ids of longer tokens that no merge makes.
    """
    rank: dict[str, int] = {}
    for index, (left, right) in enumerate(merges):
        rank.setdefault(left + right, index)
    last = float(-len(merges) - 1)
    scores, unmade = [], []
    for index, text in enumerate(tokens):
        if text in rank:
            scores.append(-float(rank[text]))
        elif len(text) > 1:
            scores.append(last)
            unmade.append(index)
        else:
            scores.append(0.0)
    return scores, unmade


def reach(merges: Sequence[tuple[str, str]], tokens: Iterable[str]) -> bool:
    """Whether merging makes every one of ``tokens`` from its characters.

    If so, taking a piece that is a token as a whole (``ignore_merges``) changes nothing.
    """
    rank = {pair: index for index, pair in reversed(list(enumerate(merges)))}
    return all(len(join(text, rank)) == 1 for text in tokens)


def join(text: str, rank: Mapping[tuple[str, str], int]) -> list[str]:
    """``text`` after all merges, lowest rank first, leftmost first among equals."""
    parts = list(text)
    while len(parts) > 1:
        best, at = min((rank.get((parts[i], parts[i + 1]), len(rank)), i) for i in range(len(parts) - 1))
        if best == len(rank):
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts

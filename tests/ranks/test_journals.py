"""Journals of several ranks become one; what belongs to another run does not."""

from __future__ import annotations

import pytest

from convert.journal import JOURNAL_NAME, Journal, read_journal
from convert.ranks.journals import join_parts, part_name, parts

IDENTITY = {"schema": "convert.journal/1", "request": {}, "said of the source": {}, "source": [], "tool": "x"}


def written(folder, rank: int, rows: list[tuple[int, int, int]], identity=IDENTITY) -> None:
    journal = Journal(folder, identity, resume=False, name=part_name(rank))
    journal.follow([])
    for number, start, stop in rows:
        journal.add(number, start, stop, files=frozenset(), nbytes=1)
    journal.close(keep=True)


def test_parts_are_joined_and_a_line_that_was_cut_off_is_not_believed(tmp_path):
    written(tmp_path, 0, [(0, 0, 5)])
    written(tmp_path, 1, [(0, 5, 10), (3, 0, 2)])
    written(tmp_path, 2, [(4, 0, 1)], identity=IDENTITY | {"tool": "another"})
    with (tmp_path / part_name(1)).open("ab") as file:
        file.write(b"7 0 1")
    with (tmp_path / JOURNAL_NAME).open("ab") as file:
        file.write(b"8 0 1")
    resumed = Journal(tmp_path, IDENTITY, resume=True)
    resumed.close(keep=True)
    assert resumed.finished.covers(0, 0, 10) and resumed.finished.covers(3, 0, 2)
    for number in (4, 7, 8):
        assert not resumed.finished.covers(number, 0, 1)
    assert parts(tmp_path) == []
    found = read_journal(tmp_path)
    assert found is not None and found[1].covers(0, 0, 10)


def test_without_the_first_rank_s_journal_the_others_count(tmp_path):
    written(tmp_path, 3, [(1, 0, 4)])
    join_parts(tmp_path)
    found = read_journal(tmp_path)
    assert found is not None and found[0] == IDENTITY and found[1].covers(1, 0, 4)


def test_a_folder_without_journals_is_left_alone(tmp_path):
    join_parts(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert read_journal(tmp_path) is None


@pytest.mark.parametrize("rank", [0, 1, 12])
def test_names(rank):
    assert part_name(rank).startswith(JOURNAL_NAME)

"""The list of protections that `mutations.py` takes out is true to the code, and covers each fault."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.memory.mutations import REPO, Mutation, read

MUTATIONS = read()

FAULTS = {*range(1, 17), 18, 20, *range(23, 29)}  # those that the lessons have a rule for


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_what_is_taken_out_stands_there_once(mutation: Mutation) -> None:
    assert (REPO / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.new not in ("", mutation.old)


def test_each_fault_has_a_test_by_its_name_and_a_protection_that_is_taken_out() -> None:
    tests = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    named = {int(number) for number in re.findall(r"def test_w(\d+)_", tests)}
    taken_out = {int(found[1]) for item in MUTATIONS if (found := re.match(r"W(\d+) ", item.name))}
    assert named >= FAULTS
    assert taken_out >= FAULTS

"""Patterns as automata, against `re`; and patterns that are made to cost."""

from __future__ import annotations

import random
import re
import time

import pytest

from vllm_gptoss.server.harmony.enforce.errors import NotEnforceableError
from vllm_gptoss.server.harmony.enforce.pattern import automaton_of

SAME_AS_RE = [
    "^https?://", r"\.py$", "^a|b$", "^(a|b)*c{2,3}$", "x(?:yz)?$", "^$", "", "(^a|b$)",
    "[^a-c]b", "a.c", "a^b", "(a$)b", r"^[\w.-]+$", r"^\d{3}-\w+$", "^[a-c]{0,2}(x|y)+?$", "^(ab|a)(bc|c)$",
    "(a|)*b", r"[\]\-x]", "^(?:a{2}b?){1,2}$", r"^\x61[\u0062x]$",
]  # fmt: skip


@pytest.mark.parametrize("pattern", SAME_AS_RE)
def test_an_automaton_finds_what_re_finds(pattern: str) -> None:
    automaton, rng = automaton_of(pattern), random.Random(1)
    for _ in range(2000):
        text = "".join(rng.choice("abcxyz.-]1_ :/pht") for _ in range(rng.randrange(8)))
        assert (text in automaton) == bool(re.search(pattern, text, re.ASCII)), text


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(" * 30_000 + ")" * 30_000, "longer than 1000"),
        ("(" * 100 + ")" * 100, "nests more than 40"),
        ("(a|b)*a(a|b){12}", "states"),
        ("a{99999}", "counts are written out"),
        ("(((((a{9}){9}){9}){9}){9})", "counts are written out"),
        ("[a", "ends too early"),
        ("(a", "ends too early"),
        ("a)", "nothing opens"),
        ("a{2,1}", "from more to less"),
        ("*a", "nothing to repeat"),
        ("^*a", "repeats an anchor"),
        (r"^\p{L}", "uses"),
        ("(?<=a)b", "looks ahead or behind"),
        (r"(a)\1", "uses"),
        (r"\bfoo", "word boundary"),
        ("[z-a]", "backwards"),
        (r"\ud800", "surrogate"),
    ],
)
def test_what_has_no_automaton_is_refused_quickly_and_in_words(pattern: str, why: str) -> None:
    began = time.process_time()
    with pytest.raises(NotEnforceableError, match=why):
        automaton_of(pattern)
    assert time.process_time() - began < 5


def test_a_pattern_has_at_most_so_many_characters() -> None:
    longest = "(a|b)" * 200
    assert automaton_of(longest)
    with pytest.raises(NotEnforceableError, match=f"is longer than {len(longest)} characters"):
        automaton_of(longest + "c")

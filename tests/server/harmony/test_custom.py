"""The input of a custom tool's call is the text alone, for every cut of the tokens."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_gptoss.server.harmony.custom import InputUnwrapper, description_of


@given(st.text(), st.integers(1, 9), st.booleans())
def test_any_cut_of_a_call_gives_its_input(text: str, size: int, ascii_only: bool) -> None:
    said, unwrapper = json.dumps({"input": text}, ensure_ascii=ascii_only), InputUnwrapper()
    given = [unwrapper.feed(said[at : at + size]) for at in range(0, len(said), size)]
    assert "".join(given) + unwrapper.end(said, cut=False) == text


@pytest.mark.parametrize(
    ("said", "cut", "given", "rest"),
    [
        ('{"input": "one \\u00', True, "one ", ""),
        ('{"input": "one \\u00', False, "one ", "\\u00"),
        ('{"input": "one"', False, "one", ""),
        ('{"text": "one"}', False, "", '{"text": "one"}'),
        ("no JSON", True, "", "no JSON"),
    ],
)
def test_an_unfinished_call_loses_nothing_but_half_an_escape(said: str, cut: bool, given: str, rest: str) -> None:
    unwrapper = InputUnwrapper()
    assert (unwrapper.feed(said), unwrapper.end(said, cut=cut)) == (given, rest)


def test_a_grammar_is_described() -> None:
    assert description_of(" Asks. ", None) == "Asks."
    shown = "The input is plain text, not JSON, in this regex grammar:\na+"
    assert description_of(None, {"syntax": "regex", "definition": "a+"}) == shown

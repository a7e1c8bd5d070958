"""Text to token ids: equal to the tokenizer's ids, in time linear in the length of any text."""

from __future__ import annotations

import time
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_gptoss.server.harmony import tokens

ROOT = Path(__file__).resolve().parents[3]
PIECES = [
    *("a", "b", "Z", "é", "中", "文", "，", "。", " ", "  ", "\n", "\r\n", "'", "'s", "'RE", "1", "23", "4567", "²"),
    *("_", "-", "+", "/", "//", "=", "<|end|>", "\u0301", "ไทย", "🎉", "\t", "(", '"', "{", ":", ";", "×", "\u200d"),
    *("!", "\u3000", "\u2019", "ⅷ", "．", "\x00", "\x7f", "\u302a", ".", ",", "＋"),
]  # fmt: skip


def whole(text: str) -> list[int]:
    """The tokenizer's ids of a text that it encodes in one call."""
    ids: list[int] = tokens.encoding().encode(text, disallowed_special=())
    return ids


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """The tokenizer is loaded, so that no test's time has that in it."""
    tokens.encoding()


@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join), st.sampled_from([4, 8, 16]))
def test_a_text_that_is_cut_where_words_end_has_the_tokenizers_tokens(text: str, stretch: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "STRETCH", stretch)
        *parts, _ = tokens._parts(text)
        borders = {match.start() for match in tokens._PARTED.finditer(text)}
        if borders.issuperset(accumulate(map(len, parts))):
            assert tokens.encode(text) == whole(text)


@pytest.mark.parametrize("pattern", ["vllm_gptoss/**/*.py", "docs/**/*.md", "benchmarks/results/*.json"])
def test_ordinary_files_have_the_tokenizers_tokens(pattern: str) -> None:
    files = [path.read_text("utf-8") for path in ROOT.glob(pattern)]
    assert max(map(len, files)) > 4 * tokens.STRETCH
    assert all(tokens.encode(text) == whole(text) for text in files)


@pytest.mark.parametrize("run", ["é", " ", "=", "\n", "🎉", "ไ"])
def test_a_run_of_one_letter_takes_no_longer_than_other_text(run: str) -> None:
    """200,000 times "é" took more than ten seconds, in which nothing else ran."""
    text = run * 200_000
    began = time.process_time()
    ids = tokens.encode(text)
    assert time.process_time() - began < 2.0
    assert tokens.encoding().decode(ids) == text

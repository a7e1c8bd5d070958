"""What others have published is quoted as they wrote it, in the code and in the document."""

from __future__ import annotations

import re

import pytest

from tests.support.places import ROOT
from vllm_gptoss.cli.eval.data import load
from vllm_gptoss.cli.eval.published import CARD, EFFORTS, GUIDE, TABLE, published, size_of

DOCUMENT = (ROOT / "docs" / "eval.md").read_text()
ROW = re.compile(r"^\| (120b|20b) \| ([\d./ -]+) \| ([\d./ -]+) \| .*(guide|card)", re.MULTILINE)


def test_the_document_has_the_same_values() -> None:
    rows = ROW.findall(DOCUMENT)
    found = set()
    for size, gpqa, aime, source in rows:
        for name, values in (("gpqa", gpqa), ("aime25", aime)):
            for effort, value in zip(EFFORTS, values.split(" / "), strict=True):
                if value != "-":
                    found.add((size, name, effort, float(value), source))
    table = {
        (size, name, effort, percent, "guide" if source == GUIDE else "card")
        for size, evals in TABLE.items()
        for name, sources in evals.items()
        for source, percents in sources.items()
        for effort, percent in zip(EFFORTS, percents, strict=True)
        if percent is not None
    }
    assert len(rows) == 4
    assert found == table
    assert {CARD, GUIDE} == {source for evals in TABLE.values() for sources in evals.values() for source in sources}


@pytest.mark.parametrize(
    ("model", "size"),
    [
        ("openai/gpt-oss-20b", "20b"),
        ("/models/GPT-OSS-120B", "120b"),
        ("gpt-oss-120b-eagle", "120b"),
        ("gpt-oss-20billion", None),
        ("gpt-oss", None),
        ("llama-120b", None),
    ],
)
def test_the_model_is_known_by_its_name(model: str, size: str | None) -> None:
    assert size_of(model) == size
    assert bool(published(size, "gpqa", "low")) == bool(size)


@pytest.mark.parametrize("name", ["smoke", "toolcalls", "harmony", "citations"])
def test_the_document_counts_the_bundled_questions(name: str) -> None:
    row = next(line for line in DOCUMENT.splitlines() if line.startswith(f"| `{name}` |"))
    assert re.search(rf"\b{len(load(name).questions)} (?:short )?(?:questions|tasks)", row)

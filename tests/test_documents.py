"""Documents name files that exist: a reader who follows one always arrives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / folder / "README.md" for folder in ("demo", "recipes")),
]
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")
NAMED = re.compile(r"`((?:vllm_gptoss|tests|scripts|benchmarks|demo|recipes)/[\w./-]*)`")


def missing(path: Path, text: str) -> list[str]:
    """What `text`, standing at `path`, links to or names in code font, and is not there."""
    links = [target for target in LINK.findall(text) if not (path.parent / target).exists()]
    return links + [name for name in NAMED.findall(text) if not (ROOT / name).exists()]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_and_file_name_leads_somewhere(path: Path) -> None:
    assert not missing(path, path.read_text())


WIDTH = 100


def too_wide(text: str) -> list[str]:
    """Lines of prose over `WIDTH` characters; tables, code, pictures and comments may be wider."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE).splitlines()
    return [line for line in prose if len(line) > WIDTH and not line.lstrip().startswith(("|", "<!--", "!["))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_fits_a_window(path: Path) -> None:
    assert not too_wide(path.read_text())


def test_a_wide_line_is_found() -> None:
    wide = "word " * 30
    assert too_wide(f"{wide}\n```\n{wide}\n```\n| {wide} |") == [wide]


def test_a_file_that_moved_is_found() -> None:
    text = "see [kernels](docs/nowhere.md) and `vllm_gptoss/nowhere.py`"
    assert missing(ROOT / "README.md", text) == ["docs/nowhere.md", "vllm_gptoss/nowhere.py"]


def test_comments_name_documents_that_exist() -> None:
    named = re.compile(r"(?<!openai/harmony )docs/[\w/-]+\.md")
    sources = [p for kind in ("*.py", "*.cu", "*.cuh") for p in (ROOT / "vllm_gptoss").rglob(kind)]
    found = {(path.name, name) for path in sources for name in named.findall(path.read_text())}
    assert not {(source, name) for source, name in found if not (ROOT / name).exists()}

"""Links, anchors and file names in documents exist."""

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
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
NAMED = re.compile(r"`((?:vllm_gptoss|tests|scripts|benchmarks|demo|recipes)/[\w./-]*)`")


def anchors(path: Path) -> set[str]:
    """Anchors of a document's headings, as GitHub forms them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def missing(path: Path, text: str) -> list[str]:
    """Targets that do not exist, among the links and file names in `text`, the content of `path`."""
    absent = []
    for target, anchor in LINK.findall(text):
        there = path.parent / target if target else path
        if not there.exists() or (anchor and anchor not in anchors(there)):
            absent.append(f"{target}#{anchor}".rstrip("#"))
    return absent + [name for name in NAMED.findall(text) if not (ROOT / name).exists()]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_anchor_and_file_name_exists(path: Path) -> None:
    assert not missing(path, path.read_text())


WIDTH = 100


def too_wide(text: str) -> list[str]:
    """Lines of prose over `WIDTH` characters; tables, code, pictures and comments may be wider."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE).splitlines()
    return [line for line in prose if len(line) > WIDTH and not line.lstrip().startswith(("|", "<!--", "!["))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_has_at_most_100_columns(path: Path) -> None:
    assert not too_wide(path.read_text())


def test_a_wide_line_is_found() -> None:
    wide = "word " * 30
    assert too_wide(f"{wide}\n```\n{wide}\n```\n| {wide} |") == [wide]


def test_a_missing_file_or_anchor_is_found() -> None:
    text = "[kernels](docs/nowhere.md), [](docs/host.md#nowhere), [](#speed), `vllm_gptoss/nowhere.py`"
    expected = ["docs/nowhere.md", "docs/host.md#nowhere", "vllm_gptoss/nowhere.py"]
    assert missing(ROOT / "README.md", text) == expected


def test_comments_name_documents_that_exist() -> None:
    named = re.compile(r"(?<!openai/harmony )docs/[\w/-]+\.md")
    sources = [p for kind in ("*.py", "*.cu", "*.cuh") for p in (ROOT / "vllm_gptoss").rglob(kind)]
    found = {(path.name, name) for path in sources for name in named.findall(path.read_text())}
    assert not {(source, name) for source, name in found if not (ROOT / name).exists()}


def test_the_picture_shows_the_packages_of_today() -> None:
    drawn = re.findall(r'font-weight="bold"[^>]*>([a-z_]+)/?<', (ROOT / "docs" / "structure.svg").read_text())
    parts = [ROOT / "vllm_gptoss" / name for name in ("server", "tools", "engine", "cli")]
    packages = [path.parent for part in parts for path in part.glob("*/*.py")]
    assert sorted(drawn) == sorted({path.name for path in (*parts, *packages)}), "run scripts/structure_svg.py"


def test_every_resource_of_a_caller_has_its_bounds_and_a_test() -> None:
    text = (ROOT / "docs" / "security.md").read_text().partition("## Resources a caller can consume")[2]
    text = text.partition("\n## ")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\|.*\|$", text, re.MULTILINE)]
    rows = rows[2:]  # the head and the line below it
    assert len(rows) >= 20
    assert [row[0] for row in rows if not row[-1].startswith("`tests/")] == []
    assert [row[0] for row in rows if len(row) != 5 or not all(row)] == []
    assert [row[0] for row in rows if "–" in row[1] and "–" in row[2]] == []

"""The guide's commands are recipes, and Chinese pages have the commands, figures and links of the English ones."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_gptoss.cli import main
from vllm_gptoss.cli.recipes import find, load, render

ROOT = Path(__file__).resolve().parents[3]
GUIDES = (ROOT / "docs" / "guide.md", ROOT / "docs" / "zh" / "guide.md")
FENCE = re.compile(r"(?:<!-- recipe: (\S+) -->\n)?```\w*\n(.*?)```", re.DOTALL)
TWINS = (
    (ROOT / "README.md", ROOT / "docs" / "zh" / "README.md"),
    (ROOT / "recipes" / "README.md", ROOT / "docs" / "zh" / "recipes.md"),
)
PAGES = (
    *GUIDES,
    *(path.with_name("troubleshooting.md") for path in GUIDES),
    *(path for pair in TWINS for path in pair),
)


def fences(path: Path) -> list[tuple[str, str]]:
    """(recipe, code without comments) of each block; an empty name where it is no recipe's."""
    return [(name or "", re.sub(r" *# .*$", "", code, flags=re.M)) for name, code in FENCE.findall(path.read_text())]


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.parent.name)
def test_every_serve_command_is_a_recipes(path: Path) -> None:
    blocks = fences(path)
    assert len([name for name, _ in blocks if name]) >= 6
    for name, code in blocks:
        if name:
            assert code == render.command(find.by_id(load.shipped(), name))
        else:
            assert not code.startswith(("vllm serve", "VLLM_"))


def test_both_languages_have_the_same_blocks_headings_and_numbers() -> None:
    english, chinese = GUIDES
    assert fences(english) == fences(chinese)
    headings = [len(re.findall(r"^#+ ", path.read_text(), re.MULTILINE)) for path in GUIDES]
    assert headings[0] == headings[1]
    scores = [re.findall(r"\d\d\.\d", path.read_text()) for path in GUIDES]
    assert scores[0] == scores[1]


def test_the_chinese_page_of_tools_has_the_same_blocks_tables_and_names() -> None:
    english, chinese = (path.with_name("tools.md") for path in GUIDES)
    assert fences(chinese) == fences(english) != []
    prose = [re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL) for path in (english, chinese)]
    headings = [re.findall(r"^#+ ", text, re.MULTILINE) for text in prose]
    assert headings[0] == headings[1]
    rows = [[sorted(re.findall(r"`[^`]+`", row)) for row in re.findall(r"^\|.*", text, re.M)] for text in prose]
    assert rows[0] == rows[1]
    names = [{" ".join(name.split()) for name in re.findall(r"`[^`]+`", text)} for text in prose]
    assert names[0] == names[1]


@pytest.mark.parametrize("path", PAGES)
def test_our_commands_exist(path: Path) -> None:
    lines = re.findall(r"^vllm-gptoss (.*)$|`vllm-gptoss ([a-z][^`]*)`", path.read_text(), re.MULTILINE)
    for line in {"".join(pair) for pair in lines}:
        words = shlex.split(line.split("#")[0].replace("\n", " "))
        parts = [word for word in words[:2] if re.fullmatch(r"[a-z]+", word)]
        done = CliRunner().invoke(main.app, [*parts[: 2 if parts[0] in ("recipe", "tools", "bench") else 1], "--help"])
        assert done.exit_code == 0, line


def test_the_chinese_page_of_deployment_has_the_same_commands() -> None:
    english, chinese = (path.with_name("deploy.md") for path in GUIDES)
    assert fences(chinese)
    assert set(fences(chinese)) <= set(fences(english))


def test_chinese_pages_link_the_chinese_pages() -> None:
    """A link to an English page that has a Chinese version is called so."""
    for path in GUIDES[1].parent.glob("*.md"):
        for text, target in re.findall(r"\[([^\]]*)\]\(\.\./(\w+\.md)", path.read_text()):
            assert ("English" in text) == path.with_name(target).exists(), (path.name, target)


GENERATED = re.compile(r"<!-- (table|recipes)\b.*?<!-- /\1 -->", re.DOTALL)


def code(text: str) -> list[str]:
    """The code blocks without their comments, which are translated."""
    return [re.sub(r"\s+# .*$", "", block, flags=re.MULTILINE) for _, block in FENCE.findall(text)]


def figures(text: str) -> Counter[str]:
    """Every number outside generated tables: measurements, dates, versions, parts of names."""
    return Counter(re.findall(r"\d+(?:\.\d+)*", GENERATED.sub("", text)))


def spans(text: str) -> Counter[str]:
    """Code in the prose: settings, commands, values."""
    return Counter(re.findall(r"`([^`\n]+)`", FENCE.sub("", GENERATED.sub("", text))))


def links(path: Path) -> set[str]:
    """Addresses, and files as paths of the repository."""
    targets = re.findall(r"\]\(([^)#\s]+)", GENERATED.sub("", path.read_text()))
    return {to if "://" in to else str((path.parent / to).resolve().relative_to(ROOT)) for to in targets}


@pytest.mark.parametrize(("english", "chinese"), TWINS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_chinese_page_says_what_the_english_one_says(english: Path, chinese: Path) -> None:
    """Its generated tables may be a link to the English page instead."""
    ours, theirs = english.read_text(), chinese.read_text()
    assert code(ours) == code(theirs) != []
    assert re.findall(r"^#+ ", ours, re.MULTILINE) == re.findall(r"^#+ ", theirs, re.MULTILINE)
    assert figures(ours) == figures(theirs)
    assert not spans(ours) - spans(theirs)
    assert links(english) - {str(chinese.relative_to(ROOT))} <= links(chinese)

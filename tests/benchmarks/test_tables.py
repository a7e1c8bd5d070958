"""The tables in the documents are the result files', figure for figure."""

from __future__ import annotations

import re

import pytest

from benchmarks import tables


@pytest.mark.parametrize("path", tables.documents(), ids=lambda path: str(path.relative_to(tables.ROOT)))
def test_every_table_is_what_its_result_files_say(path):
    text = path.read_text()
    assert tables.render(text) == text, "run `python benchmarks/tables.py`"


def test_the_advice_about_drafts_is_what_the_result_files_say():
    assert tables.DRAFTS.read_text() == tables.advice(), "run `python benchmarks/tables.py`"


def test_the_readme_promises_what_its_table_says():
    text = (tables.ROOT / "README.md").read_text()
    table = re.search(r"<!-- table: speed .*?-->\n(.*?)<!-- /table", text, re.DOTALL)[1].splitlines()[2:]
    cells = [row.split("|")[column].strip() for row in table for column in (4, 7)]
    ratios = [float(cell) for cell in cells if cell]  # none where one side was not measured
    assert f"Decode on one H200 at {min(ratios)} to {max(ratios)} times stock speed." in text


def test_a_figure_changed_by_hand_is_found():
    text = (tables.ROOT / "docs" / "kernels" / "measurements.md").read_text()
    changed = text.replace("**1.23**", "**1.03**")
    assert changed != text
    assert tables.render(changed) == text


def test_a_table_of_no_kind_or_no_file_names_itself():
    for name in ("speeed decode-h200-2026-11-22.json", "speed no-such-file.json"):
        with pytest.raises(tables.TableError, match=name.split()[1] if "no-such" in name else "speeed"):
            tables.render(f"<!-- table: {name} -->\n<!-- /table -->")


def test_every_result_file_is_cited():
    documents = [*tables.documents(), *(tables.ROOT / "recipes").glob("*.yaml")]
    folders = [tables.ROOT / folder for folder in ("benchmarks", "vllm_gptoss", "tests")]
    readers = documents + [path for folder in folders for path in folder.rglob("*.py")]
    text = "".join(path.read_text() for path in readers)
    assert not [path.name for path in tables.RESULTS.iterdir() if path.name not in text]

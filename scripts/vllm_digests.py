#!/usr/bin/env python3
"""Writes `vllm_gptoss/_vllm/digests/VERSION.json` for a vLLM release on which the suite has passed.

    python scripts/vllm_digests.py 0.33.1 --tree .cache/vllm-0.33.1

The names come from the existing file of that version, else from the file of `--like` (default: the last release). A
listed class includes all its methods. The script prints names that the tree lacks and leaves them out: find out first
where vLLM moved them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from vllm_gptoss._vllm.compatibility import FOLDER, WHOLE, Source, digest, releases


def names(source: Source, listed: Iterable[str]) -> list[str]:
    """`listed` with the methods that its classes have now, in the order of the source."""
    wanted = set(listed)
    return [
        name for name in source.nodes
        if name in wanted or (name.rpartition(".")[0] in wanted and hasattr(source.nodes[name][0], "body"))
    ]  # fmt: skip


def digests(root: Path, listed: Mapping[str, Iterable[str]]) -> dict[str, dict[str, str]]:
    """By file, the digests of `listed` below `root`."""
    found = {}
    for file in sorted(listed):
        content = (root / file).read_bytes() if (root / file).is_file() else b""
        source = Source(content)
        have = {name: str(source.digest(name)) for name in names(source, listed[file])}
        for lost in [name for name in listed[file] if name not in have and name != WHOLE]:
            print(f"not in this release: {file} {lost}")
        if have:
            found[file] = {WHOLE: digest(content), **have}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("--tree", type=Path, required=True, help="the folder of the package vllm")
    parser.add_argument("--like", help="the release to take the list of")
    given = parser.parse_args()
    known = releases()
    like = given.like or (given.version if given.version in known else max(known))
    made = {part: digests(given.tree, files) for part, files in known[like].items()}
    (FOLDER / f"{given.version}.json").write_text(json.dumps(made, indent=1) + "\n")
    for part, files in made.items():
        print(f"{part}: {sum(map(len, files.values())) - len(files)} definitions of {len(files)} files")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Writes `vllm_gptoss/_vllm/digests/VERSION.json` for a vLLM release on which the suite has passed.

    python scripts/vllm_digests.py 0.33.1 --tree .cache/vllm-0.33.1

The names come from the existing file of that version, else from the file of `--like` (default: the last release). A
class listed by digest includes all its methods. Requirements of parameters or code are copied. The
script prints what the tree lacks and leaves it out: find out first where vLLM moved it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from vllm_gptoss._vllm.compatibility import FOLDER, WHOLE, Files, VllmSource, digest, releases


def names(source: VllmSource, listed: Mapping[str, str]) -> list[str]:
    """`listed` with the methods that its classes have now, in the order of the source."""
    classes = {name for name, value in listed.items() if not value.startswith(("(", "~"))}
    return [
        name for name in source.nodes
        if name in listed or (name.rpartition(".")[0] in classes and hasattr(source.nodes[name][0], "body"))
    ] + [name for name, value in listed.items() if value.startswith("(") and name not in source.nodes]  # fmt: skip


def digests(root: Path, listed: Files) -> dict[str, dict[str, str]]:
    """By file, the requirements of `listed` with the digests of the definitions below `root`."""
    found = {}
    for file in sorted(listed):
        content = (root / file).read_bytes() if (root / file).is_file() else b""
        source, have = VllmSource(content), {}
        for name in names(source, listed[file]):
            value = listed[file].get(name, "")
            have[name] = value if value.startswith(("(", "~")) else str(source.digest(name))
        lost = [name for name in listed[file] if name != WHOLE and not source.meets(name, have.get(name, ""))]
        for name in lost:
            print(f"not in this release: {file} {name} {listed[file][name]}")
        if have := {name: value for name, value in have.items() if name not in lost}:
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

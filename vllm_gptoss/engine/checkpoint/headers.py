"""Read the headers of safetensors files, a few kB per file, with safetensors' own reader.

That reader bounds the header (100 MB) and refuses what is truncated, has holes or overlaps, or disagrees with a shape.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

INDEX = "model.safetensors.index.json"
LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One header entry. dtype: as the format spells it, such as BF16."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path


class DamagedFileError(ValueError):
    """A file that safetensors refuses; the message has its reason, and what to do."""


def read_header(path: Path) -> list[Tensor]:
    """The tensors of a file.

    Raises:
        DamagedFileError: the file is truncated, damaged, or no safetensors file.
        OSError: the file system refuses it.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            entries = [(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118  not a mapping
            return [Tensor(name, entry.get_dtype(), tuple(entry.get_shape()), path) for name, entry in entries]
    except SafetensorError as error:
        with path.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise DamagedFileError(
                    f"{path.name} is a Git LFS pointer, not the weights: run `git lfs pull` there"
                ) from None
        why = f"{path.stat().st_size} bytes; {error}"
        raise DamagedFileError(f"{path.name} is damaged or truncated ({why}): download it again") from None


def weight_files(directory: Path) -> tuple[list[Path], list[str]]:
    """The files vLLM would read, as it chooses them: those the index names, else every *.safetensors; and problems."""
    present = sorted(directory.glob("*.safetensors"))
    index = directory / INDEX
    if not index.is_file():
        return present, ([] if present else [f"no *.safetensors file in {directory}"])
    try:
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        return present, [f"{INDEX} cannot be read ({error!r})"]
    problems, files = [], []
    for name in sorted(set(weight_map.values())):
        if (directory / name).is_file():
            files.append(directory / name)
            continue
        held = sorted(tensor for tensor, file in weight_map.items() if file == name)
        problems.append(f"{name} is not there; {INDEX} says it holds {len(held)} tensors, the first {held[0]}")
    return files, problems

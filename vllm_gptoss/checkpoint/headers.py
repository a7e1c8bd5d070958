"""Read the headers of safetensors files, and say exactly what is wrong with a damaged one.

Only headers are read, a few kB per file, whatever the checkpoint's size. Format: 8 bytes little-endian header length,
the header in JSON, then the tensors' bytes without holes (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LENGTH_BYTES = 8
MAX_HEADER = 100_000_000
"""The format's own limit on the header's length."""

INDEX = "model.safetensors.index.json"

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """One header entry. `start`, `end`: byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    file: Path

    @property
    def size(self) -> int:
        """Bytes that dtype and shape need; -1 for a dtype this module does not know."""
        bits = BITS.get(self.dtype)
        return -1 if bits is None else (math.prod(self.shape) * bits + 7) // 8


class DamagedFileError(ValueError):
    """A file whose header cannot be read at all; the message says why and what to do."""


def read_header(path: Path) -> tuple[list[Tensor], list[str]]:
    """The file's tensors in file order, and what is wrong with them.

    Errors: DamagedFileError if there is no header to read; OSError from the file system.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(LENGTH_BYTES)
        if prefix == b"version ":
            raise DamagedFileError(f"{path.name} is a Git LFS pointer, not the weights: run `git lfs pull` there")
        length = int.from_bytes(prefix, "little")
        if len(prefix) < LENGTH_BYTES or length > MAX_HEADER:
            raise DamagedFileError(f"{path.name} is no safetensors file ({size} bytes, no valid header length)")
        if LENGTH_BYTES + length > size:
            raise DamagedFileError(
                f"{path.name} is truncated inside its header: {size} bytes, the header alone needs "
                f"{LENGTH_BYTES + length}"
            )
        raw = file.read(length)
    entries, problems = _parse(raw, path)
    tensors = []
    for name, entry in entries.items():
        try:
            start, end = (LENGTH_BYTES + length + int(offset) for offset in entry["data_offsets"])
            tensor = Tensor(name, str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), start, end, path)
        except (KeyError, TypeError, ValueError) as error:
            problems.append(f"{name}: header entry cannot be read ({error!r}) in {path.name}")
            continue
        tensors.append(tensor)
    tensors.sort(key=lambda t: (t.start, t.end))
    return tensors, problems + _layout_problems(tensors, LENGTH_BYTES + length, size, path)


def _parse(raw: bytes, path: Path) -> tuple[dict[str, Any], list[str]]:
    repeated: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                repeated.append(key)
            seen[key] = value
        return seen

    try:
        header = json.loads(raw, object_pairs_hook=unique)
    except ValueError as error:
        raise DamagedFileError(f"{path.name} has a header that is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise DamagedFileError(f"{path.name} has a header that is not a JSON object")
    header.pop("__metadata__", None)
    return header, [f"{name}: appears twice in the header of {path.name}" for name in repeated]


def _layout_problems(tensors: list[Tensor], data_start: int, file_size: int, path: Path) -> list[str]:
    """Sizes that disagree with dtype and shape, holes, overlaps, and bytes missing at the end."""
    problems, at = [], data_start
    for tensor in tensors:
        if tensor.size not in (-1, tensor.end - tensor.start):
            problems.append(
                f"{tensor.name}: {tensor.dtype} {list(tensor.shape)} needs {tensor.size} bytes, "
                f"{path.name} gives it {tensor.end - tensor.start}"
            )
        if tensor.start != at:
            kind = "overlaps the tensor before it" if tensor.start < at else "follows a hole"
            problems.append(f"{tensor.name}: {kind} in {path.name}")
        at = max(at, tensor.end)
    cut = [t for t in tensors if t.end > file_size]
    if cut:
        rest = f", and {len(cut) - 1} more after it," if len(cut) > 1 else ""
        problems.append(
            f"{cut[0].name}: truncated{rest} because {path.name} has {file_size} bytes of {at}: download it again"
        )
    elif file_size > at:
        problems.append(f"{path.name} has {file_size - at} bytes after its last tensor")
    return problems


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

"""Refuse a checkpoint that is truncated, incomplete, renamed or wrongly shaped, naming each tensor and what it must be.

vLLM does not: for a quantised model it tracks no loaded names (`DefaultModelLoader.load_weights`), skips names it does
not know and copies a smaller tensor into a corner of the parameter, so the rest stays uninitialised memory.

`check` reads only the headers of the files in a directory (kB, not GB) and does not need torch. `checked` applies the
same checks to a stream of (name, tensor) pairs from any loader. Neither function reads tensor values.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from vllm_gptoss.engine.checkpoint.config import Config
from vllm_gptoss.engine.checkpoint.headers import DamagedFileError, Tensor, read_header, weight_files
from vllm_gptoss.engine.checkpoint.names import TOLERATED, Expected, Format, detect_format, expected

logger = logging.getLogger(__name__)

SHOWN = 12
"""Problems spelled out in one message; the rest are counted."""

EXPERT_SUFFIXES = {"_proj_blocks": "MXFP4", "experts.gate_up_proj": "BF16"}
"""Name suffixes that identify an expert's format."""

TORCH_DTYPES = {
    "torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32", "torch.float64": "F64",
    "torch.uint8": "U8", "torch.int8": "I8", "torch.float8_e4m3fn": "F8_E4M3", "torch.float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip


class CheckpointError(ValueError):
    """The checkpoint cannot be loaded. `problems`: one line each, starting with the tensor's or file's name."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        lines = [f"  {problem}" for problem in self.problems[:SHOWN]]
        if len(self.problems) > SHOWN:
            lines.append(f"  and {len(self.problems) - SHOWN} more")
        super().__init__(f"{source} is not a complete gpt-oss checkpoint:\n" + "\n".join(lines))


class TensorLike(Protocol):
    """What `checked` needs of a tensor."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> object: ...


T = TypeVar("T", bound=TensorLike)


def read_config(directory: Path) -> Config:
    """Reads `config.json`. Errors: CheckpointError that names a missing file or size."""
    path = directory / "config.json"
    try:
        return Config.from_json(json.loads(path.read_text()))
    except FileNotFoundError:
        raise CheckpointError(str(directory), [f"config.json: missing from {directory}"]) from None
    except KeyError as error:
        raise CheckpointError(str(directory), [f"config.json: {error.args[0]!r} is missing"]) from None
    except ValueError as error:
        raise CheckpointError(str(directory), [f"config.json: not JSON ({error})"]) from None


class Tables:
    """The tensors that a checkpoint may have: one table per format that its config.json leaves possible."""

    def __init__(self, config: Config) -> None:
        fmt = detect_format(config)
        # vLLM's Quark loader also takes OpenAI's fused names.
        formats: tuple[Format, ...] = () if fmt is None else ("quark", "mxfp4") if fmt == "quark" else (fmt,)
        self.tables = [expected(config, each) for each in formats]

    def __bool__(self) -> bool:
        return bool(self.tables)

    def problem(self, name: str, shape: tuple[int, ...], dtype: str, where: str = "") -> str | None:
        """What is wrong with this tensor; None if nothing, or if the name is in no table."""
        known = [table[name] for table in self.tables if name in table]
        if not known or any(entry.accepts(shape, dtype) for entry in known):
            return None
        return f"{name}: is {list(shape)} {dtype}{where}, expected {known[0]}"

    def absent(self, names: set[str]) -> dict[str, Expected]:
        """What the table with the most names in common has and `names` has not."""
        best = max(self.tables, key=lambda table: len(table.keys() & names))
        return {name: entry for name, entry in best.items() if name not in names}

    def unknown(self, names: Iterable[str]) -> list[str]:
        """Names that no table has and that are not known to be harmless."""
        return [n for n in names if not any(n in t for t in self.tables) and not n.endswith(TOLERATED)]


def missing_problems(tables: Tables, names: set[str], ignore: Sequence[str] = ()) -> list[str]:
    """One line per missing tensor, with the unknown name that resembles it, if any.

    ignore: missing names to let pass.
    """
    ignored = set(ignore)
    absent = {name: entry for name, entry in tables.absent(names).items() if name not in ignored}
    if not absent:
        return []
    unknown = tables.unknown(sorted(names))
    lines = []
    for suffix, held in EXPERT_SUFFIXES.items():
        if any(name.endswith(suffix) for name in unknown):
            lines.append(f"config.json: its quantization_config announces other experts than the {held} ones there are")
    for name, entry in absent.items():
        close = difflib.get_close_matches(name, unknown, n=1, cutoff=0.8) if len(absent) <= SHOWN else []
        hint = f"; {close[0]} is there and unknown, renamed?" if close else ""
        lines.append(f"{name}: missing, expected {entry}{hint}")
    return lines


def check(directory: Path | str, config: Config | None = None) -> None:
    """Check a local checkpoint by its headers.

    directory: where config.json and *.safetensors lie; config: read from there if None.

    Raises:
        CheckpointError: with every problem found, each naming its tensor or file.
    """
    directory = Path(directory)
    config = config or read_config(directory)
    tables = Tables(config)
    if not tables:
        logger.info("checkpoint %s not checked: format %r is not known here", directory, config.quantization)
        return
    files, problems = weight_files(directory)
    tensors: dict[str, Tensor] = {}
    damaged = False
    for path in files:
        try:
            found = read_header(path)
        except DamagedFileError as error:
            problems.append(str(error))
            damaged = True
            continue
        for tensor in found:
            if (other := tensors.get(tensor.name)) is not None:
                problems.append(f"{tensor.name}: in both {other.file.name} and {path.name}")
            tensors[tensor.name] = tensor
    for tensor in tensors.values():
        problem = tables.problem(tensor.name, tensor.shape, tensor.dtype, f" in {tensor.file.name}")
        if problem is not None:
            problems.append(problem)
    if not damaged:  # what is missing may be in that file
        problems += missing_problems(tables, set(tensors))
    if problems:
        raise CheckpointError(str(directory), problems)
    _warn_unknown(tables, tensors, str(directory))


def checked(
    weights: Iterable[tuple[str, T]],
    config: Config,
    *,
    source: str = "the weights given",
    complete: bool = True,
    ignore_missing: Sequence[str] = (),
) -> Iterator[tuple[str, T]]:
    """Pass (name, tensor) through, checking each before it is copied, and at the end that no tensor is missing.

    source: how messages call the checkpoint; complete: False when only some tensors are sent, as weight updates do;
    ignore_missing: names that a loader leaves out on purpose.

    Raises:
        CheckpointError: at the first tensor that is wrong; after the last if any is missing.
    """
    tables = Tables(config)
    if not tables:
        logger.info("weights not checked: format %r is not known here", config.quantization)
        yield from weights
        return
    names: set[str] = set()
    for name, tensor in weights:
        dtype = TORCH_DTYPES.get(str(tensor.dtype), str(tensor.dtype))
        problem = tables.problem(name, tuple(tensor.shape), dtype)
        if complete and name in names:
            problem = f"{name}: sent twice"
        if problem is not None:
            raise CheckpointError(source, [problem])
        names.add(name)
        yield name, tensor
    if complete:
        problems = missing_problems(tables, names, ignore_missing)
        if problems:
            raise CheckpointError(source, problems)
        _warn_unknown(tables, names, source)


def _warn_unknown(tables: Tables, names: Iterable[str], source: str) -> None:
    unknown = tables.unknown(sorted(names))
    if unknown:
        logger.warning("%s has %d tensors that gpt-oss does not use, such as %s", source, len(unknown), unknown[0])

"""`python -m demo.expand [DIR] [--wide]`: the small model as a full model directory, ready for `vllm serve DIR`.

Built under a temporary name and renamed, so an existing directory is complete; the next run removes the files of an
interrupted one. Checksums written into it are compared on every use: a damaged directory is built again.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from demo.model import Shape

logger = logging.getLogger(__name__)

WEIGHTS = Path(__file__).with_name("weights.safetensors")
SUMS = "SHA256SUMS.json"


def key(wide: bool = False) -> str:
    """Digest (16 hex digits) of the weights and of the code that expands them."""
    digest = hashlib.sha256()
    names = ("weights.safetensors", "checkpoint.py", "expand.py", "tokenizer.py")
    for name in (*names, "widen.py") if wide else names:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()[:16]


def model_dir(cache: Path | None = None, wide: bool = False) -> Path:
    """The expanded model, built if needed: `cache`/<key>, by default under the user's cache directory.

    wide: in `widen.LIKE_20B`'s shape, which every kernel takes; 5 GB.
    """
    if cache is None:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        cache = Path(base) / "vllm-gptoss" / "demo"
    return expand(cache / key(wide), wide)


def expand(target: Path, wide: bool = False) -> Path:
    """Puts the model at `target` and returns it. FileExistsError if something else is there."""
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target):
        _remove_leftovers(target)
        if target.exists():
            if not (target / SUMS).is_file() and any(target.iterdir()):
                raise FileExistsError(f"{target} holds something else; name an empty or a new directory")
            if problem := damage(target):
                logger.warning("Building %s again: %s", target, problem)
                shutil.rmtree(target)
        if not target.exists():
            _build(target, write_wide if wide else write)
    return target


def damage(folder: Path) -> str | None:
    """The defect of an expanded model, or None."""
    try:
        sums = json.loads((folder / SUMS).read_text("utf-8"))
        wrong = [name for name, expected in sums.items() if _sha256(folder / name) != expected]
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return f"{', '.join(wrong)} changed" if wrong or not sums else None


def write(folder: Path) -> None:
    """All files of the model but the checksums into `folder`."""
    from demo import checkpoint

    _write(folder, *checkpoint.tensors(WEIGHTS))


def write_wide(folder: Path) -> None:
    """The same, as wide as gpt-oss-20b."""
    from demo import checkpoint, widen

    _write(folder, widen.LIKE_20B, widen.widen(*checkpoint.tensors(WEIGHTS), widen.LIKE_20B))


def _write(folder: Path, shape: Shape, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    from demo import checkpoint, tokenizer

    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name, data in (("config", checkpoint.config(shape)), ("generation_config", checkpoint.generation_config())):
        (folder / f"{name}.json").write_text(json.dumps(data, indent=2) + "\n", "utf-8")
    tokenizer.write(folder)


def _build(target: Path, write: Callable[[Path], None]) -> None:
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        write(partial)
        sums = {path.name: _sha256(path) for path in sorted(partial.iterdir())}
        (partial / SUMS).write_text(json.dumps(sums, indent=2) + "\n", "utf-8")
        for path in partial.iterdir():
            path.chmod(0o644)
            with path.open("rb") as file:
                os.fsync(file.fileno())
        partial.chmod(0o755)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_leftovers(target: Path) -> None:
    for path in target.parent.glob(f".{target.name}.partial-*"):
        logger.warning("Removing %s, left by an interrupted run", path)
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _lock(target: Path) -> Iterator[None]:
    with (target.parent / f".{target.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    """Command line: prints the directory."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", help="where to put the model; default: the user's cache")
    parser.add_argument("--wide", action="store_true", help="in gpt-oss-20b's sizes, for a GPU's kernels: 5 GB")
    args = parser.parse_args()
    start = time.monotonic()
    path = expand(args.directory, args.wide) if args.directory else model_dir(wide=args.wide)
    logger.info("Small gpt-oss ready in %.1f s", time.monotonic() - start)
    print(path)


if __name__ == "__main__":
    main()

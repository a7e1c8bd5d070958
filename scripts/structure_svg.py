"""Draws docs/structure.svg from the tree: packages of `vllm_gptoss/`, their contents and their imports.

Run `python scripts/structure_svg.py` after a package was added, moved or removed.
"""

from __future__ import annotations

import ast
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "vllm_gptoss"
OUT = ROOT / "docs" / "structure.svg"
COLUMNS = (("server", "API server process", "#eef3f8"), ("tools", "python, browser, MCP", "#eaf3ea"))
COLUMNS += (("engine", "engine and worker processes", "#f6f1e4"), ("cli", "vllm-gptoss command", "#f3eef6"))
WIDTH, ROW, GAP, CHARACTERS = 290, 46, 8, 46


def children(folder: Path) -> list[Path]:
    """Subpackages of a package."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and any(path.glob("*.py")))


def modules(folder: Path) -> list[str]:
    """Names of the modules of a package, without `__init__` and `__main__`."""
    return sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("__"))


def contents(folder: Path) -> str:
    """Names of subpackages and modules, as many as fit a line."""
    names, line = [f"{path.name}/" for path in children(folder)] + modules(folder), ""
    for position, name in enumerate(names):
        longer = f"{line}, {name}" if line else name
        if len(longer) > CHARACTERS - 3 * (position < len(names) - 1):
            return f"{line}, …"
        line = longer
    return line


def imports(folder: Path) -> str:
    """Other parts of the package that a package imports."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith(PACKAGE.name):
                names = [node.module.split(".")[1]] if "." in (node.module or "") else [a.name for a in node.names]
                found |= set(names) - {folder.name, "version"}
    return ", ".join(sorted(found)) or "nothing else of the package"


def text(x: int, y: int, words: str, style: str = 'fill="#3a4a57"') -> str:
    return f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>'


def box(x: int, y: int, width: int, height: int, fill: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" stroke="#7b93ab"/>'


def column(x: int, name: str, what: str, fill: str, height: int) -> list[str]:
    folder, bold = PACKAGE / name, 'font-weight="bold" fill="#1d2b36"'
    lines = [box(x, 20, WIDTH, height, fill), text(x + 12, 42, f"{name}/", f'font-size="15" {bold}')]
    lines += [text(x + 80, 42, what), text(x + 12, 62, f"imports {imports(folder)}")]
    for row, child in enumerate(children(folder)):
        y = 74 + row * (ROW + GAP)
        lines += [box(x + 10, y, WIDTH - 20, ROW, "#ffffff"), text(x + 20, y + 19, child.name, bold)]
        lines.append(text(x + 20, y + 36, contents(child), 'font-size="11" fill="#3a4a57"'))
    return lines


def draw() -> str:
    """The picture as SVG."""
    height = 60 + max(len(children(PACKAGE / name)) for name, _, _ in COLUMNS) * (ROW + GAP)
    width, total = len(COLUMNS) * (WIDTH + 12) + 28, height + 110
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        "<title>Packages of vllm-gptoss</title>",
        f'<rect width="{width}" height="{total}" fill="#ffffff"/>',
    ]
    for number, (name, what, fill) in enumerate(COLUMNS):
        lines += column(20 + number * (WIDTH + 12), name, what, fill, height)
    below = modules(PACKAGE)
    lines += [box(20, height + 34, width - 40, 52, "#f4f4f4"), text(32, height + 56, f"shared: {', '.join(below)}")]
    inner = ", ".join(modules(PACKAGE / "_vllm"))
    lines += [text(32, height + 74, f"_vllm/ (access to vLLM's internals): {inner}")]
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    OUT.write_text(draw())

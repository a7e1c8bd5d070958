"""`struct Args` as a kernel's source declares it."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

KINDS = {"pointer": ctypes.c_void_p, "long long": ctypes.c_longlong, "int": ctypes.c_int, "float": ctypes.c_float}


def declared(source: Path) -> list[tuple[str, Any]]:
    """Its fields in their order, and the ctypes type of each."""
    body = re.search(r"struct Args \{(.*?)\};", source.read_text(), re.DOTALL)
    found = []
    for line in re.sub(r"//.*", "", body[1]).split(";"):
        if not (line := " ".join(line.split())):
            continue
        kind = "pointer" if "*" in line else "long long" if "long long" in line else line.split()[0]
        names = re.sub(r"^(const )?(bf16|Element|void|float|int|long long)", "", line).replace("*", "").split(",")
        found += [(name.strip(), KINDS[kind]) for name in names]
    return found

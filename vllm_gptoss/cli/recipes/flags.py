"""Reads the words of a `vllm serve` line without vLLM, for `plan`, and where vLLM is not installed.

It knows the types of the flags that the tables and the plan read. Other flags remain text, also unknown ones: only
vLLM's parser (`probe`) refuses them.
"""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from vllm_gptoss.cli.recipes.deployment import NUMBERS
from vllm_gptoss.cli.recipes.load import RecipeError, read

SHORT: Final[Mapping[str, str]] = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-dcp": "decode-context-parallel-size",
    "-pcp": "prefill-context-parallel-size",
    "-ep": "enable-expert-parallel",
    "-cc": "compilation-config",
    "-sc": "speculative-config",
    "-ac": "attention-config",
    "-asc": "api-server-count",
    "-q": "quantization",
}
SWITCHES: Final = re.compile(r"(enable|disable|no|skip|trust)-.*|async-scheduling|enforce-eager|headless")
"""Flags that take no value."""

COUNTED: Final = re.compile(
    "|".join(NUMBERS) + r"|model|dtype|(no-)?enable-.*|enforce-eager|.*-backend|kv-cache-dtype|cudagraph-capture-sizes"
    r"|(compilation|speculative)-config|additional-config|(reasoning|tool-call)-parser|chat-template"
)
"""Flags that a plan depends on."""

NEW_FLAGS: Final[Mapping[str, str]] = {
    "--monokernel": "0.33",
    "--no-monokernel": "0.33",
    "--reasoning-effort-map": "0.33",
    "--sleep-mode-backend": "0.33",
    "--watchdog-config": "0.33",
}
"""Flags, and the first release that has them. 0.33 also has `--disable-x` for each `--enable-x`, and the reverse."""

RENAMED: Final[Mapping[str, str]] = {
    "full_cuda_graph": "full_cuda_graph became cudagraph_mode, which has full graphs by default: leave it out",
    "flashinfer_trtllm_mxfp8": 'use --additional-config \'{"gptoss": {"experts": "flashinfer_trtllm_mxfp8"}}\'',
    "enable_fi_allreduce_fusion": "it is pass_config.fuse_allreduce_rms today",
    "enable_noop": "it is pass_config.eliminate_noops today",
}
"""Options of old recipes that parsers refuse, and today's."""

_SERVE = re.compile(
    r"(?:(?:\S*/)?vllm serve|(?:\S*/)?python[\d.]* -m vllm\.entrypoints\.(?:openai\.api_server|cli\.main serve)) "
)
_UNITS: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def words(command: Sequence[str]) -> list[str]:
    """The words after `vllm serve`, or after the module that it runs, without the variables in front."""
    found = list(command)
    while found and "=" in found[0] and not found[0].startswith("-"):
        found.pop(0)
    start = _SERVE.match(" ".join([*found[:4], ""]))
    return found[start[0].count(" ") :] if start else [] if found == ["vllm"] else found


def variables(command: Sequence[str]) -> dict[str, str]:
    """Variables in front of a command, as `NAME=value`."""
    found = {}
    for word in command:
        name, sign, value = word.partition("=")
        if not sign or word.startswith("-"):
            break
        found[name] = value
    return found


def values(words: Sequence[str]) -> dict[str, Any]:
    """Values by flag, as `probe` returns them; keys of a `--config` file that the line does not set included.

    Raises:
        RecipeError: a value cannot be read; the message names the flag.
    """
    found: dict[str, Any] = {}
    for key, text in _pairs(words):
        if key.startswith("no-"):
            found[key.removeprefix("no-")] = False
            continue
        name, *inner = key.split(".")
        value = _value(name, text) if not inner else text if text is None else _plain(text)
        if not inner:
            found[name] = value
            continue
        at = found.setdefault(name, {})
        for part in inner[:-1]:
            at = at.setdefault(part, {})
        at[inner[-1]] = True if value is None else value
    if "config" not in found:
        return found
    data, _ = read(Path(str(found.pop("config"))))
    if not isinstance(data, dict):
        raise RecipeError("--config: the file holds no keys")
    file = {str(key).replace("_", "-"): value for key, value in data.items() if value is not False}
    return file | found


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Flags without their dashes and their values; the model is the first word that belongs to no flag."""
    rest, model = list(words), False
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            if not model:
                yield "model", word
            model = True  # a later word is one more value of a flag, as of --served-model-name
            continue
        flag, sign, value = word.partition("=")
        head, dot, inner = flag.partition(".")
        key = SHORT.get(head, head.lstrip("-").replace("_", "-")) + dot + inner
        if key == "cudagraph-capture-sizes" and not sign:  # it takes several numbers
            numbers = list(itertools.takewhile(str.isdigit, rest))
            del rest[: len(numbers)]
            yield key, f"[{', '.join(numbers)}]"
        elif sign:
            yield key, value
        elif SWITCHES.fullmatch(key) or not rest or rest[0].startswith("--"):
            yield key, None
        else:
            yield key, rest.pop(0)


def _value(key: str, text: str | None) -> Any:
    if text is None:
        return True
    if key in NUMBERS:
        return _number(key, text)
    if text.lower() in ("true", "false") and SWITCHES.fullmatch(key):
        return text.lower() == "true"
    found = _plain(text)
    return found if isinstance(found, dict | list) else text


def _number(key: str, text: str) -> int | float | str:
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kKmMgG]?)", text)
    if key == "max-model-len" and text == "auto":
        return -1
    if match is None:
        raise RecipeError(f"--{key}: {text!r} is no number")
    number = float(match[1]) * _UNITS.get(match[2], 1)
    return number if NUMBERS[key] is float or not number.is_integer() else int(number)


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def since_then(error: str, known: frozenset[str]) -> str:
    """What a parser's error means where another release or an old recipe has the option; else empty."""
    if (remedy := next((remedy for name, remedy in RENAMED.items() if name in error), None)) is not None:
        return remedy
    unknown = [word.split("=")[0] for word in error.split() if word.startswith("--")] if "unrecognized" in error else []
    said = []
    for flag in unknown:
        if since := _since(flag, known):
            said.append(f"{flag} needs vLLM {since}")
        elif near := difflib.get_close_matches(flag, known, n=1):
            said.append(f"did you mean {near[0]}?")
    return ", ".join(said)


def _since(flag: str, known: frozenset[str]) -> str | None:
    pairs = (("--disable-", "--enable-"), ("--enable-", "--disable-"))
    twin = next((other + flag.removeprefix(prefix) for prefix, other in pairs if flag.startswith(prefix)), "")
    found = NEW_FLAGS.get(flag) or ("0.33" if twin in known else None)
    return found if found is not None and flag not in known else None

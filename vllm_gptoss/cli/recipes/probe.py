"""Runs one vLLM release's parser and engine checks on configurations, JSON in and out, in a separate process.

vLLM's modules store the platform at import, and an unpacked release must not mix with an installed one. One start (9 to
14 s) answers for all configurations.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vllm_gptoss import _vllm
from vllm_gptoss._vllm import serve
from vllm_gptoss.cli.recipes import flags
from vllm_gptoss.cli.recipes.model_config import model_config
from vllm_gptoss.cli.recipes.schema import SPECS, size_of

LIMIT_S = 300
MODULE = "vllm_gptoss.cli.recipes.probe"
_PLUGIN = "gptoss_parsing"


class ProbeError(RuntimeError):
    """A vLLM that does not start; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """One configuration. error: the parser's, else empty; refused: why the engine does not start with it, else empty;
    restated: keys that repeat a default; dropped: keys of the file that `--config` ignores; values: by flag, without
    defaults.
    """

    error: str
    refused: str = ""
    restated: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Release:
    """What a release has. The sets are names that its parser does not check."""

    version: str
    parsed: tuple[Parsed, ...]
    flags: frozenset[str]
    variables: frozenset[str]
    attention_backends: frozenset[str]
    cache_dtypes: frozenset[str]
    speculative_keys: frozenset[str]
    speculative_methods: frozenset[str]


Question = Mapping[str, Any] | Sequence[str]
"""A configuration as `--config` reads it, or the words after `vllm serve`."""


def ask(questions: Sequence[Question], root: Path | None = None, environ: Mapping[str, str] | None = None) -> Release:
    """The answers of the installed vLLM to `questions`; with `root`, those of the unpacked release there.

    environ: variables of the server; default: this process's.

    Raises:
        ProbeError: there is no vLLM, or it does not start.
    """
    if root is not None and not (root / "vllm" / "envs.py").is_file():
        raise ProbeError(f"no vLLM is unpacked in {root}: give the folder that holds its folder vllm")
    with tempfile.TemporaryDirectory() as folder:
        path = [*([root] if root else []), Path(__file__).parents[3], _platform_plugin(Path(folder))]
        return _ask(questions, path, os.environ if environ is None else environ)


def roots_of(sources: Sequence[Path]) -> list[Path | None]:
    """None, the installed vLLM, where there is one, and the unpacked `sources`."""
    return [*([None] if _vllm.version() else []), *sources]


def of_line(
    words: Sequence[str], environ: Mapping[str, str], sources: Sequence[Path] = ()
) -> tuple[Mapping[str, Any], list[tuple[Release, Parsed]]]:
    """The values of a `vllm serve` line, and the answer of each release; none where vLLM is not installed.

    Raises:
        ProbeError: a vLLM does not start.
        RecipeError: without vLLM, a value cannot be read.
    """
    roots = roots_of(sources)
    if not roots:
        return flags.values(words), []
    releases = [ask([words], root, environ) for root in roots]
    found = [(release, release.parsed[0]) for release in releases]
    return next((parsed.values for _, parsed in found if not parsed.error), {}), found


def answer_of(module: str, what: str, asked: str = "", environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The JSON in the last line that `python -m module` prints for the input `asked`. what: its name in an error.
    Raises: ProbeError: it failed, printed nothing, or took longer than `LIMIT_S`.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", module], input=asked, capture_output=True, text=True, timeout=LIMIT_S,
            env=environ,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ProbeError(f"{what} took more than {LIMIT_S} s") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise ProbeError(f"{what} does not start here (exit code {done.returncode}): {last[0]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def platform() -> str:
    """vLLM's entry point for platforms: parsing needs no device, and must not depend on the machine."""
    return str(serve.PLATFORM)


def _platform_plugin(folder: Path) -> Path:
    """A distribution with that entry point, only on the path of the probe's process."""
    info = folder / f"{_PLUGIN}-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_PLUGIN}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[vllm.platform_plugins]\n{_PLUGIN} = {MODULE}:platform\n")
    return folder


def _ask(questions: Sequence[Question], path: Sequence[Path], environ: Mapping[str, str]) -> Release:
    environ = {**environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "HF_HUB_OFFLINE": "1"}
    environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": _PLUGIN}
    asked = json.dumps([dict(each) if isinstance(each, Mapping) else list(each) for each in questions])
    found = answer_of(MODULE, "vLLM's parser", asked, environ)
    parsed = tuple(
        Parsed(each["error"], each["refused"], tuple(each["restated"]), tuple(each["dropped"]), each["values"])
        for each in found["parsed"]
    )
    sets = {name: frozenset(values) for name, values in found.items() if name not in ("version", "parsed")}
    return Release(found["version"], parsed, **sets)


def main() -> None:
    questions = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):  # vLLM prints while it loads; only our line may reach stdout
        answer = _answer(questions)
    print(json.dumps(answer))


def _answer(questions: Sequence[Question]) -> dict[str, Any]:
    parser, inner = serve.parser()
    actions = serve.actions(inner)
    defaults, _ = serve.parse(parser, ["m"])
    with tempfile.TemporaryDirectory() as folder:
        for size, spec in SPECS.items():
            (Path(folder) / size).mkdir()
            (Path(folder) / size / "config.json").write_text(json.dumps(model_config(spec)))
        parsed = [_parsed(parser, actions, defaults, question, Path(folder)) for question in questions]
    return {
        "version": serve.release(),
        "parsed": parsed,
        "flags": sorted(actions),
        "variables": _vllm.environment_variables(),
        "attention_backends": serve.attention_backends(),
        "cache_dtypes": serve.cache_dtypes(),
        "speculative_keys": serve.speculative_keys(),
        "speculative_methods": serve.speculative_methods(),
    }


def _parsed(
    parser: Any, actions: Mapping[str, Any], defaults: Any, question: Question, configs: Path
) -> dict[str, Any]:
    if not isinstance(question, Mapping):
        file = _file(question)
        found, error = serve.parse(parser, question)
    else:
        file = question
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as written:
            json.dump(question, written)  # which is YAML too
            written.flush()
            found, error = serve.parse(parser, ["--config", written.name])
    if found is None:
        return {"error": error, "refused": "", "restated": [], "dropped": [], "values": {}}
    model = str(getattr(found, "model_tag", None) or found.model)
    if not (Path(model) / "config.json").is_file():
        model = str(configs / size_of(model))
    refused = serve.refusal(found, model)
    dests = {key: actions[f"--{key}"].dest for key in file if f"--{key}" in actions and key != "model"}
    return {
        "error": "",
        "refused": refused,
        "restated": [key for key, dest in dests.items() if getattr(found, dest) == getattr(defaults, dest)],
        "dropped": [key for key, dest in dests.items() if file[key] is False and getattr(found, dest) is not False],
        "values": serve.values(defaults, found),
    }


def _file(words: Sequence[str]) -> Mapping[str, Any]:
    """The keys of the `--config` file; empty where vLLM will report an error in it."""
    name = next((after for word, after in itertools.pairwise(words) if word == "--config"), None)
    try:
        found = yaml.safe_load(Path(name).read_text()) if name is not None else {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, Mapping) else {}


if __name__ == "__main__":
    main()

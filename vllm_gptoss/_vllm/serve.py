"""How a vLLM release parses `vllm serve` flags, and which names its parser does not check.

Works on a machine without a GPU, also on the unpacked source of a CUDA release that cannot run here: nothing below
touches a device once a platform plugin has named the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import enum
import importlib
import io
import re
import typing
from collections.abc import Sequence
from typing import Any
from unittest import mock

PLATFORM = "vllm.platforms.cpu.CpuPlatform"
"""What a platform plugin names for parsing: a CUDA release's own detection fails where there is no GPU."""


def release() -> str:
    """The version of the vLLM that is imported, which need not be the installed one."""
    import vllm

    return str(vllm.__version__)


def parser() -> tuple[Any, Any]:
    """The parser of `vllm`, and its own of `serve`, nested as `vllm.entrypoints.cli` nests them.

    The outer parser reads `--config` and does not know `serve`'s flags.
    """
    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser
    except ImportError:  # vLLM 0.32
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    outer = FlexibleArgumentParser(prog="vllm")
    inner = outer.add_subparsers(dest="subparser").add_parser("serve")
    return outer, make_arg_parser(inner)


def parse(parser: Any, words: Sequence[str]) -> tuple[Any, str]:
    """The namespace of `vllm serve` and `words`, or None and the parser's error."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parser.parse_args(["serve", *words]), ""
    except SystemExit:
        text = said.getvalue()
        return None, " ".join(text[text.rfind("error:") + 6 :].split()) or "it was refused"
    except Exception as error:  # a validator's own
        return None, f"{type(error).__name__}: {error}"


def refusal(namespace: Any, model: str) -> str:
    """Why vLLM refuses the arguments of `vllm serve` for the model in the folder `model`; empty where it accepts them.

    Runs the checks of the API server and `create_engine_config`. Skipped: a platform's own checks, Ray, and draft
    models, because their configuration is on the hub.
    """
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform

        given = copy.deepcopy(vars(namespace))  # vLLM writes into objects that all namespaces of a parser share
        given |= {"model": model, "model_tag": model, "tokenizer": None, "distributed_executor_backend": None}
        if (given.get("speculative_config") or {}).get("model"):
            given["speculative_config"] = None
        _check_server(argparse.Namespace(**given))
        given["reasoning_parser"] = ""  # vLLM would read the model's tokenizer
        checks = {name: lambda *_: True for name in ("check_and_update_config", "is_sleep_mode_available")}
        with mock.patch.multiple(current_platform, create=True, **checks):
            AsyncEngineArgs.from_cli_args(argparse.Namespace(**given)).create_engine_config()
    except Exception as error:
        refusals = (ValueError, KeyError, TypeError, AssertionError, NotImplementedError)
        if isinstance(error, refusals) or type(error).__module__.startswith("vllm"):
            return _first_line(error)
        # another release's modules, or a package that is not installed: no verdict
    return ""


def _check_server(args: Any) -> None:
    """The checks of `vllm.entrypoints` before an engine starts."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    modules = ("launchers", "openai", "common")
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(f"vllm.entrypoints.{name}.cli_args").validate_parsed_serve_args(args)
            break
    for what, name, plugin, manager in (
        ("tool call", args.enable_auto_tool_choice and args.tool_call_parser, "tool_parser_plugin", ToolParserManager),
        ("reasoning", args.reasoning_parser, "reasoning_parser_plugin", ReasoningParserManager),
    ):
        if name and not getattr(args, plugin, None) and name not in manager.list_registered():
            raise ValueError(f"invalid {what} parser: {name}")


def _first_line(error: Exception) -> str:
    """The sentence of a validation error, without pydantic's frame."""
    said = error.args[0] if isinstance(error, KeyError) and error.args else str(error)
    found = re.search(r"(?:Value error|Assertion failed), (.*?) \[type=", str(said), re.DOTALL)
    return " ".join((found[1] if found else str(said)).split())[:400] or type(error).__name__


def actions(parser: Any) -> dict[str, Any]:
    """Each option string of `serve`'s parser and the action that takes it."""
    return dict(parser._option_string_actions)


def values(defaults: Any, found: Any) -> dict[str, Any]:
    """The values of a namespace that differ from the parser's defaults, by flag; of an object its changed fields."""
    said = {name: value for name, value in vars(found).items() if value != getattr(defaults, name, None)}
    plain = {name.replace("_", "-"): _plain(value, getattr(defaults, name, None)) for name, value in said.items()}
    tag = plain.pop("model-tag", None)
    return plain if tag is None else {**plain, "model": tag}


def _plain(value: Any, default: Any = None) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        return {name: _plain(each) for name, each in fields.items() if each != getattr(default, name, None)}
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(each) for each in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def attention_backends() -> list[str]:
    """Names that `--attention-backend` may have; the parser takes any."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return [backend.name for backend in AttentionBackendEnum]


def cache_dtypes() -> list[str]:
    """Names that `--kv-cache-dtype` may have; the parser of 0.33 takes any."""
    from vllm.config.cache import CacheDType

    return list(typing.get_args(CacheDType))


def speculative_keys() -> list[str]:
    """Keys of `--speculative-config`; the parser takes any."""
    from vllm.config import SpeculativeConfig

    return [field.name for field in dataclasses.fields(SpeculativeConfig)]


def speculative_methods() -> list[str]:
    """Values of `method` in `--speculative-config`."""
    from vllm.config import speculative

    return sorted(_literals(speculative.SpeculativeMethod))


def _literals(kind: Any) -> set[str]:
    found = typing.get_args(kind)
    return set().union(*(_literals(each) if typing.get_args(each) else {str(each)} for each in found))

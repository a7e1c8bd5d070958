"""The plugin's settings: `--additional-config '{"gptoss": {...}}'`, or `GPTOSS_*` variables.

The config wins over the environment. An unknown key or value is an error that lists the known ones.
vLLM includes `additional_config` in its compile cache key, so both ways have the same effect.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

Experts = Literal[
    "auto",
    "upstream",
    "gptoss",
    "triton",
    "marlin",
    "humming",
    "flashinfer_trtllm",
    "flashinfer_trtllm_mxfp8",
    "flashinfer_cutlass",
    "aiter",
    "native",
    "dequantize",
]


class SettingsError(ValueError):
    """A plugin setting that does not exist or cannot have that value."""


class ChoiceError(ValueError):
    """A requested choice that this device or configuration cannot run; the message names an alternative."""


class Settings(BaseModel, extra="forbid", frozen=True):
    """All settings. Field names are the keys, and `GPTOSS_<NAME>` are the variables."""

    experts: Experts = Field("auto", description="MXFP4 expert kernel; `upstream` leaves vLLM's own choice")
    layers: Literal["auto", "upstream", "gptoss", "attention"] = Field("auto", description="decode layer kernels")
    endpoint: bool = Field(True, description="serve /v1/responses with the plugin's handler")
    parser: bool = Field(True, description="read Harmony with the plugin's parser in chat completions")
    host: Literal["auto", "stock", "gptoss"] = Field(
        "auto",
        description="`stock` leaves vLLM's own way to stream completions and to run a decode step; `gptoss` runs the"
        " plugin's runner, also with drafts and KV connectors",
    )
    strict_tools: bool = Field(True, description="constrain tool calls to the offered tools and schemas")
    store: str = Field(
        "", description="SQLAlchemy URL of the response store; empty: SQLite in the user's state directory"
    )
    tools: str = Field("", description="tool servers; empty: the value of --tool-server")
    prompts: str = Field("", description="prompt templates of /v1/responses: a YAML file, or a folder of them")
    ui: bool = Field(False, description="serve the web page at /ui")
    max_body_bytes: int = Field(32 << 20, gt=0, description="of one request body")
    max_body_values: int = Field(50_000, gt=0, description="JSON values of one body; 16 numbers of a list are one")
    caller_body_bytes: int = Field(64 << 20, gt=0, description="of all bodies of one API key that are being received")
    total_body_bytes: int = Field(256 << 20, gt=0, description="the same, of all API keys together")
    checked_keys: bool = Field(
        False, description="each Authorization header is a separate caller although this server checks none"
    )

    workers: int = Field(0, ge=0, description="confined workers of a kind at once; 0: half of the cores, 2 to 8")
    caller_worker_queue: int = Field(64, gt=0, description="jobs of one API key that wait for a confined worker")
    worker_queue: int = Field(256, gt=0, description="jobs of all API keys that wait for a confined worker")

    @classmethod
    def load(cls, additional_config: object = None, environ: Mapping[str, str] | None = None) -> Settings:
        """Reads the `gptoss` entry of vLLM's additional config over the environment.

        Raises:
            SettingsError: an unknown key, or a value that its key does not take.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for name in cls.model_fields:
            if (value := environ.get(f"GPTOSS_{name.upper()}")) is not None:
                values[name] = value
        own = additional_config.get("gptoss", {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(own, Mapping):
            raise SettingsError(f'additional_config["gptoss"] must be an object, got {type(own).__name__}')
        try:
            return cls(**{**values, **own})
        except ValidationError as error:
            raise SettingsError(_explain(error, cls)) from None


def _explain(error: ValidationError, cls: type[Settings]) -> str:
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(f"unknown gptoss setting {key!r}; there are {', '.join(sorted(cls.model_fields))}")
        else:
            lines.append(f"gptoss setting {key!r} (GPTOSS_{key.upper()}): {problem['msg']}, got {problem['input']!r}")
    return "; ".join(lines)

"""One file of recipes, as pydantic checks it. `vllm-gptoss recipe schema` prints it as JSON Schema."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from vllm_gptoss.engine.choose import devices
from vllm_gptoss.engine.choose.device import Device
from vllm_gptoss.engine.spec import GPT_OSS_20B, GPT_OSS_120B, ModelSpec

SPECS: Mapping[str, ModelSpec] = {"20b": GPT_OSS_20B, "120b": GPT_OSS_120B}


def size_of(model: str) -> str:
    """`20b` or `120b`, by the name of a model or its folder; 20b where the name has neither."""
    return "120b" if "120b" in model else "20b"


ModelName = Literal["20b", "120b"]
Short = Annotated[str, Field(min_length=1, max_length=400)]


class Goal(StrEnum):
    """What a user wants most."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"
    LONG_CONTEXT = "long-context"
    AGENT = "agent"
    EVALUATION = "evaluation"


class Status(StrEnum):
    """Evidence of a recipe, derived from its claims."""

    MEASURED = "measured"
    PUBLISHED = "published-elsewhere"
    CONFIGURATION = "configuration-only"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Expects(_Strict):
    """What `choose` must answer for the recipe's device and configuration."""

    attention: Short
    experts: Short
    layers: Literal["gptoss", "upstream"]


class Claim(_Strict):
    """ms per output token that we measured with these flags. Date, vLLM and command are in the results file."""

    model: ModelName
    device: Short
    requests: int = Field(ge=1)
    tpot_ms: float = Field(gt=0)
    stock_ms: float | None = Field(None, gt=0)
    results: str = Field(pattern=r"^[\w.-]+\.json$")


class Published(_Strict):
    """A published figure of other authors for these flags. devices: those it applies to; empty: all of the entry."""

    source: str = Field(pattern=r"^https://\S+$")
    says: Short
    models: tuple[ModelName, ...] = ()
    devices: tuple[str, ...] = ()


class Entry(_Strict):
    """The same flags for several models and devices. `{model}` in a value becomes `20b` or `120b`."""

    goal: Goal
    variant: str = Field("", pattern=r"^[a-z0-9-]*$", description="distinguishes entries of one goal; part of the id")
    models: tuple[ModelName, ...] = Field(min_length=1)
    devices: tuple[str, ...] = Field(min_length=1, description="as `H100` or `8xH100`")
    config: dict[str, Any] = Field(default_factory=dict, description="keys of `vllm serve --config`, defaults left out")
    env: dict[str, str] = Field(default_factory=dict)
    expects: Expects
    claims: tuple[Claim, ...] = ()
    published: tuple[Published, ...] = ()
    note: str = Field("", max_length=1000)

    @field_validator("devices")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if devices.label(devices.named(name)) != name:
                raise ValueError(f"write {devices.label(devices.named(name))!r} instead of {name!r}")
            if names.count(name) > 1:
                raise ValueError(f"{name} is there twice")
        return names

    @field_validator("config")
    @classmethod
    def _plain(cls, config: dict[str, Any]) -> dict[str, Any]:
        for key, value in config.items():
            if key != key.lower() or "_" in key or key in ("model", "config"):
                raise ValueError(
                    f"{key!r}: keys are flags without their dashes, as `max-model-len`; `models` names models"
                )
            if value is None:
                raise ValueError(f"{key}: null would reach vLLM as the text None; leave the key out")
            if value is False:
                raise ValueError(f"{key}: `vllm serve --config` drops false without a word; write no-{key}: true")
        return config


class Family(_Strict):
    """A file: all recipes of one GPU family of `choose`."""

    family: Short
    recipes: tuple[Entry, ...] = Field(min_length=1)


@dataclass(frozen=True)
class Recipe:
    """One model on one device for one goal. place: file and line of its entry."""

    id: str
    model: str
    device: Device
    entry: Entry
    family: str
    place: str
    claims: tuple[Claim, ...] = field(default=())
    published: tuple[Published, ...] = field(default=())

    @property
    def spec(self) -> ModelSpec:
        return SPECS[self.model]

    @property
    def repository(self) -> str:
        return f"openai/{self.spec.name}"

    @property
    def goal(self) -> Goal:
        return self.entry.goal

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """As `vllm serve --config` reads it, the model first."""
        filled = {key: _filled(value, self.model) for key, value in self.entry.config.items()}
        return {"model": self.repository, **filled}

    @property
    def env(self) -> dict[str, str]:
        return dict(self.entry.env)

    @property
    def status(self) -> Status:
        if self.claims:
            return Status.MEASURED
        return Status.PUBLISHED if self.published else Status.CONFIGURATION


def expand(family: Family, places: Mapping[int, str]) -> list[Recipe]:
    """Every recipe of a file. places: of each entry, by its index."""
    return [
        Recipe(
            "-".join(filter(None, (model, device.lower(), entry.goal.value, entry.variant))),
            model,
            devices.named(device),
            entry,
            family.family,
            places.get(index, ""),
            tuple(claim for claim in entry.claims if (claim.model, claim.device) == (model, device)),
            tuple(
                each
                for each in entry.published
                if model in (each.models or (model,)) and device in (each.devices or (device,))
            ),
        )
        for index, entry in enumerate(family.recipes)
        for model in entry.models
        for device in entry.devices
    ]


def _filled(value: Any, model: str) -> Any:
    if isinstance(value, str):
        return value.replace("{model}", model)
    if isinstance(value, dict):
        return {key: _filled(each, model) for key, each in value.items()}
    return [_filled(each, model) for each in value] if isinstance(value, list) else value

"""Prompt templates: `prompt: {id, version, variables}` of a request, filled in from files of the server's operator.

A template has instructions, messages, and settings; the request's own settings win. Its messages precede the whole
conversation, as instructions do: they are in the prompt, and not stored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from openai.types.responses.response_prompt import ResponsePrompt
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from vllm_gptoss.server.responses.errors import ApiError
from vllm_gptoss.server.responses.request.create import Filled, parse_create
from vllm_gptoss.server.responses.request.items import message_item, part_text
from vllm_gptoss.server.responses.request.validation import validate
from vllm_gptoss.tools.documents import MAX_TEXT
from vllm_gptoss.tools.yaml_file import YamlFileError, explained, files, line_of, read

MAX_TEMPLATE_FILE = 1 << 20
MAX_TEMPLATES = 1_000
MAX_VARIABLES = 64
MAX_FILLED = 4 << 20
"""Characters of a template with its variables: several times the context window."""

_VARIABLE = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_-]*)\s*\}\}")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAMED = 20

SETTINGS = frozenset(
    {
        "include",
        "max_output_tokens",
        "max_tool_calls",
        "model",
        "parallel_tool_calls",
        "reasoning",
        "temperature",
        "text",
        "tool_choice",
        "tools",
        "top_logprobs",
        "top_p",
        "truncation",
    }
)
"""Fields of a request that a template may set."""


class TemplateMessage(BaseModel, extra="forbid"):
    """One message; `{{name}}` in it is a variable."""

    role: Literal["developer", "system", "user", "assistant"]
    content: str = Field(min_length=1)


class TemplateVersion(BaseModel, extra="forbid"):
    """One version of a template, with instructions, messages or both."""

    instructions: str = ""
    messages: list[TemplateMessage] = Field(default=[], max_length=64)
    settings: dict[str, Any] = {}

    @model_validator(mode="after")
    def _says_something(self) -> TemplateVersion:
        if not self.instructions and not self.messages:
            raise ValueError("give instructions, messages or both")
        if unknown := sorted(self.settings.keys() - SETTINGS):
            raise ValueError(f"settings.{unknown[0]} cannot be set here; there are {', '.join(sorted(SETTINGS))}")
        return self

    @property
    def texts(self) -> list[str]:
        """The texts that may have variables."""
        return [self.instructions, *(message.content for message in self.messages)]

    @property
    def variables(self) -> frozenset[str]:
        """The names that the texts use."""
        return frozenset(name for text in self.texts for name in _VARIABLE.findall(text))


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


_Version = Annotated[str, BeforeValidator(_as_text)]


class Template(BaseModel, extra="forbid"):
    """A template's versions by name. `callers` are SHA-256 digests of the API keys that may use it; none: all may."""

    description: str = ""
    callers: list[str] = []
    default: _Version | None = None
    versions: dict[_Version, TemplateVersion] = Field(min_length=1)

    @model_validator(mode="after")
    def _fits(self) -> Template:
        if self.default is not None and self.default not in self.versions:
            raise ValueError(f"default: there is no version {self.default!r}, only {', '.join(self.versions)}")
        if wrong := next((digest for digest in self.callers if not _DIGEST.fullmatch(digest)), None):
            raise ValueError(f"callers: {wrong[:80]!r} is no SHA-256 of an API key, 64 hexadecimal digits")
        return self

    def is_for(self, tenant: str) -> bool:
        """Whether the caller may use it and know of it. `tenant` begins the digest of the caller's key."""
        return not self.callers or any(digest.startswith(tenant) for digest in self.callers)


class _TemplateFile(BaseModel, extra="forbid"):
    prompts: dict[str, Template]

    @model_validator(mode="after")
    def _names(self) -> _TemplateFile:
        if wrong := next((name for name in self.prompts if not _ID.fullmatch(name)), None):
            raise ValueError(f"prompts: {wrong[:80]!r} is no id: letters, digits, '_', '.' and '-', at most 64")
        return self


class Templates:
    """The templates of one server, by id."""

    def __init__(self, templates: Mapping[str, Template] | None = None) -> None:
        self._templates = dict(templates or {})

    @classmethod
    def load(cls, path: str) -> Templates:
        """The templates of a YAML file, or of all YAML files in a folder; none for an empty `path`.

        Raises:
            YamlFileError: a file cannot be used; the message names it, the line and the field.
        """
        found: dict[str, Template] = {}
        for file in files(Path(path).expanduser()) if path else ():
            for name, template in _templates_of(file).items():
                if name in found:
                    raise YamlFileError(f"{file}: prompts.{name}: another file has a prompt of this id")
                found[name] = template
        if len(found) > MAX_TEMPLATES:
            raise YamlFileError(f"{path}: {len(found)} prompts are more than {MAX_TEMPLATES}")
        if path and not found:
            raise YamlFileError(f"{path}: no prompts are here: give a YAML file, or a folder of them")
        return cls(found)

    def __len__(self) -> int:
        return len(self._templates)

    def fill(self, body: Any, tenant: str) -> tuple[Any, Filled | None]:
        """The `body` of a request with its template's settings in it and its `prompt` out of it, and the texts.

        Without a `prompt`, or on a server without templates, the body as it is.

        Raises:
            ApiError: no such prompt or version for this caller, or variables that are not the prompt's.
        """
        if not isinstance(body, dict) or body.get("prompt") is None or not self._templates:
            return body, None
        asked = validate(ResponsePrompt, body["prompt"], "prompt")
        version, said = self._version(asked.id, asked.version, tenant)
        values = _values(body["prompt"].get("variables") or {})
        _check_names(said.variables, values.keys())
        filled = _filled(said, values)
        own = {name: value for name, value in body.items() if value is not None and name != "prompt"}
        echo = {"id": asked.id, "version": version, "variables": _shown(body["prompt"].get("variables"))}
        settings = {**said.settings, **({"instructions": filled[0]} if filled[0] else {})}
        opening = [message_item(message.role, text) for message, text in zip(said.messages, filled[1:], strict=True)]
        return {**settings, **own}, Filled(opening, echo)

    def _version(self, identifier: str, version: str | None, tenant: str) -> tuple[str, TemplateVersion]:
        template = self._templates.get(identifier)
        if template is None or not template.is_for(tenant):
            names = sorted(name for name, each in self._templates.items() if each.is_for(tenant))
            raise _not_found(f"Prompt with id '{identifier[:80]}' not found.", names, "prompt.id", "prompt_not_found")
        version = version or template.default or list(template.versions)[-1]
        if version not in template.versions:
            message = f"Prompt '{identifier}' has no version '{version[:80]}'."
            raise _not_found(message, list(template.versions), "prompt.version", "prompt_version_not_found")
        return version, template.versions[version]


def _not_found(message: str, names: list[str], param: str, code: str) -> ApiError:
    more = ", …" if len(names) > _NAMED else ""
    known = f" There are: {', '.join(names[:_NAMED])}{more}." if names else ""
    return ApiError(message + known, param=param, code=code, status=404)


def _values(given: Mapping[str, Any]) -> dict[str, str]:
    if len(given) > MAX_VARIABLES:
        raise ApiError(f"A prompt has at most {MAX_VARIABLES} variables.", param="prompt.variables")
    values = {}
    for name, value in given.items():
        where = f"prompt.variables.{name[:80]}"
        values[name] = value if isinstance(value, str) else part_text(value, where)
        if len(values[name]) > MAX_TEXT:
            raise ApiError(f"'{where}' has more than {MAX_TEXT} characters.", param=where)
    return values


def _check_names(wanted: frozenset[str], given: Any) -> None:
    for names, what in ((wanted - given, "Missing"), (given - wanted, "Unknown")):
        if names:
            listed = ", ".join(name[:80] for name in sorted(names)[:_NAMED])
            raise ApiError(f"{what} prompt variables: {listed}.", param="prompt.variables", code="invalid_value")


def _filled(said: TemplateVersion, values: Mapping[str, str]) -> list[str]:
    """The texts with their variables filled in. Values are not expanded again."""
    uses = (name for text in said.texts for name in _VARIABLE.findall(text))
    if sum(len(values[name]) for name in uses) > MAX_FILLED:
        raise ApiError(f"The prompt's variables fill more than {MAX_FILLED} characters.", param="prompt.variables")
    return [_VARIABLE.sub(lambda found: values[found[1]], text) for text in said.texts]


def _shown(variables: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Variables as an answer repeats them: of a file its name."""
    if variables is None:
        return None
    return {
        name: {key: part for key, part in value.items() if key != "file_data"} if isinstance(value, dict) else value
        for name, value in variables.items()
    }


def _templates_of(file: Path) -> dict[str, Template]:
    data, root = read(file, MAX_TEMPLATE_FILE)
    try:
        found = _TemplateFile.model_validate(data).prompts
    except ValidationError as error:
        raise YamlFileError("\n".join(explained(file, root, error))) from None
    for name, template in found.items():
        for version, said in template.versions.items():
            try:
                parse_create({**said.settings, "input": "x"})
            except ApiError as error:
                where = ("prompts", name, "versions", version, "settings", *(error.param or "").split("."))
                line = line_of(root, where)
                raise YamlFileError(f"{file}:{line}: prompts.{name}.versions.{version}.settings: {error}") from None
    return found

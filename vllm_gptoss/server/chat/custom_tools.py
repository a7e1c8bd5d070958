"""Custom tools of chat completions, as functions: vLLM's request and response models have no other tools.

Before validation, a custom tool becomes a function that carries a `CustomTool`. The JSON of the answer is rewritten:
`function` with `arguments` becomes `custom` with `input`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi.responses import JSONResponse, StreamingResponse

from vllm_gptoss import _vllm
from vllm_gptoss.server.chat.chat_prompt import ChatInputError, check_name
from vllm_gptoss.server.harmony.custom import INPUT_SCHEMA, description_of
from vllm_gptoss.server.harmony.enforce import compiling
from vllm_gptoss.server.harmony.enforce.errors import NotNowError
from vllm_gptoss.server.harmony.enforce.job import Written

MAX_LARK, MAX_NESTING = 50_000, 100
"""Characters of a Lark grammar, and brackets open at once: xgrammar reads it in this process, by recursion."""

MAX_COUNT = 100
"""Bound of `{1,100}` and `~1..100` in a Lark grammar: the engine matches a count of 100 in 70 ms a token, one of 300 in
400 ms, and all requests wait meanwhile."""

_IN_QUOTES = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]')
_COUNT = re.compile(r"\{(\d+), (-?\d+)\}")
_CARRIED = "gptoss_custom"


@dataclass(slots=True)
class CustomTool:
    """`grammar` has the keys `syntax` and `definition`; `written` is the same in EBNF, once `prepare` has run."""

    grammar: Mapping[str, str] | None = None
    written: Written | None = None


async def text_grammar(grammar: Mapping[str, str]) -> Written:
    """The EBNF of a custom tool's regular expression or Lark grammar.

    Raises:
        ValueError: it is not understood, or exceeds a limit; `NotNowError` where all workers are busy.
    """
    definition = grammar["definition"]
    if grammar["syntax"] == "regex":
        return await compiling.prepare_pattern(definition)
    depth = deepest = 0
    for character in definition:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    if len(definition) > MAX_LARK or deepest > MAX_NESTING:
        raise ValueError(f"it has more than {MAX_LARK} characters or {MAX_NESTING} open brackets")
    ebnf = _vllm.lark_to_ebnf(definition)
    if any(int(bound) > MAX_COUNT for pair in _COUNT.findall(_IN_QUOTES.sub("", ebnf)) for bound in pair):
        raise ValueError(f"it counts to more than {MAX_COUNT}; repeat without a bound")
    return Written(ebnf)


def custom_of(function: Any) -> CustomTool | None:
    """The custom tool that became this function of a validated request, or None."""
    found = getattr(function, _CARRIED, None)
    return found if isinstance(found, CustomTool) else None


async def prepare(request: Any) -> frozenset[str]:
    """Writes the grammars of a request's custom tools; returns the names of these tools.

    Raises:
        NotNowError: all workers are busy.
        vLLM's validation error (400): a grammar cannot be used.
    """
    found = {tool.function.name: custom for tool in request.tools or () if (custom := custom_of(tool.function))}
    for name, custom in found.items():
        try:
            custom.written = await text_grammar(custom.grammar) if custom.grammar else None
        except NotNowError:
            raise
        except ValueError as error:
            raise invalid(f"The grammar of '{name}' is not understood: {error}", "tools") from None
    return frozenset(found)


def as_functions(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body of a chat request with functions instead of custom tools, in `tools` and `tool_choice`.

    Raises:
        vLLM's validation error (400): a custom tool or its choice is malformed.
    """
    tools, choice = data.get("tools"), data.get("tool_choice")
    given: Sequence[Any] = tools if isinstance(tools, list) else ()
    made = [_function(tool, f"tools[{at}]") if _is_custom(tool) else tool for at, tool in enumerate(given)]
    customs = [tool["function"]["name"] for tool, before in zip(made, given, strict=True) if tool is not before]
    names = Counter(name_of(tool, "function") for tool in made)
    if twice := next((name for name in customs if names[name] > 1), None):
        raise invalid(f"The tool '{twice}' is given twice.", "tools")
    changed: dict[str, Any] = {"tools": made} if customs else {}
    if isinstance(choice, Mapping) and _is_custom(choice):
        name = name_of(choice, "custom")
        if name not in customs:
            raise invalid(f"`tool_choice` names {name!r}, which is no custom tool in `tools`.", "tool_choice")
        changed["tool_choice"] = {"type": "function", "function": {"name": name}}
    return {**data, **changed} if changed else data


def _is_custom(tool: Any) -> bool:
    return isinstance(tool, Mapping) and tool.get("type") == "custom"


def name_of(tool: Any, kind: str) -> str | None:
    """The name in `tool[kind]`, where a client sent one."""
    inner = tool.get(kind) if isinstance(tool, Mapping) else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    return name if isinstance(name, str) else None


def _function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    inner, name = tool.get("custom"), name_of(tool, "custom")
    if not isinstance(inner, Mapping) or name is None:
        raise invalid(f"`{where}.custom` needs a `name`.", f"{where}.custom.name")
    try:
        check_name(name, f"{where}.custom.name")
    except ChatInputError as error:
        raise invalid(str(error), error.param) from None
    description = inner.get("description")
    if not isinstance(description, str | None):
        raise invalid(f"`{where}.custom.description` must be text.", f"{where}.custom.description")
    grammar = _grammar(inner.get("format"), f"{where}.custom.format")
    function = {
        "name": name,
        "description": description_of(description, grammar),
        "parameters": None if grammar else INPUT_SCHEMA,
        "strict": bool(grammar) or None,
        _CARRIED: CustomTool(grammar),
    }
    return {"type": "function", "function": function}


def _grammar(form: Any, where: str) -> Mapping[str, str] | None:
    if form is None or (isinstance(form, Mapping) and form.get("type") == "text"):
        return None
    found = form.get("grammar") if isinstance(form, Mapping) and form.get("type") == "grammar" else None
    is_whole = isinstance(found, Mapping) and isinstance(found.get("definition"), str)
    if not isinstance(found, Mapping) or not is_whole or found.get("syntax") not in ("lark", "regex"):
        grammar = '`{"type": "grammar", "grammar": {"syntax": "lark" or "regex", "definition": …}}`'
        raise invalid(f'`{where}` must be `{{"type": "text"}}` or {grammar}.', where)
    return {"syntax": found["syntax"], "definition": found["definition"]}


def invalid(message: str, parameter: str) -> Exception:
    """vLLM's validation error (400)."""
    error: Exception = _vllm.harmony().ValidationError(message, parameter=parameter)
    return error


def with_custom_calls(response: Any, names: frozenset[str]) -> Any:
    """The response of vLLM's route, in which calls of the tools `names` are of type `custom`."""
    calls = _Calls(names)
    if isinstance(response, StreamingResponse):
        response.body_iterator = calls.frames(response.body_iterator)
    elif isinstance(response, JSONResponse) and response.status_code == 200:
        kept = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        body = calls.renamed(json.loads(bytes(response.body)))
        return JSONResponse(body, headers=kept, background=response.background)
    return response


class _Calls:
    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._found: set[tuple[int, int]] = set()  # (choice, call) of a stream: only the first part has the name

    async def frames(self, frames: Any) -> AsyncIterator[Any]:
        async with aclosing(frames):
            async for frame in frames:
                text = frame if isinstance(frame, str) else bytes(frame).decode()
                if text.startswith("data: {") and '"tool_calls"' in text:
                    body = self.renamed(json.loads(text.removeprefix("data: ")))
                    yield f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"
                else:
                    yield frame

    def renamed(self, body: dict[str, Any]) -> dict[str, Any]:
        for choice in body.get("choices", ()):
            calls = (choice.get("delta") or choice.get("message") or {}).get("tool_calls") or ()
            for at, call in enumerate(calls):
                key = (choice["index"], call.get("index", at))
                if call["function"].get("name") in self._names:
                    self._found.add(key)
                if key in self._found:
                    self._rename(call)
        return body

    @staticmethod
    def _rename(call: dict[str, Any]) -> None:
        function = call.pop("function")
        custom = {"name": function["name"]} if function.get("name") else {}
        call |= {"type": "custom"} if "type" in call else {}
        call["custom"] = custom | {"input": function.get("arguments") or ""}

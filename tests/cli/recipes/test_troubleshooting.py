"""Every error with a remedy is in troubleshooting, in English and in Chinese."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_gptoss.cli.recipes import check, flags, variables

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "vllm_gptoss"
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
TWIN = (ROOT / "docs" / "zh" / "troubleshooting.md").read_text()
SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ANSWERED = names(
    "ApiError BodyError ChatInputError DeniedError EngineError FullError LostError NotAllowedError NotEnforceableError"
    " NotNowError PageError PythonQuotaError QuotaError Refused RetiredKeyError StoreBusyError TakenError TooLargeError"
    " UsageError"
)
"""Errors that answer one request, or that the model reads; docs/responses.md and docs/tools.md have those."""
HELD = names(
    "BusyError CgroupError ConfinedError ConnectionLostError DocumentError FaultError FetchError FloodError"
    " IsolationError KernelError LayoutError LostSampleError MalformedError"
    " ProtocolError ServerUnavailableError SlowError TooManyTokensError UnavailableError UnwantedError _KilledError"
    " _OutOfTimeError _RefusedError _TooManyFilesError"
)
"""Errors that another part of the plugin catches."""
OPERATORS = names(
    "BackendError CheckpointError ChoiceError DamagedFileError DeviceError EvalError"
    " MissingVariableError NvrtcError PlanError ProbeError RecipeError "
    " SandboxError SettingsError StoreError ToolConfigError YamlFileError"
)
"""Errors that an operator reads at a start or a command, with those of Python and typer."""
FOREIGN = frozenset({"ValueError", "typer.BadParameter"})

VERBS = "use|set|unset|name|run|give|leave|put|write|choose|install|configure|delete|remove|start"
REMEDY = re.compile(
    rf"(?i:(?:^|[:;.?] |else |or )(?:{VERBS})\b)|`(?:vllm-gptoss|git) |pip install|(?<![\w-])--[a-z]"
    r"|\b[A-Z]+_[A-Z_]+\b|\bthere (?:is|are|…)|docs/"
)
"""Signs of a remedy in a message: an imperative after a stop, a command, a flag, a variable, a choice."""


def template(node: ast.AST) -> str:
    """The text of a message, `…` for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[sdr]", "…", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(template, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    return "…"


def is_said(node: ast.AST) -> ast.Call | None:
    """The call that holds a message to an operator: an error, a warning in the log, a word on stderr."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        name = ast.unparse(node.exc.func)
        return node.exc if name.rpartition(".")[2] in OPERATORS or name in FOREIGN else None
    if not isinstance(node, ast.Call):
        return None
    to_stderr = ast.unparse(node.func) == "typer.echo" and any(word.arg == "err" for word in node.keywords)
    return node if to_stderr or ast.unparse(node.func) in ("logger.warning", "logger.error") else None


def messages(source: str) -> Iterator[str]:
    """Messages with a remedy in a file."""
    for node in ast.walk(ast.parse(source)):
        call = is_said(node)
        text = max(map(template, call.args), key=len, default="") if call is not None else ""
        if REMEDY.search(text):
            yield text


def rows(page: str) -> list[tuple[str, list[str]]]:
    """(heading, cells) of every row of the page's tables."""
    found, heading = [], ""
    for line in page.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("| ") and not line.startswith("| ---"):
            found.append((heading, [cell.strip() for cell in line.strip("|").split(" | ")]))
    return [row for row in found if not set(row[1][0]) <= {"-", " "}]


def spans(cell: str) -> list[str]:
    return [text for _, text in SPAN.findall(cell)]


SEEN = [span for _, cells in rows(PAGE) for span in spans(cells[0])]


def is_on_the_page(text: str) -> bool:
    """A part of it that is long enough to be searched for."""
    return any(len(span.strip("… ")) >= 10 and span in text for span in SEEN)


def test_every_class_of_errors_has_its_readers() -> None:
    defined = {
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and any(re.search("Error$|Exception$|^Refused$", ast.unparse(b)) for b in node.bases)
    }
    assert defined == ANSWERED | HELD | OPERATORS


def test_every_error_that_names_a_remedy_has_its_line() -> None:
    found = [(path, text) for path in sorted(PACKAGE.rglob("*.py")) for text in messages(path.read_text())]
    assert len({text for _, text in found}) > 50
    missing = [f"{path}: {text}" for path, text in found if not is_on_the_page(text)]
    assert not missing, "not in docs/troubleshooting.md:\n" + "\n".join(missing)


def test_what_would_be_missing_is_seen() -> None:
    said = list(
        messages('raise ChoiceError(f"{a} cannot do {b}; use {c}")\nraise ChoiceError("no")\nlogger.info("use x")')
    )
    assert said == ["… cannot do …; use …"]
    assert not is_on_the_page(said[0])


def strings(node: ast.expr) -> str:
    """A constant, or the constant beginning of an f-string."""
    return template(node).partition("…")[0]


def calls(path: Path, name: str) -> list[ast.Call]:
    tree = ast.parse(path.read_text())
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]


def test_every_bad_finding_of_doctor_has_its_line() -> None:
    made = [call for name in ("findings",) for call in calls(PACKAGE / "cli" / "doctor" / f"{name}.py", "Finding")]
    bad = [call for call in made if re.search("PROBLEM|WARNING|^status$", ast.unparse(call.args[0]))]
    names = {strings(call.args[1]).strip() for call in bad} - {""}
    assert len(names) > 12
    assert not {name for name in names if f"`{name}" not in PAGE}


def test_every_finding_on_the_page_is_one_of_doctor() -> None:
    source = "".join(path.read_text() for path in (PACKAGE / "cli" / "doctor").glob("*.py"))
    listed = {span for names in re.findall(r"doctor: ((?:`[^`]+`(?:, )?)+)", PAGE) for span in spans(names)}
    assert len(listed) > 12
    assert not {name for name in listed if f'"{name.partition("…")[0].strip()}' not in source}


def test_every_rule_has_its_line() -> None:
    made = calls(Path(check.__file__), "Trouble")
    rules = {strings(call.args[1]) for call in made}
    ours = {"expects", "gpus", "defaults", "claims", "release"}
    """Of recipes alone: no user's command has them."""
    assert len(rules) > 10
    assert not {rule for rule in rules - ours if f"`serve line: {rule}`" not in PAGE}


def test_every_dead_variable_and_what_replaced_it_has_its_line() -> None:
    grouped: dict[str, list[str]] = {}
    for name, instead in variables.REPLACED.items():
        grouped.setdefault(instead, []).append(f"`{name}`")
    for instead, names in grouped.items():
        assert f"| {', '.join(names)} | {instead} |" in PAGE
        assert f"| {'、'.join(names)} | " in TWIN


def test_every_renamed_key_has_its_line() -> None:
    assert {"full_cuda_graph", "flashinfer_trtllm_mxfp8"} <= {name for name in flags.RENAMED if name in PAGE}


def typed(cell: str) -> list[str]:
    """Code, flags and variables: the same in every language."""
    bare = re.findall(r"(?<![\w-])--[a-z][\w.-]*|\b(?:VLLM|GPTOSS)_[A-Z0-9_]+\b", SPAN.sub("", cell))
    return sorted([*spans(cell), *bare])


def test_both_languages_have_the_same_entries() -> None:
    english, chinese = rows(PAGE), rows(TWIN)
    for (_, ours), (_, theirs) in zip(english, chinese, strict=True):
        assert typed(ours[0]) == typed(theirs[0])
        assert typed(ours[-1]) == typed(theirs[-1])
    for page in (english, chinese):
        assert len({heading for heading, _ in page}) == len({heading for heading, _ in english})
    listed = [re.findall(r"^- (.+(?:\n  .+)*)", page, re.MULTILINE) for page in (PAGE, TWIN)]
    assert [typed(item) for item in listed[0]] == [typed(item) for item in listed[1]]


@pytest.mark.parametrize("page", ["docs/troubleshooting.md", "docs/zh/troubleshooting.md"])
def test_our_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
        assert (path.parent / target).is_file(), target

"""Commands and files of a recipe, all written from the same configuration."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from vllm_gptoss.cli.recipes.load import FOLDER, RecipeError
from vllm_gptoss.cli.recipes.schema import Recipe, Status
from vllm_gptoss.engine.choose import devices
from vllm_gptoss.engine.choose.device import Vendor
from vllm_gptoss.version import __version__

IMAGE = "vllm/vllm-openai:v0.33.0"
"""The official image that `recipes/deploy/Dockerfile` starts from."""

STOP = ("--shutdown-timeout", "120")
"""Manifests add these flags to a recipe: seconds for running requests to end after SIGTERM."""

KILL_S = 150
"""Seconds until the orchestrator kills the server: after `STOP`, failed responses are still reported and stored."""

TAG = f"vllm-gptoss:{__version__}"
"""The image of `docker run` and compose; a cluster needs one in a registry."""

TOOLS = "browser,service:http://gptoss-tools:8001"
"""In place of a recipe's `--tool-server demo` in a cluster: pods of their own run programs."""

_SANDBOX = ("--security-opt", "seccomp=recipes/deploy/seccomp.json", "--security-opt", "apparmor=unconfined")
"""Docker's own profiles deny the calls of the python tool's sandbox."""

_DEVICES: Mapping[Vendor, Sequence[str]] = {
    "nvidia": ("--gpus", "all"),
    "amd": ("--device", "/dev/kfd", "--device", "/dev/dri", "--group-add", "video", "--user", "root"),
    "cpu": (),
}
"""Arguments of `docker run`. AMD's devices belong to a group whose number differs between hosts, so root opens them."""

BASES: Mapping[Vendor, str] = {
    "nvidia": "",
    "amd": f"--build-arg BASE={IMAGE.replace('openai', 'openai-rocm')} ",
    "cpu": f"--build-arg BASE={IMAGE.replace('openai', 'openai-cpu')} ",
}
"""Arguments of `docker build` by hardware."""


def config(recipe: Recipe) -> str:
    """A file for `vllm serve --config`."""
    return yaml.safe_dump(recipe.config, sort_keys=False, width=120)


def env(recipe: Recipe) -> str:
    """A file for `source`; empty where nothing need be set."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in recipe.env.items())


def words(recipe: Recipe, extra: Sequence[str] = ()) -> list[str]:
    """The command, a word each, with the user's flags last: of a repeated flag, vLLM takes the last.

    Raises:
        RecipeError: `extra` has a `--config`, which the recipe's flags would override.
    """
    if any(word.partition("=")[0] == "--config" for word in extra):
        raise RecipeError(
            f"the recipe's flags win over a --config; put your keys into a copy of it:"
            f" vllm-gptoss recipe show {recipe.id} --config"
        )
    return ["vllm", "serve", recipe.repository, *arguments(recipe), *extra]


def overridden(recipe: Recipe, environ: Mapping[str, str]) -> list[str]:
    """A line for each variable that has another value than in the recipe, which replaces it."""
    differ = {name: value for name, value in recipe.env.items() if environ.get(name, value) != value}
    return [f"{name}={value}, as the recipe has it, instead of {environ[name]}" for name, value in differ.items()]


def arguments(recipe: Recipe) -> list[str]:
    """The flags, a word each, without the model."""
    return [word for key, value in recipe.config.items() if key != "model" for word in flag(key, value)]


def command(recipe: Recipe) -> str:
    """One line for a shell, variables before it."""
    return line(recipe.env, words(recipe))


def line(env: Mapping[str, str], words: Sequence[str]) -> str:
    """Any command as `command` writes it."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in env.items()]
    return " ".join([*variables, shlex.join(words)]) + "\n"


def docker(recipe: Recipe) -> str:
    """`docker run` of the image of `recipes/deploy/Dockerfile`, with its port on the loopback, and how it is made."""
    variables = [word for name, value in recipe.env.items() for word in ("-e", f"{name}={value}")]
    options = [*_DEVICES[recipe.device.vendor], "--ipc=host", *(_SANDBOX if "tool-server" in recipe.config else ())]
    begin = ["docker", "run", "--rm", "--stop-timeout", str(KILL_S), *options, "-p", "127.0.0.1:8000:8000"]
    volumes = ["-v", "vllm-gptoss-cache:/home/vllm/.cache", "-v", "vllm-gptoss-state:/home/vllm/.local/state"]
    words = [*begin, *variables, *volumes, TAG, recipe.repository, *arguments(recipe), *STOP]
    return _built(recipe, TAG) + shlex.join(words) + "\n"


def _built(recipe: Recipe, tag: str) -> str:
    """A comment with the command that makes the image."""
    return f"# image: docker build -f recipes/deploy/Dockerfile {BASES[recipe.device.vendor]}-t {tag} .\n"


def kubernetes(recipe: Recipe) -> str:
    """`recipes/deploy/kubernetes.yaml` with this recipe's flags, variables and GPUs."""
    documents = list(yaml.safe_load_all((FOLDER / "deploy" / "kubernetes.yaml").read_text()))
    (pod,) = (each["spec"]["template"]["spec"] for each in documents if each["kind"] == "Deployment")
    container = pod["containers"][0]
    container["args"] = [recipe.repository, *(word if word != "demo" else TOOLS for word in arguments(recipe)), *STOP]
    container["env"] += [{"name": name, "value": value} for name, value in recipe.env.items()]
    resource = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}.get(recipe.device.vendor)
    container["resources"]["limits"] = {resource: str(recipe.device.count)} if resource else {}
    if "tool-server" not in recipe.config:
        documents = [each for each in documents if each["metadata"]["name"] != "gptoss-tools"]
        container["env"] = [each for each in container["env"] if each["name"] != "GPTOSS_TOOLS_KEY"]
    if recipe.device.vendor == "amd":  # /dev/kfd belongs to a group whose number differs between hosts
        pod["securityContext"] = {"fsGroup": 2000}
        del container["securityContext"]["capabilities"]
    return _built(recipe, container["image"]) + yaml.safe_dump_all(documents, sort_keys=False, width=120)


def row(recipe: Recipe) -> dict[str, str]:
    """A recipe as lists show it. ms: time per output token, of so many requests at once, and when."""
    figures = [f"{claim.tpot_ms:.2f} ({claim.requests})" for claim in recipe.claims]
    dates = sorted({claim.results.removesuffix(".json")[-10:] for claim in recipe.claims})
    return {
        "id": recipe.id,
        "device": devices.label(recipe.device),
        "status": recipe.status.value,
        "ms (requests)": ", ".join([*figures, *dates]),
    }


def data(recipe: Recipe) -> dict[str, Any]:
    """The same for a program."""
    claims = [claim.model_dump(exclude={"model", "device"}) for claim in recipe.claims]
    names = {"id": recipe.id, "model": recipe.repository, "goal": recipe.goal.value}
    return {**names, **row(recipe), "claims": claims, "expects": recipe.entry.expects.model_dump()}


def table(recipes: Sequence[Recipe]) -> str:
    """The table of `recipes/README.md`: recipes with a measured or published figure."""
    rows = [row(recipe) for recipe in recipes if recipe.status is not Status.CONFIGURATION]
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(each.values()) for each in rows)] if rows else []
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def flag(key: str, value: Any) -> list[str]:
    """One key of a recipe's configuration, which is never false, as words of a command."""
    if value is True:
        return [f"--{key}"]
    if isinstance(value, list):
        return [f"--{key}", *map(str, value)]
    return [f"--{key}", json.dumps(value) if isinstance(value, dict) else str(value)]

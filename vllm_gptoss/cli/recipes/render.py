"""Commands and files of a recipe, all written from the same configuration."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from vllm_gptoss import _vllm
from vllm_gptoss.cli.recipes.load import FOLDER
from vllm_gptoss.cli.recipes.schema import Recipe
from vllm_gptoss.engine.choose import devices
from vllm_gptoss.engine.choose.device import Vendor

IMAGE = "vllm/vllm-openai:v0.33.0"
"""The official image that `recipes/deploy/Dockerfile` starts from."""

STOP = ("--shutdown-timeout", "120")
"""Manifests add these flags to a recipe: seconds for running requests to end after SIGTERM."""

KILL_S = 150
"""Seconds until the orchestrator kills the server: after `STOP`, failed responses are still reported and stored."""

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


def words(recipe: Recipe) -> list[str]:
    """The command, a word each."""
    return ["vllm", "serve", recipe.repository, *arguments(recipe)]


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
    """`docker run` of the image that `recipes/deploy/Dockerfile` makes, and how it is made."""
    gpus = ["--gpus", "all"] if recipe.device.vendor == "nvidia" else _amd_devices(recipe)
    variables = [word for name, value in recipe.env.items() for word in ("-e", f"{name}={value}")]
    volumes = ["-v", "vllm-gptoss-cache:/root/.cache", "-v", "vllm-gptoss-state:/root/.local/state"]
    begin = ["docker", "run", "--rm", "--stop-timeout", str(KILL_S), *gpus, "--ipc=host", "-p", "8000:8000"]
    words = [*begin, *variables, *volumes, "vllm-gptoss", recipe.repository, *arguments(recipe), *STOP]
    return _built(recipe) + shlex.join(words) + "\n"


def _built(recipe: Recipe) -> str:
    """A comment."""
    base = BASES[recipe.device.vendor]
    return f"# image: docker build -f recipes/deploy/Dockerfile {base}-t vllm-gptoss . (see its first lines)\n"


def _amd_devices(recipe: Recipe) -> list[str]:
    if recipe.device.vendor != "amd":
        return []
    return ["--device", "/dev/kfd", "--device", "/dev/dri", "--group-add", "video"]


def kubernetes(recipe: Recipe) -> str:
    """`recipes/deploy/kubernetes.yaml` with this recipe's flags, variables and GPUs."""
    documents = list(yaml.safe_load_all((FOLDER / "deploy" / "kubernetes.yaml").read_text()))
    (deployment,) = (each for each in documents if each["kind"] == "Deployment")
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    container["args"] = [recipe.repository, *arguments(recipe), *STOP]
    container["env"] += [{"name": name, "value": value} for name, value in recipe.env.items()]
    resource = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}.get(recipe.device.vendor)
    container["resources"]["limits"] = {resource: str(recipe.device.count)} if resource else {}
    return _built(recipe) + yaml.safe_dump_all(documents, sort_keys=False, width=120)


def upstream(recipe: Recipe) -> str:
    """The `model` part of a recipe as vllm-project/recipes writes it: arguments as a list, variables as a map."""
    low = ".".join(map(str, _vllm.SUPPORTED[0]))
    own = {"additional-config"}  # without effect in stock vLLM
    flags = [
        word for key, value in recipe.config.items() if key != "model" and key not in own for word in flag(key, value)
    ]
    lost = "".join(f"# {key} is the plugin's, and left out\n" for key in sorted(own & set(recipe.config)))
    model = {"model_id": recipe.repository, "min_vllm_version": f"{low}.0", "base_args": flags, "base_env": recipe.env}
    return lost + yaml.safe_dump({"model": model}, sort_keys=False, width=120)


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
    """The table of `recipes/README.md`."""
    rows = [row(recipe) for recipe in recipes]
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(each.values()) for each in rows)] if rows else []
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def flag(key: str, value: Any) -> list[str]:
    """One key of a recipe's configuration, which is never false, as words of a command."""
    if value is True:
        return [f"--{key}"]
    if isinstance(value, list):
        return [f"--{key}", *map(str, value)]
    return [f"--{key}", json.dumps(value) if isinstance(value, dict) else str(value)]

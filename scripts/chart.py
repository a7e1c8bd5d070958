"""Writes the plain manifests of `recipes/deploy` from its Helm chart: `python scripts/chart.py`.

Needs `pip install helm-python-sdk`, Helm's own library.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python

DEPLOY = Path(__file__).resolve().parents[1] / "recipes" / "deploy"
CHART = DEPLOY / "chart"
MANIFESTS = {
    "kubernetes.yaml": "# The chart with its defaults. For other recipes: `vllm-gptoss recipe show ID --kubernetes`\n",
    "tools.yaml": "# The tools service of the other manifests, for kubectl.\n",
}
"""Files and their first lines. A file is the chart's template of that name, or all of them."""
_NOTE = "# Needs the secret `gptoss` and the images of docs/deploy.md. Written by scripts/chart.py.\n"


def render(values: dict[str, Any]) -> dict[str, str]:
    """Text of each template by its name. Raises helm_python.HelmRenderError where the chart refuses the values."""
    with helm_python.Chart.load(CHART) as chart:
        made = chart.render(values, name="gptoss", namespace="default")
    return {Path(path).name: text.strip().removeprefix("---").strip() + "\n" for path, text in sorted(made.items())}


def manifest(name: str) -> str:
    templates = render({})
    chosen = [templates[name]] if name in templates else [text for text in templates.values() if text.strip()]
    return MANIFESTS[name] + _NOTE + "---\n".join(chosen)


if __name__ == "__main__":
    for name in MANIFESTS:
        (DEPLOY / name).write_text(manifest(name))

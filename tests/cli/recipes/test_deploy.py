"""What is deployed is checked by what reads it: hadolint, compose-spec, Kubernetes' schemas, systemd, modal."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import compose_spec
import kubernetes_validate
import modal
import promql_parser
import pytest
import yaml

from vllm_gptoss.cli.recipes import find, load, render
from vllm_gptoss.cli.recipes.schema import Recipe
from vllm_gptoss.version import __version__

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "recipes" / "deploy"
RECIPES = load.shipped()


def recipe(name: str) -> Recipe:
    return find.by_id(RECIPES, name)


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("hadolint")
    return subprocess.run([program, path], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.ray"])
def test_the_dockerfile_is_clean_and_a_bad_one_is_not(tmp_path: Path, name: str) -> None:
    done = hadolint(DEPLOY / name)
    assert done.returncode == 0, done.stdout
    bad = tmp_path / name
    bad.write_text((DEPLOY / name).read_text().replace("EXPOSE", "EXPOZE"))
    assert hadolint(bad).returncode != 0


def test_one_image_of_one_vllm_is_named_everywhere() -> None:
    assert f"ARG BASE={render.IMAGE}\n" in (DEPLOY / "Dockerfile").read_text()
    assert f'"{render.IMAGE}"' in (DEPLOY / "modal_app.py").read_text()


def test_every_image_of_ours_has_this_version_and_a_command_that_builds_it() -> None:
    texts = [path.read_text() for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    used = {name for text in texts for name in re.findall(r"\bimage: (\S*vllm-gptoss\S*)", text)}
    built = {name for text in texts for name in re.findall(r"^# .*docker build .* -t (\S+)", text, re.MULTILINE)}
    assert {name.split(":")[1] for name in used | built} == {__version__}
    assert used - {render.TAG} == built


def test_the_images_build_context_has_all_that_the_wheel_needs(tmp_path: Path) -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for name in allowed:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    build = [sys.executable, "-c", "import setuptools.build_meta as b; b.build_wheel('dist')"]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = (tmp_path / "dist").iterdir()
    assert {"vllm_gptoss/plugin.py", "vllm_gptoss/cli/recipes/data/deploy/seccomp.json"} <= set(
        zipfile.ZipFile(wheel).namelist()
    )


def test_compose_is_of_the_specification_and_a_misspelt_key_is_not() -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    compose_spec.PyCompose.from_yaml(text).validate()
    with pytest.raises(ValueError, match="shm_sise"):
        compose_spec.PyCompose.from_yaml(text.replace("shm_size", "shm_sise"))
    services = yaml.safe_load(text)["services"]
    open_to = {
        port.rpartition(":")[0].rpartition(":")[0] for each in services.values() for port in each.get("ports", ())
    }
    assert open_to == {"127.0.0.1"}
    assert services["vllm"]["environment"]["VLLM_API_KEY"].startswith("${VLLM_API_KEY:?")
    assert services["vllm"]["command"] == [*render.words(recipe("20b-h100-agent"))[2:], *render.STOP]
    mounted = [line.split(":")[0] for each in services.values() for line in each.get("volumes", ()) if line[0] == "."]
    assert all((DEPLOY / name).is_file() for name in mounted)


def manifests(text: str) -> list[dict[str, Any]]:
    documents = list(yaml.safe_load_all(text))
    for document in documents:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    return documents


def of_kind(text: str, kind: str) -> dict[str, Any]:
    (document,) = (each for each in manifests(text) if each["kind"] == kind)
    return document


def test_kubernetes_takes_the_manifest_and_not_a_misspelt_one() -> None:
    text = (DEPLOY / "kubernetes.yaml").read_text()
    assert of_kind(text, "Deployment")["metadata"]["name"] == "gptoss"
    with pytest.raises(kubernetes_validate.ValidationError):
        manifests(text.replace("startupProbe", "startProbe"))


@pytest.mark.parametrize("name", ["120b-2xh100-agent", "120b-8xmi300x-latency", "20b-cpu-latency"])
def test_a_recipes_manifest_has_its_flags_and_gpus(name: str) -> None:
    one = recipe(name)
    text = render.kubernetes(one)
    (container,) = of_kind(text, "Deployment")["spec"]["template"]["spec"]["containers"]
    words = [render.TOOLS if word == "demo" else word for word in render.words(one)[2:]]
    assert container["args"] == [*words, *render.STOP]
    assert ("kind: StatefulSet" in text) is (render.TOOLS in words)
    limits = {"nvidia": {"nvidia.com/gpu": "2"}, "amd": {"amd.com/gpu": "8"}, "cpu": {}}
    assert container["resources"]["limits"] == limits[one.device.vendor]
    assert {(each["name"], each.get("value")) for each in container["env"]} >= set(one.env.items())


def test_the_manifest_itself_is_the_recipe_that_it_names() -> None:
    text = (DEPLOY / "kubernetes.yaml").read_text()
    assert "recipe 120b-2xh100-agent;" in (DEPLOY / "chart" / "values.yaml").read_text()
    assert manifests(text) == manifests(render.kubernetes(recipe("120b-2xh100-agent")))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_unit_and_not_a_misspelt_one(tmp_path: Path) -> None:
    """The program, the user and the folder of /opt do not exist here: others replace them."""
    text = (DEPLOY / "vllm-gptoss.service").read_text()
    here = text.replace("/opt/vllm-gptoss/bin/vllm-gptoss", "/bin/true").replace("User=vllm", "User=root")
    for name, unit, clean in (("good", here, True), ("bad", here.replace("KillMode=", "KilMode="), False)):
        path = tmp_path / f"{name}.service"
        path.write_text(unit)
        done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, timeout=60)
        assert (not [line for line in done.stderr.splitlines() if path.name in line]) is clean, done.stderr
    (name,) = re.findall(r"recipe serve (\S+) --", text)
    assert recipe(name)


def test_what_generates_may_end_before_a_server_is_killed() -> None:
    """After that time the plugin still reports why it fails the rest, and stores it."""
    (name, seconds), unit = render.STOP, (DEPLOY / "vllm-gptoss.service").read_text()
    deployment = of_kind((DEPLOY / "kubernetes.yaml").read_text(), "Deployment")
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["vllm"]
    kills = {
        "kubernetes": deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"],
        "compose": int(service["stop_grace_period"].removesuffix("s")),
        "systemd": int(re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[0]),
    }
    assert set(kills.values()) == {render.KILL_S}
    assert int(seconds) + 25 <= render.KILL_S
    assert f"{name} {seconds}\n" in unit


def test_docker_stop_waits_as_well() -> None:
    """A Dockerfile cannot set the time: `docker run` does; its default is 10 s."""
    text = (DEPLOY / "Dockerfile").read_text()
    command = re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)[-1]
    assert tuple(json.loads(command)[1:]) == render.STOP
    assert f"--stop-timeout {render.KILL_S}" in text
    for each in RECIPES:
        words = shlex.split(render.docker(each).splitlines()[1])
        image = words.index(render.TAG)
        assert words[words.index("--stop-timeout") + 1] == str(render.KILL_S)
        assert words.index("--stop-timeout") < image
        assert words[image + 1 :] == [*render.words(each)[2:], *render.STOP]


def modal_app() -> ModuleType:
    spec = importlib.util.spec_from_file_location("modal_app", DEPLOY / "modal_app.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_modal_reads_the_app_and_runs_the_recipe() -> None:
    app = modal_app()
    assert render.arguments(recipe(app.RECIPE)) == app.FLAGS
    assert recipe(app.RECIPE).repository == app.MODEL
    assert isinstance(app.Server().serve, modal.Function)
    assert type(app.main).__name__ == "LocalEntrypoint"
    words = app.command()
    assert words[:3] == ["vllm", "serve", app.MODEL]
    assert words[words.index("--port") + 1] == str(app.PORT)


def test_modal_tells_the_server_to_stop_and_waits_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Modal kills a container 30 s after it ran what is marked as its exit; a shell replaces the server."""
    app, said = modal_app(), tmp_path / "said"
    name, seconds = app.STOP
    assert (name, app.command()[-2:]) == (render.STOP[0], app.STOP)
    assert int(seconds) < app.KILL_S < 30
    waits = f"trap 'sleep 0.2; echo stopped > {said}; exit' TERM; echo up > {said}; while true; do sleep 0.05; done"
    monkeypatch.setattr(app, "command", lambda: ["sh", "-c", waits])
    server = app.Server._get_user_cls()  # the exit has no name in Modal's own
    one = server()
    vars(server)["serve"]._get_raw_f()(one)
    try:
        while not said.exists() or not said.read_text():
            assert one.process.poll() is None
        vars(server)["stop"]._get_raw_f()(one)
        assert (said.read_text(), one.process.returncode) == ("stopped\n", 0)
    finally:
        one.process.kill()


def test_modal_keeps_every_compiled_kernel_in_a_volume() -> None:
    text = (DEPLOY / "modal_app.py").read_text()
    assert "**COMPILED" in text
    assert '"/compiled": compiled' in text
    compiled = modal_app().COMPILED
    assert set(compiled) == {"VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "GPTOSS_CACHE"}
    assert all(folder.startswith("/compiled/") for folder in compiled.values())


@pytest.mark.parametrize("name", ["20b-h100-agent", "120b-8xmi300x-latency", "20b-cpu-latency"])
def test_docker_says_how_its_image_is_made(name: str) -> None:
    built, run = render.docker(recipe(name)).splitlines()
    assert built.startswith("# image: docker build -f recipes/deploy/Dockerfile ")
    bases = re.findall(r"--build-arg (BASE=\S+)", (DEPLOY / "Dockerfile").read_text())
    said = {"nvidia": [], "amd": bases[:1], "cpu": bases[1:]}
    assert re.findall(r"--build-arg (\S+)", built) == said[recipe(name).device.vendor]
    assert run.startswith("docker run ")
    in_cluster = built.replace(render.TAG, f"registry.example.com/{render.TAG}")
    assert render.kubernetes(recipe(name)).startswith(f"{in_cluster}\n")


def releases() -> list[Path]:
    """Folders of the package `vllm`: the installed one, and the unpacked CUDA release where it is."""
    spec = importlib.util.find_spec("vllm")
    installed = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    unpacked = ROOT / ".cache" / "vllm-0.33.0" / "vllm"
    return [folder for folder in (installed, unpacked) if folder is not None and folder.is_dir()]


def metrics(release: Path) -> set[str]:
    """Names that vLLM's source and the plugin's define."""
    folders = (release / "v1", ROOT / "vllm_gptoss")
    named = re.compile(r'"((?:vllm:|gptoss_)[a-z0-9_]+)"')
    return {name for folder in folders for path in folder.rglob("*.py") for name in named.findall(path.read_text())}


def selectors(expression: Any) -> list[str]:
    """Metrics that a query reads."""
    return re.findall(r"(?:vllm:|gptoss_)[a-z0-9_:]+", str(expression))


def panels() -> list[dict[str, Any]]:
    return list(json.loads((DEPLOY / "grafana-dashboard.json").read_text())["panels"])


def queries() -> list[str]:
    """As Grafana sends it to Prometheus, with the interval filled in."""
    asked = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [query.replace("$__rate_interval", "1m") for query in asked]


def alerts() -> list[str]:
    (group,) = yaml.safe_load((DEPLOY / "chart" / "alerts.yml").read_text())["groups"]
    return [rule["expr"] for rule in group["rules"]]


@pytest.mark.vllm
@pytest.mark.parametrize("release", releases(), ids=lambda folder: folder.parent.name)
def test_the_dashboard_asks_for_metrics_that_are_there(release: Path) -> None:
    known = metrics(release)
    assert len(known) > 50
    for query in (*queries(), *alerts()):
        for name in selectors(promql_parser.parse(query)):
            assert known & {name, re.sub(r"_(total|bucket|sum|count)$", "", name)}, name


def test_the_dashboard_is_whole() -> None:
    assert len({panel["id"] for panel in panels()}) == len(panels())
    with pytest.raises(ValueError, match="unclosed"):
        promql_parser.parse("sum(rate(vllm:generation_tokens_total[1m])")
    uids = {panel["datasource"]["uid"] for panel in panels()}
    (source,) = yaml.safe_load((DEPLOY / "grafana-datasource.yaml").read_text())["datasources"]
    assert uids == {source["uid"]}


def promtool(*arguments: str | Path) -> int:
    return subprocess.run(["promtool", "check", *arguments], capture_output=True, timeout=60).returncode


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus")
def test_prometheus_takes_its_configuration_and_the_queries_and_no_misspelt_ones(tmp_path: Path) -> None:
    config, rules = tmp_path / "prometheus.yml", tmp_path / "rules.yaml"
    assert promtool("config", DEPLOY / "prometheus.yml") == 0
    config.write_text((DEPLOY / "prometheus.yml").read_text().replace("scrape_configs", "scrape_confgis"))
    assert promtool("config", config) != 0
    for asked, taken in ((queries(), True), ([*queries(), "sum(rate(vllm:x[1m])"], False)):
        recorded = [{"record": f"dashboard:{number}", "expr": query} for number, query in enumerate(asked)]
        rules.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
        assert (promtool("rules", rules) == 0) is taken


def test_prometheus_scrapes_the_service_that_compose_names() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    (target,) = job["static_configs"][0]["targets"]
    assert target.split(":")[0] in services

"""Manifests for Ray, KubeRay, llm-d and the production-stack: what can be read here is, and they are one recipe."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from vllm_gptoss.cli.recipes import find, load, probe, render

DEPLOY = Path(__file__).resolve().parents[3] / "recipes" / "deploy"
RECIPE = find.by_id(load.shipped(), "120b-2xh100-agent")

KUBERNETES_OWN = 30
"""Kubernetes' default seconds for a pod to end, as in the production-stack's chart."""
STOPS = {"ray": 1700, "stack": 20, "llm-d": 120}
"""Seconds for running requests to end after SIGTERM."""


def read(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def validate(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def llm_config() -> dict[str, Any]:
    (document,) = read("ray_serve.yaml")
    (application,) = document["applications"]
    (config,) = application["args"]["llm_configs"]
    return dict(config)


def flags() -> dict[str, list[str]]:
    """The words after `vllm serve` that each manifest comes to."""
    config, (stack,) = llm_config(), read("production_stack.yaml")
    (model,) = stack["servingEngineSpec"]["modelSpec"]
    (patch,) = read("llm_d.yaml")
    ray = [f"--{name.replace('_', '-')}={value}" for name, value in config["engine_kwargs"].items()]
    sized = f"--tensor-parallel-size={model['vllmConfig']['tensorParallelSize']}"
    return {
        "ray": [config["model_loading_config"]["model_id"], *ray],
        "stack": [model["modelURL"], sized, *model["vllmConfig"]["extraArgs"]],
        "llm-d": patch["spec"]["template"]["spec"]["containers"][0]["args"],
    }


@pytest.mark.vllm
def test_vllms_parser_reads_each_as_the_recipe() -> None:
    wanted, *found = probe.ask([render.words(RECIPE)[2:], *flags().values()]).parsed
    for name, each in zip(flags(), found, strict=True):
        assert not each.error, f"{name}: {each.error}"
        own: dict[str, Any] = {} if name == "ray" else {"tool-server": render.TOOLS}
        own["shutdown-timeout"] = STOPS[name]
        assert dict(each.values) == {**{k: v for k, v in wanted.values.items() if k != "tool-server"}, **own}, name


def test_ray_is_given_its_tools_where_it_reads_them() -> None:
    """As `--tool-server`, vLLM would search for an MCP server of that name before the plugin sees it."""
    config = llm_config()
    assert config["runtime_env"]["env_vars"] == {"GPTOSS_TOOLS": render.TOOLS}
    assert "tool_server" not in config["engine_kwargs"]


def test_what_generates_may_end_before_a_replica_is_killed() -> None:
    """After that time the plugin still reports why it fails the rest, and stores it."""
    assert STOPS["ray"] + 25 < llm_config()["deployment_config"]["graceful_shutdown_timeout_s"]
    (patch,) = read("llm_d.yaml")
    assert STOPS["llm-d"] + 25 < patch["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert STOPS["stack"] + 5 < KUBERNETES_OWN


def test_rays_image_turns_on_what_our_endpoint_needs() -> None:
    text = (DEPLOY / "Dockerfile.ray").read_text()
    assert "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING=1 RAY_SERVE_ENABLE_HA_PROXY=1" in text
    pinned = (DEPLOY.parents[1] / "tests" / "support" / "ray.txt").read_text()
    assert "ray==2.60.0" in pinned
    assert "'ray[default,serve]==2.60.0'" in text


def test_kuberay_serves_the_same_and_its_pods_are_kubernetes_own() -> None:
    claim, service = read("kuberay.yaml")
    validate(claim)
    assert yaml.safe_load(service["spec"]["serveConfigV2"]) == read("ray_serve.yaml")[0]
    cluster = service["spec"]["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    for template in (cluster["headGroupSpec"]["template"], workers["template"]):
        validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, **template})
    scaling = llm_config()["deployment_config"]["autoscaling_config"]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (scaling["min_replicas"], scaling["max_replicas"])
    gpus = workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert int(gpus) == llm_config()["engine_kwargs"]["tensor_parallel_size"]


OURS = {"/v1/responses", "/v1/openresponses", "/v1/conversations", "/v1/containers"}


def paths_to(ingress: dict[str, Any], service: str) -> set[str]:
    (rule,) = ingress["spec"]["rules"]
    return {path["path"] for path in rule["http"]["paths"] if path["backend"]["service"]["name"] == service}


def test_our_paths_are_those_that_the_endpoint_has() -> None:
    routes = Path(__file__).resolve().parents[3] / "vllm_gptoss" / "server" / "responses" / "transport"
    text = "".join(path.read_text() for path in routes.glob("*.py"))
    assert not {path for path in OURS if path not in text}


def test_beside_dynamo_our_paths_go_to_the_servers_of_the_manifest() -> None:
    (ingress,) = read("dynamo_ingress.yaml")
    validate(ingress)
    services = {each["metadata"]["name"] for each in read("kubernetes.yaml") if each["kind"] == "Service"}
    assert "gptoss" in services
    assert paths_to(ingress, "gptoss") == OURS
    assert paths_to(ingress, "NAME-frontend") == {"/"}


def test_the_ingress_sends_every_path_of_ours_past_the_router() -> None:
    service, ingress = read("responses_ingress.yaml")
    for document in (service, ingress):
        validate(document)
    with pytest.raises(kubernetes_validate.ValidationError):
        validate({**ingress, "specc": {}})
    assert paths_to(ingress, "gptoss-responses") >= OURS
    assert (
        service["spec"]["selector"]["model"]
        == read("production_stack.yaml")[0]["servingEngineSpec"]["modelSpec"][0]["name"]
    )


def test_no_proxy_cuts_an_answer_after_a_minute() -> None:
    values = yaml.safe_load((DEPLOY / "chart" / "values.yaml").read_text())["ingress"]["annotations"]
    for name in ("dynamo_ingress.yaml", "responses_ingress.yaml"):
        assert read(name)[-1]["metadata"]["annotations"] == values
    assert int(values["nginx.ingress.kubernetes.io/proxy-read-timeout"]) >= 3600


def test_workers_share_one_download() -> None:
    """Ray's workers and the stack's replicas would otherwise download 65 GB each."""
    claim, service = read("kuberay.yaml")
    (workers,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    volumes = {each["name"]: each for each in workers["template"]["spec"]["volumes"]}
    assert volumes["cache"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    (model,) = read("production_stack.yaml")[0]["servingEngineSpec"]["modelSpec"]
    assert model["pvcAccessMode"] == ["ReadWriteMany"]


def secrets(value: Any) -> set[tuple[str, str]]:
    """(name, key) of every secret that a document refers to. An optional one is an error: SQLite would replace it."""
    if isinstance(value, list):
        return set().union(*map(secrets, value))
    if not isinstance(value, dict):
        return set()
    found = {(value["name"], value["key"])} if value.keys() == {"name", "key"} else set()
    assert "optional" not in value
    return found.union(*map(secrets, value.values()))


@pytest.mark.parametrize(
    "name", ["kubernetes.yaml", "tools.yaml", "kuberay.yaml", "llm_d.yaml", "production_stack.yaml"]
)
def test_the_documented_secret_has_every_key_that_a_manifest_reads(name: str) -> None:
    page = (DEPLOY.parents[1] / "docs" / "deploy.md").read_text()
    (command,) = re.findall(r"kubectl create secret generic (\w+)((?:.|\n)+?)```", page)
    created = {(command[0], key) for key in re.findall(r"--from-literal=([\w-]+)=", command[1])}
    used = secrets(read(name))
    assert used
    assert used <= created


def test_llm_ds_patch_is_of_a_deployment() -> None:
    """A patch is not whole: what kustomize adds is added here."""
    (patch,) = read("llm_d.yaml")
    labels = {"matchLabels": {"app": "x"}}
    patch["spec"]["selector"] = labels
    patch["spec"]["template"]["metadata"] = {"labels": labels["matchLabels"]}
    validate(patch)

"""The Helm chart, rendered by Helm's own library, and the plain manifests that are written from it."""

from __future__ import annotations

import re
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from scripts import chart

FULL: dict[str, Any] = {
    "replicas": 3,
    "env": {"GPTOSS_EXPERTS": "marlin"},
    "huggingFaceToken": True,
    "cache": {"accessMode": "ReadWriteMany", "storageClass": "nfs"},
    "nodeSelector": {"gpu": "h100"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "tools": {"replicas": 2},
    "ingress": {"enabled": True, "tlsSecret": "tls"},
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "autoscaling": {"enabled": True},
}
CUSTOM = {"PodMonitor", "PrometheusRule", "ScaledObject"}
"""Resources of operators: Kubernetes has no schema of these."""


def documents(values: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Rendered and validated, by kind and name."""
    found = {}
    for text in chart.render(values).values():
        for each in filter(None, yaml.safe_load_all(text)):
            if each["kind"] not in CUSTOM:
                kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
            found[each["kind"], each["metadata"]["name"]] = each
    return found


@pytest.mark.parametrize("name", chart.MANIFESTS)
def test_plain_manifests_are_the_chart(name: str) -> None:
    assert (chart.DEPLOY / name).read_text() == chart.manifest(name), "run scripts/chart.py"


def test_helm_finds_no_error_in_the_chart() -> None:
    report = helm_python.lint(chart.CHART, FULL, strict=True)
    assert not report["errors"], report["messages"]


def test_everything_turned_on_is_valid() -> None:
    made = documents(FULL)
    assert {kind for kind, _ in made} >= CUSTOM | {"Ingress", "NetworkPolicy", "PodDisruptionBudget", "StatefulSet"}
    pod = made["Deployment", "gptoss"]["spec"]["template"]["spec"]
    args = pod["containers"][0]["args"]
    nodes = [f"service:http://gptoss-tools-{number}.gptoss-tools:8001" for number in range(2)]
    assert args[args.index("--tool-server") + 1] == ",".join(["browser", *nodes])
    assert "replicas" not in made["Deployment", "gptoss"]["spec"]
    assert {"name": "GPTOSS_EXPERTS", "value": "marlin"} in pod["containers"][0]["env"]


def test_only_the_api_with_keys_is_reachable_from_outside() -> None:
    (rule,) = documents(FULL)["Ingress", "gptoss"]["spec"]["rules"]
    assert [path["path"] for path in rule["http"]["paths"]] == ["/v1"]


def test_the_pods_have_no_privilege() -> None:
    made = documents({})
    for kind, name in (("Deployment", "gptoss"), ("StatefulSet", "gptoss-tools")):
        pod = made[kind, name]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False


def test_the_queue_is_read_by_the_name_that_the_monitor_gives_it() -> None:
    made = documents(FULL)
    (trigger,) = made["ScaledObject", "gptoss"]["spec"]["triggers"]
    job = re.findall(r'job="([^"]+)"', trigger["metadata"]["query"])
    assert job == [f"default/{made['PodMonitor', 'gptoss']['metadata']['name']}"]


def test_the_alerts_are_those_of_compose_for_the_job_of_the_monitor() -> None:
    made = documents(FULL)
    rule = made["PrometheusRule", "gptoss"]
    assert rule["metadata"]["labels"] == made["PodMonitor", "gptoss"]["metadata"]["labels"] == {"release": "prometheus"}
    text = (chart.CHART / "alerts.yml").read_text()
    assert text.count('job="vllm"') == 1
    assert rule["spec"] == yaml.safe_load(text.replace('job="vllm"', 'job="default/gptoss"'))
    mounts = yaml.safe_load((chart.DEPLOY / "compose.yaml").read_text())["services"]["prometheus"]["volumes"]
    (rules,) = yaml.safe_load((chart.DEPLOY / "prometheus.yml").read_text())["rule_files"]
    assert (chart.DEPLOY / rules).samefile(chart.CHART / "alerts.yml")
    assert f"./{rules}:/etc/prometheus/{rules}:ro" in mounts


@pytest.mark.parametrize("monitor", [{"enabled": False}, {"enabled": True, "alerts": False}], ids=["off", "no alerts"])
def test_no_alerts_are_installed_where_they_are_off(monitor: dict[str, Any]) -> None:
    kinds = {kind for kind, _ in documents({"podMonitor": monitor})}
    assert ("PodMonitor" in kinds, "PrometheusRule" in kinds) == (monitor["enabled"], False)


def test_nodes_without_the_profile_use_the_runtimes_own() -> None:
    pod = documents({"tools": {"seccompProfile": None, "appArmorProfile": None}})["StatefulSet", "gptoss-tools"]
    spec = pod["spec"]["template"]["spec"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not spec["containers"][0]["securityContext"].keys() & {"seccompProfile", "appArmorProfile"}


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        ({"replicas": 2, "cache": {"accessMode": "ReadWriteMany"}, "sqlite": True}, "set sqlite=false"),
        ({"replicas": 2}, "set cache.accessMode=ReadWriteMany"),
        ({"autoscaling": {"enabled": True}, "cache": {"accessMode": "ReadWriteMany"}}, "set podMonitor.enabled=true"),
        ({"shutdown": {"finish": 150}}, "must be longer"),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], remedy: str) -> None:
    with pytest.raises(helm_python.HelmError, match=remedy):
        chart.render(values)


def test_one_replica_may_keep_responses_in_a_file() -> None:
    made = documents({"sqlite": True, "tools": {"enabled": False}})
    assert ("PersistentVolumeClaim", "gptoss-state") in made
    (container,) = made["Deployment", "gptoss"]["spec"]["template"]["spec"]["containers"]
    assert [each["name"] for each in container["env"]] == ["VLLM_API_KEY"]
    assert "--tool-server" not in container["args"]

"""deploy/kubernetes.yaml: valid by Kubernetes' own schemas, and in step with the service that it runs."""

from pathlib import PurePosixPath
from typing import Any

import kubernetes_validate
import pytest
import yaml

from app.main import create_app
from app.serve import ADMIN_GRACE_S, LAST_GRACE_S
from app.settings import Settings
from app.supervisor import EXTENSION, PLUGIN, QUIET_ROUTES, SECRET_VARIABLE
from tests.ops.compose import composed
from tests.ops.tools import DEPLOY

DOCUMENTS: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
VERSIONS = ("1.29", "1.33")


def _named(kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in DOCUMENTS if one["kind"] == kind}


@pytest.fixture
def pod() -> dict[str, Any]:
    """The one pod."""
    spec: dict[str, Any] = _named("StatefulSet")["graft"]["spec"]["template"]["spec"]
    return spec


@pytest.fixture
def containers(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By name."""
    return {one["name"]: one for one in pod["containers"]}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_document_is_valid(version: str) -> None:
    """Strictly: a field that Kubernetes does not know would be ignored in silence."""
    for document in DOCUMENTS:
        kubernetes_validate.validate(document, version, strict=True)
    broken = {**DOCUMENTS[0], "spec": {"accesModes": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, version, strict=True)


def test_probes_ask_what_there_is(containers: dict[str, dict[str, Any]]) -> None:
    """Paths are routes that need no token, ports are the container's; a load has an hour."""
    graft, vllm = containers["graft"], containers["vllm"]
    document = create_app().openapi()
    for probe in ("startupProbe", "livenessProbe"):
        path = graft[probe]["httpGet"]["path"]
        assert document["paths"][path]["get"]["security"] == []
        assert vllm[probe]["httpGet"]["path"] == "/health"
        for container in (graft, vllm):
            assert container[probe]["httpGet"]["port"] in [port["name"] for port in container["ports"]]
    assert graft["readinessProbe"]["exec"]["command"] == ["graft", "health"]
    patience = vllm["startupProbe"]["periodSeconds"] * vllm["startupProbe"]["failureThreshold"]
    assert patience >= 30 * 60
    silence = vllm["livenessProbe"]["periodSeconds"] * vllm["livenessProbe"]["failureThreshold"]
    assert silence >= Settings().engine_hang_s


def test_the_pod_is_what_compose_runs(containers: dict[str, dict[str, Any]]) -> None:
    """The same images, flags, variables and shared folders."""
    services = composed()["services"]
    for name, service in (("vllm", services["engine-gpu"]), ("graft", services["graft-gpu"])):
        container = containers[name]
        assert container["image"] == service["image"]
        env = {one["name"]: PurePosixPath(one["value"]).name for one in container["env"]}
        given = {key: PurePosixPath(value).name for key, value in service["environment"].items()}
        assert env.items() <= given.items()
        mounts = {one["mountPath"] for one in container["volumeMounts"]}
        assert {volume.split(":")[1] for volume in service["volumes"]} <= mounts
    assert f"--worker-extension-cls={EXTENSION}" in containers["vllm"]["args"]
    assert f"--disable-access-log-for-endpoints={QUIET_ROUTES}" in containers["vllm"]["args"]
    env = {one["name"]: one["value"] for one in containers["vllm"]["env"]}
    assert (env["VLLM_PLUGINS"], env[SECRET_VARIABLE]) == (PLUGIN, "/run/secrets/graft/engine")


def test_the_pod_has_no_rights_and_time_to_end(pod: dict[str, Any], containers: dict[str, Any]) -> None:
    """Not root, root file system read-only; the grace period is over the drain limit."""
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["terminationGracePeriodSeconds"] > Settings().drain_s + ADMIN_GRACE_S + LAST_GRACE_S
    for container in containers.values():
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}


def test_volumes_and_selectors_lead_somewhere(pod: dict[str, Any], containers: dict[str, Any]) -> None:
    """What is mounted, claimed, selected or aimed at exists; vLLM does not see the admin's token."""
    volumes = {one["name"]: one for one in pod["volumes"]}
    mounted = {mount["name"] for one in containers.values() for mount in one["volumeMounts"]}
    assert mounted == set(volumes)
    claims = [one["persistentVolumeClaim"] for one in pod["volumes"] if "persistentVolumeClaim" in one]
    assert {claim["claimName"] for claim in claims} == set(_named("PersistentVolumeClaim"))
    labels = _named("StatefulSet")["graft"]["spec"]["template"]["metadata"]["labels"]
    ports = {port["name"] for one in containers.values() for port in one["ports"]}
    for service in _named("Service").values():
        assert service["spec"]["selector"] == labels
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    policy = _named("NetworkPolicy")["graft"]["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    open_to_all = {port["port"] for rule in policy["ingress"] if "from" not in rule for port in rule["ports"]}
    assert open_to_all == {"inference"}
    seen = {mount["name"] for mount in containers["vllm"]["volumeMounts"]}
    assert "secrets" not in seen
    assert volumes["engine-secret"]["secret"]["items"] == [{"key": "engine", "path": "engine"}]

"""docker-compose.yml and the Dockerfile: what they promise of processes, networks, secrets and disks."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.serve import ADMIN_GRACE_S, LAST_GRACE_S
from app.settings import Settings
from app.supervisor import ENTRY, EXTENSION, PLUGIN, QUIET_ROUTES, SECRET_VARIABLE
from app.supported import BEFORE, FIRST
from tests.ops.compose import composed, config, seconds
from tests.ops.tools import ROOT, ran

ENGINES, ADMINS = ["engine-cpu", "engine-gpu"], ["graft-cpu", "graft-gpu"]
Compose = dict[str, Any]


@pytest.fixture(scope="module")
def compose() -> Compose:
    """The whole file, with no variable set."""
    return composed()


def _mounts(service: dict[str, Any]) -> dict[str, str]:
    return {name: path for name, path, _ in (volume.split(":") for volume in service["volumes"])}


def test_a_clean_clone_can_be_parsed(tmp_path: Path) -> None:
    """With no secret made and no variable set, by the docker-compose of Debian 12."""
    for name in ("docker-compose.yml", "Dockerfile"):
        shutil.copy(ROOT / name, tmp_path)
    command = ["docker-compose", "--profile", "gpu", "config", "--quiet"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_there_is_a_service_for_each_profile(compose: Compose) -> None:
    """`--profile cpu` starts no service that asks for a GPU, and the other way round."""
    by_profile = {name: service["profiles"] for name, service in compose["services"].items()}
    assert by_profile == {
        "demo": ["cpu"],
        "engine-cpu": ["cpu"],
        "graft-cpu": ["cpu"],
        "engine-gpu": ["gpu"],
        "graft-gpu": ["gpu"],
    }
    needed = {name: list(service.get("depends_on", ())) for name, service in compose["services"].items()}
    for name, others in needed.items():
        assert all(by_profile[other] == by_profile[name] for other in others)


def test_only_the_gpu_service_reserves_gpus(compose: Compose) -> None:
    """The CPU profile starts on machines without a GPU, and only vLLM needs one."""
    reserving = {name: service for name, service in compose["services"].items() if "deploy" in service}
    assert list(reserving) == ["engine-gpu"]
    devices = reserving["engine-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert [device["capabilities"] for device in devices] == [["gpu"]]
    assert all(("count" in device) != ("device_ids" in device) for device in devices)


@pytest.mark.parametrize("name", ["demo", *ENGINES, *ADMINS])
def test_nothing_runs_as_root_or_writes_beside_its_volumes(compose: Compose, name: str) -> None:
    """A user without rights, a root that is read-only, no capability, no way to get one."""
    service = compose["services"][name]
    assert service["user"] == "1000:1000"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"] and "cap_add" not in service and "privileged" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert [mount.partition(":")[0] for mount in service["tmpfs"]] == ["/tmp"]
    assert set(_mounts(service)) == {"state", "cache", "models"} == set(compose["volumes"])


def test_both_processes_see_the_same_files_under_the_same_paths(compose: Compose) -> None:
    """Graft tells vLLM paths of uploads, and both read the base checkpoint."""
    mounts = [_mounts(compose["services"][name]) for name in (*ENGINES, *ADMINS)]
    assert all(one == mounts[0] for one in mounts)
    assert len(set(mounts[0].values())) == 3


def test_inference_and_admin_are_on_separate_networks(compose: Compose) -> None:
    """Who asks for completions can't reach the admin; the bridge between the two is closed to the world."""
    services = compose["services"]
    for name in ENGINES:
        assert set(services[name]["networks"]) == {"inference", "bridge"}
        assert services[name]["ports"] == ["127.0.0.1:8000:8000/tcp"]
        assert services[name]["networks"]["bridge"]["aliases"] == ["engine"]
    for name in ADMINS:
        assert set(services[name]["networks"]) == {"admin", "bridge"}
        assert services[name]["ports"] == ["127.0.0.1:8001:8001/tcp"]
        assert "http://engine:8000" in services[name]["command"]
    assert compose["networks"]["bridge"]["internal"] is True


def test_secrets_are_files(compose: Compose) -> None:
    """No environment holds one; vLLM is not given the admin's token."""
    services = compose["services"]
    assert {name: file["file"] for name, file in compose["secrets"].items()} == {
        "token": f"{ROOT}/secrets/token",
        "engine": f"{ROOT}/secrets/engine",
    }
    for name in ENGINES:
        assert [secret["source"] for secret in services[name]["secrets"]] == ["engine"]
        assert services[name]["environment"][SECRET_VARIABLE] == "/run/secrets/engine"
    for name in ADMINS:
        assert [secret["source"] for secret in services[name]["secrets"]] == ["token", "engine"]
        assert services[name]["environment"]["GRAFT_TOKEN_FILE"] == "/run/secrets/token"
        assert services[name]["command"][-2:] == ["--engine-secret-file", "/run/secrets/engine"]
    assert "secrets/" in (ROOT / ".gitignore").read_text().split()
    assert "secrets" in (ROOT / ".dockerignore").read_text().split()


@pytest.mark.parametrize("name", [*ENGINES, *ADMINS])
def test_services_are_given_time_to_start_and_to_end(compose: Compose, name: str) -> None:
    """Loading may take minutes; ending as long as requests are drained, and then what a commit needs."""
    service = compose["services"][name]
    assert service["healthcheck"]["start_period"] == "30m"
    assert seconds(service["stop_grace_period"]) > Settings().drain_s + ADMIN_GRACE_S + LAST_GRACE_S
    assert service["restart"] == "unless-stopped"


def test_health_is_asked_by_python(compose: Compose) -> None:
    """The images need no curl: what runs is Python's own, and is valid."""
    for name in ADMINS:
        assert compose["services"][name]["healthcheck"]["test"] == ["CMD", "graft", "health"]
    for name in ENGINES:
        kind, python, flag, code = compose["services"][name]["healthcheck"]["test"]
        assert (kind, python, flag) == ("CMD", "python3", "-c")
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert ended.returncode == 1 and "URLError" in ended.stderr  # nobody listens here


@pytest.mark.parametrize("name", ENGINES)
def test_vllm_is_started_as_graft_needs_it(compose: Compose, name: str) -> None:
    """Plugin, extension, secret and quiet routes are those that a managed engine is given."""
    service = compose["services"][name]
    assert f"--worker-extension-cls={EXTENSION}" in service["command"]
    assert f"--disable-access-log-for-endpoints={QUIET_ROUTES}" in service["command"]
    assert service["environment"]["VLLM_PLUGINS"] == PLUGIN
    assert "VLLM_SERVER_DEV_MODE" not in service["environment"]
    assert service["shm_size"] in ("2gb", "8gb")  # Docker's 64 MB break tensor parallelism


def test_another_model_can_be_named() -> None:
    """MODEL reaches the command line as one argument, whatever it holds, and is the served name."""
    services = composed(MODEL="/models/a b", TENSOR_PARALLEL="4")["services"]
    for name in ENGINES:
        assert services[name]["command"][:2] == ["--model=/models/a b", "--served-model-name=/models/a b"]
    assert "--tensor-parallel-size=4" in services["engine-gpu"]["command"]


def test_secrets_can_lie_elsewhere() -> None:
    """GRAFT_SECRETS names another folder."""
    assert composed(GRAFT_SECRETS="/etc/graft")["secrets"]["token"]["file"] == "/etc/graft/token"
    assert config(GRAFT_SECRETS="").returncode == 0


def _stages() -> dict[str, list[str]]:
    """Dockerfile instructions by stage, continuation lines joined."""
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    stages: dict[str, list[str]] = {}
    for line in text.splitlines():
        if begun := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            stages[begun[2]] = current = [f"FROM {begun[1]}"]
        elif line and not line.startswith("#"):
            current.append(line)
    return stages


def test_every_target_is_an_image_that_is_built(compose: Compose) -> None:
    """Services name stages that exist, and one image is always the same stage."""
    built = {(one["image"], one["build"]["target"]) for one in compose["services"].values()}
    assert built == {(f"graft:{target}", target) for target in _stages().keys() - {"user"}}


def test_commands_are_lists_and_users_are_numbers() -> None:
    """Shell forms swallow signals; Kubernetes can't tell whether a named user is root."""
    for name, lines in _stages().items():
        commands = [line for line in lines if line.startswith(("CMD", "ENTRYPOINT"))]
        assert all(re.fullmatch(r'(CMD|ENTRYPOINT) \[(".*")\]', line) for line in commands)
        if name != "user":
            assert any(line.startswith("ENTRYPOINT") for line in commands)
            assert [line for line in lines if line.startswith("USER")][-1] == "USER 1000"
    for stage in ("engine-cpu", "engine-cuda"):
        assert any(ENTRY in line for line in _stages()[stage] if line.startswith("ENTRYPOINT"))


def test_the_gpu_image_is_vllms_own_of_a_supported_version() -> None:
    """The tag lies in the range that Graft works with."""
    (version,) = re.findall(r"FROM vllm/vllm-openai:v([\d.]+)$", "\n".join(_stages()["engine-cuda"]), re.M)
    assert FIRST <= tuple(map(int, version.split("."))) < BEFORE


def test_hadolint_has_nothing_to_say() -> None:
    """The Dockerfile passes the linter."""
    assert ran(Path(sys.executable).parent / "hadolint", ROOT / "Dockerfile") == ""

"""docker-compose.yml as Debian's docker-compose understands it. No Docker engine is needed."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def _config(*profiles: str, **environ: str) -> subprocess.CompletedProcess[str]:
    chosen = [part for profile in profiles for part in ("--profile", profile)]
    env = {name: value for name, value in os.environ.items() if name not in {"GRAFT_TOKEN", "MODEL"}}
    command = ["docker-compose", *chosen, "config"]
    return subprocess.run(command, cwd=ROOT, env=env | environ, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """The whole file after interpolation and merging."""
    if shutil.which("docker-compose") is None:
        pytest.fail("docker-compose is not installed: make system")
    ended = _config("cpu", "gpu", GRAFT_TOKEN="t")
    assert ended.returncode == 0, ended.stderr
    parsed: dict[str, Any] = yaml.safe_load(ended.stdout)
    return parsed


def test_there_is_a_service_for_each_profile(compose: dict[str, Any]) -> None:
    """`--profile cpu` starts no service that asks for a GPU, and the other way round."""
    by_profile = {name: service["profiles"] for name, service in compose["services"].items()}
    assert by_profile == {
        "demo-cpu": ["cpu"],
        "graft-cpu": ["cpu"],
        "demo-gpu": ["gpu"],
        "graft-gpu": ["gpu"],
    }


@pytest.mark.parametrize("name", ["graft-cpu", "graft-gpu"])
def test_state_models_and_downloads_are_three_volumes(compose: dict[str, Any], name: str) -> None:
    """What the service keeps survives a new image, apart from caches that can be thrown away."""
    mounts = dict(volume.split(":")[:2] for volume in compose["services"][name]["volumes"])
    assert set(mounts) == {"state", "huggingface", "models"} == set(compose["volumes"])
    assert len(set(mounts.values())) == 3


@pytest.mark.parametrize("name", ["graft-cpu", "graft-gpu"])
def test_the_service_is_given_time_to_start_and_to_end(compose: dict[str, Any], name: str) -> None:
    """Loading may take minutes, and ending up to a minute, before Docker steps in."""
    service = compose["services"][name]
    assert service["healthcheck"]["start_period"] == "30m"
    assert service["healthcheck"]["test"] == ["CMD", "graft", "health"]
    assert _seconds(service["stop_grace_period"]) > 60


@pytest.mark.parametrize("name", ["graft-cpu", "graft-gpu"])
def test_ranks_get_enough_shared_memory(compose: dict[str, Any], name: str) -> None:
    """Docker's 64 MB break tensor parallelism."""
    assert compose["services"][name]["shm_size"] == "2gb"


@pytest.mark.parametrize("name", ["graft-cpu", "graft-gpu"])
def test_ports_are_published_to_this_machine_only(compose: dict[str, Any], name: str) -> None:
    """Whoever wants them elsewhere decides so; the admin needs its token all the same."""
    service = compose["services"][name]
    assert service["ports"] == ["127.0.0.1:8000:8000/tcp", "127.0.0.1:8001:8001/tcp"]
    assert service["environment"]["GRAFT_TOKEN"] == "t"


def test_only_the_gpu_service_reserves_gpus(compose: dict[str, Any]) -> None:
    """The CPU profile starts on machines without a GPU."""
    devices = compose["services"]["graft-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert [device["capabilities"] for device in devices] == [["gpu"]]
    assert all(("count" in device) != ("device_ids" in device) for device in devices)
    assert "deploy" not in compose["services"]["graft-cpu"]


def test_another_model_can_be_named(compose: dict[str, Any]) -> None:
    """MODEL reaches the command line as one argument, whatever it holds."""
    ended = _config("cpu", GRAFT_TOKEN="t", MODEL="/models/a b")
    command = yaml.safe_load(ended.stdout)["services"]["graft-cpu"]["command"]
    assert command == ["serve", "/models/a b"]
    assert compose["services"]["graft-cpu"]["command"] == ["serve", "/models/demo"]


def test_without_a_token_nothing_starts(compose: dict[str, Any]) -> None:
    """The message says which variable to set."""
    ended = _config("cpu")
    assert ended.returncode != 0
    assert "GRAFT_TOKEN" in ended.stderr


def test_commands_are_lists() -> None:
    """Shell forms swallow signals: neither file has one."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    forms = [line.split(maxsplit=1)[1] for line in lines if line.startswith(("CMD ", "ENTRYPOINT "))]
    assert forms == ['["graft"]', '["serve", "/models/demo"]']


def _seconds(text: str) -> int:
    minutes, _, seconds = text.removesuffix("s").rpartition("m")
    return 60 * int(minutes or 0) + int(seconds or 0)

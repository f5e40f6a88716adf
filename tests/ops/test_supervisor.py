"""The engine's command line and environment, and how a child is followed and ended."""

import asyncio
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from app.supervisor import EngineCommand, EngineStartError, Supervisor, engine_command, make_secret
from app.supported import InstalledVllm
from schemas.bridge import PREFIX

CPU = InstalledVllm("0.32.0", cpu=True)
GPU = InstalledVllm("0.32.0", cpu=False)


def _command(
    *vllm_args: str,
    model: str = "some/model",
    environ: Mapping[str, str] = os.environ,
    vllm: InstalledVllm = CPU,
) -> EngineCommand:
    return engine_command(
        model,
        host="127.0.0.1",
        port=8123,
        vllm_args=vllm_args,
        secret_file=Path("/state/engine.secret"),
        log=Path("/state/engine.log"),
        vllm=vllm,
        environ=environ,
    )


def _value(argv: tuple[str, ...], flag: str) -> str:
    assert argv.count(flag) == 1
    return argv[argv.index(flag) + 1]


def test_the_command_names_model_address_and_extension() -> None:
    """vLLM is started as a module of this interpreter, with the model's name kept as the user gave it."""
    argv = _command().argv
    assert argv[:3] == (sys.executable, "-P", "-m")
    assert _value(argv, "--model") == _value(argv, "--served-model-name") == "some/model"
    assert (_value(argv, "--host"), _value(argv, "--port")) == ("127.0.0.1", "8123")
    assert _value(argv, "--worker-extension-cls") == "loaders.engine.worker.GraftWorker"


def test_polling_does_not_fill_the_engines_log() -> None:
    """What the admin asks every second is left out of vLLM's access log, unless the user wants otherwise."""
    flag = "--disable-access-log-for-endpoints"
    assert _value(_command().argv, flag).split(",") == [f"{PREFIX}/state", "/health"]
    assert _command(flag, "/metrics").argv[-2:] == (flag, "/metrics")


def test_the_users_arguments_come_last_and_unchanged() -> None:
    """What stands after `--` reaches vLLM as it is and can override defaults."""
    assert _command("--max-model-len", "512", "--seed=3").argv[-3:] == ("--max-model-len", "512", "--seed=3")


@pytest.mark.parametrize(
    "argument",
    ["--port", "--port=1", "--host=x", "--model", "--worker-extension-cls=a.B", "--worker_extension_cls"],
)
def test_what_graft_sets_cannot_be_set_twice(argument: str) -> None:
    """Flags that would cut Graft off from its engine are refused, however they are spelled."""
    with pytest.raises(EngineStartError, match="set by Graft"):
        _command("--seed", "1", argument)


@pytest.mark.parametrize("model", ["/no/model", "./model", "../model", "~/model", "a/b/model", "org/model/"])
def test_a_path_to_nothing_is_refused(model: str) -> None:
    """What can only be a path has to be that of a folder; vLLM would say so much later."""
    with pytest.raises(EngineStartError, match=f"there is no folder {model}"):
        _command(model=model)


@pytest.mark.parametrize("model", ["model", "org/model", ".org/model", "s3://bucket/folder/model"])
def test_names_are_vllms_to_look_up(model: str) -> None:
    """Names of a hub and addresses of a storage are passed on, though no folder is called so."""
    assert _value(_command(model=model).argv, "--model") == model


@pytest.mark.parametrize("config", ["config.json", "params.json"])
def test_a_folder_without_a_config_is_refused(tmp_path: Path, config: str) -> None:
    """No checkpoint, unless its config is said to be elsewhere; vLLM reads two kinds."""
    with pytest.raises(EngineStartError, match=r"has no config\.json"):
        _command(model=str(tmp_path))
    _command("--hf-config-path=elsewhere", model=str(tmp_path))
    (tmp_path / config).touch()
    _command(model=str(tmp_path))


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, "graft"), ("", "graft"), ("mine,other", "mine,other,graft"), ("graft,mine", "graft,mine")],
)
def test_the_plugin_is_added_to_the_users(before: str | None, after: str) -> None:
    """VLLM_PLUGINS is one list for all plugins: the user's stay in it."""
    environ = {} if before is None else {"VLLM_PLUGINS": before}
    assert _command(environ=environ).env["VLLM_PLUGINS"] == after


def test_the_environment_is_passed_on_but_for_what_would_be_unsafe() -> None:
    """No development routes and no admin token in the engine; all else is inherited."""
    environ = {"VLLM_SERVER_DEV_MODE": "1", "GRAFT_TOKEN": "t", "HF_HUB_OFFLINE": "1"}
    env = _command(environ=environ).env
    assert "VLLM_SERVER_DEV_MODE" not in env
    assert "GRAFT_TOKEN" not in env
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["GRAFT_ENGINE_SECRET_FILE"] == "/state/engine.secret"


def test_cpu_engines_get_a_small_cache_unless_told_otherwise() -> None:
    """The KV cache default is for CPUs only, and never overrides the user's."""
    assert _command(environ={}).env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert _command(environ={"VLLM_CPU_KVCACHE_SPACE": "7"}).env["VLLM_CPU_KVCACHE_SPACE"] == "7"
    assert "VLLM_CPU_KVCACHE_SPACE" not in _command(environ={}, vllm=GPU).env


def test_without_a_compiler_the_engine_runs_eagerly(tmp_path: Path) -> None:
    """torch.compile needs a C++ compiler; where there is none vLLM is told not to compile, once."""
    bare = {"PATH": str(tmp_path)}
    assert "--enforce-eager" in _command(environ=bare).argv
    assert _command("--enforce-eager", environ=bare).argv.count("--enforce-eager") == 1
    compiler = tmp_path / "my-c++"
    shutil.copy("/bin/true", compiler)
    assert "--enforce-eager" not in _command(environ={**bare, "CXX": "my-c++"}).argv


def test_each_secret_is_new_and_private(tmp_path: Path) -> None:
    """The file is readable by its owner alone, also where an open one lay before."""
    path = tmp_path / "secret"
    path.write_text("old")
    path.chmod(0o644)
    make_secret(path)
    first = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    make_secret(path)
    assert len(first) >= 32
    assert path.read_text() != first


def _child(tmp_path: Path, code: str) -> Supervisor:
    command = EngineCommand((sys.executable, "-c", code), dict(os.environ), tmp_path / "log")
    return Supervisor(command, tmp_path / "engine.json")


async def _until(log: Path, text: str) -> str:
    for _ in range(600):
        if log.exists() and text in log.read_text():
            return log.read_text()
        await asyncio.sleep(0.05)
    raise AssertionError(f"{text!r} is not in {log.read_text()!r}")


def _alive(pid: int) -> bool:
    """Whether a process runs; one that has ended but that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def _gone(pid: int) -> bool:
    for _ in range(200):
        if not _alive(pid):
            return True
        await asyncio.sleep(0.05)
    return False


def test_output_and_exit_status_are_kept(tmp_path: Path) -> None:
    """Both streams go to the log, which is begun anew, and the child's status comes back."""

    async def run() -> int:
        child = _child(tmp_path, "import sys; print('out'); sys.stderr.write('err'); sys.exit(7)")
        await child.start()
        return await child.wait()

    (tmp_path / "log").write_text("from an earlier run")
    assert asyncio.run(run()) == 7
    assert sorted((tmp_path / "log").read_text().split()) == ["err", "out"]


def test_the_child_has_a_group_of_its_own(tmp_path: Path) -> None:
    """Ctrl-C goes to a terminal's whole foreground group, so the engine must not be in it."""

    async def run() -> None:
        child = _child(tmp_path, "import time; print('up', flush=True); time.sleep(60)")
        await child.start()
        await _until(tmp_path / "log", "up")
        assert os.getpgid(child.pid) == child.pid != os.getpgid(0)
        await child.stop(10)
        assert await child.wait() == -15

    asyncio.run(run())


GRANDCHILD = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pid = os.fork()
if pid:
    print('worker', pid, flush=True)
{then}
time.sleep(60)
"""


def test_a_child_that_will_not_end_is_killed_with_its_workers(tmp_path: Path) -> None:
    """SIGTERM is ignored by all: after the bound the whole group is gone."""

    async def run() -> None:
        child = _child(tmp_path, GRANDCHILD.format(then=""))
        await child.start()
        worker = int((await _until(tmp_path / "log", "\n")).split()[1])
        await child.stop(0.2)
        assert await child.wait() == -9
        assert await _gone(worker)

    asyncio.run(run())


def test_workers_do_not_outlive_a_child_that_died(tmp_path: Path) -> None:
    """The API server is dead, its worker is not: stopping ends that too."""

    async def run() -> None:
        child = _child(tmp_path, GRANDCHILD.format(then="    sys.exit(1)"))
        await child.start()
        worker = int((await _until(tmp_path / "log", "\n")).split()[1])
        assert await child.wait() == 1
        assert _alive(worker)
        await child.stop(5)
        assert await _gone(worker)

    asyncio.run(run())


def test_stopping_what_never_ran_does_nothing(tmp_path: Path) -> None:
    """A service whose admin could not start still ends in order."""
    asyncio.run(_child(tmp_path, "").stop(1))
    assert not (tmp_path / "log").exists()

"""The launch scripts of experiments/launch, as far as they work without a cluster."""

import os
import shutil
import socket
import subprocess
import sys

import pytest
import yaml

from tests.conftest import HANG, python_path
from tests.system.conftest import ROOT

LAUNCH = ROOT / "experiments" / "launch"
BIN = os.path.dirname(sys.executable)
SMOKE = "--config=configs/quickstart.py:smoke"

# A fake of SLURM's srun. Both nodes are this machine; it returns the highest exit code of the
# tasks.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
export SLURM_NTASKS=2 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=localhost SLURM_LOCALID=0
for task in 0 1; do SLURM_PROCID=$task "$@" & tasks+=($!); done
code=0
for task in "${tasks[@]}"; do wait "$task"; ended=$?; ((ended > code)) && code=$ended; done
exit $code
"""


def put(folder, **scripts):
    """Writes executables that replace those of a cluster, and returns a PATH with them first."""
    folder.mkdir(exist_ok=True)
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return f"{folder}:{BIN}:{os.environ['PATH']}"


def bash(script, *arguments, **environment):
    return subprocess.run(
        ["bash", LAUNCH / script, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": python_path(ROOT), "JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=HANG,
    )


@pytest.mark.parametrize("script", ["slurm.sh", "tpu_vm.sh"])
def test_shellcheck_finds_nothing(script):
    checker = shutil.which("shellcheck", path=f"{BIN}:{os.environ['PATH']}")
    assert checker, "shellcheck is missing: pip install -e '.[test]'"
    result = subprocess.run([checker, LAUNCH / script], capture_output=True, text=True)
    assert result.stdout == ""
    assert result.returncode == 0


@pytest.mark.slow
def test_slurm_script_trains_over_two_tasks(run, tmp_path):
    # JAX's port for a job is 61440 + job % 4096. This loop finds a job whose port is free.
    for job in range(4096):
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", 61440 + job)):
                break
    result = bash(
        "slurm.sh",
        SMOKE,
        f"--workdir={tmp_path / 'run'}",
        PATH=put(tmp_path / "bin", srun=SRUN),
        SLURM_JOB_ID=str(4096 + job),
        XDG_CACHE_HOME=run.environment["XDG_CACHE_HOME"],
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 process(es)" in (tmp_path / "run" / "log.txt").read_text()
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize(
    ("ended", "restarts", "code", "requeued"),
    [(0, 0, 0, True), (1, 3, 0, True), (137, 0, 0, True), (2, 0, 2, False), (1, 20, 1, False)],
)
def test_slurm_job_is_requeued_unless_it_cannot_succeed(tmp_path, ended, restarts, code, requeued):
    scontrol = f'#!/bin/bash\necho "$@" > {tmp_path / "requeued"}\n'
    result = bash(
        "slurm.sh",
        SMOKE,
        f"--workdir={tmp_path / 'run'}",
        PATH=put(tmp_path / "bin", srun=f"#!/bin/bash\nexit {ended}\n", scontrol=scontrol),
        SLURM_JOB_ID="7",
        SLURM_RESTART_COUNT=str(restarts),
    )
    assert result.returncode == code, result.stderr
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 7\n"


# A fake of the gcloud command: it returns the states of the TPU slice in the order of a file.
GCLOUD = """#!/bin/bash
cd "$(dirname "$0")"
echo "${*//[$'\\n']/ }" >> calls
case "$*" in
    *describe*)
        state=$(head -1 states); sed -i 1d states
        [ "$state" = NONE ] && exit 1
        echo "$state" ;;
    *vit_jax.main*) head -1 endings; sed -i 1d endings ;;
    *report.html*) [ ! -s endings ] ;;
esac
"""


def tpu_vm(tmp_path, states, endings):
    path = put(tmp_path / "bin", gcloud=GCLOUD)
    (tmp_path / "bin" / "states").write_text("\n".join(states) + "\n")
    (tmp_path / "bin" / "endings").write_text("".join(line + "\n" for line in endings))
    result = bash(
        "tpu_vm.sh",
        SMOKE,
        "--workdir=/shared/run of mine",
        PATH=path,
        NAME="vit",
        ZONE="us-west4-a",
        TYPE="v5litepod-64",
        RUNTIME="v2-alpha-tpuv5-lite",
        SPOT="1",
        POLL_SECONDS="0",
    )
    return result, (tmp_path / "bin" / "calls").read_text().splitlines()


@pytest.mark.slow
def test_preempted_slice_is_requested_again_until_the_run_is_finished(tmp_path):
    states = ["NONE", "WAITING_FOR_RESOURCES", "ACTIVE", "SUSPENDED", "NONE", "ACTIVE"]
    result, calls = tpu_vm(tmp_path, states, ["vit_jax-exit=1", "vit_jax-exit=0"])
    assert result.returncode == 0, result.stdout + result.stderr
    assert "finished" in result.stdout
    words = ("create", "delete", "scp", "pip install", "vit_jax.main", "report.html")
    done = [
        next(word for word in words if word in call) for call in calls if "describe" not in call
    ]
    again = ["create", "scp", "pip install", "vit_jax.main"]
    assert done == [*again, "delete", *again, "report.html"]
    training = next(call for call in calls if "vit_jax.main" in call)
    assert "--worker=all" in training
    assert rf"--coordinator=auto {SMOKE} --workdir=/shared/run\ of\ mine" in training
    assert all("--zone=us-west4-a" in call for call in calls)
    assert "--spot" in next(call for call in calls if "create" in call)


def test_mistake_on_a_slice_is_not_repeated(tmp_path):
    result, calls = tpu_vm(tmp_path, ["ACTIVE"], ["vit_jax-exit=2"])
    assert result.returncode == 2
    assert "report.html" not in calls[-1]


def test_gke_manifest_is_a_job_set_of_valid_jobs():
    import kubernetes_validate

    manifest = yaml.safe_load((LAUNCH / "gke.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert manifest["spec"].keys() == {"failurePolicy", "replicatedJobs"}
    (replicated,) = manifest["spec"]["replicatedJobs"]
    assert replicated.keys() == {"name", "replicas", "template"}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "slice"},
        **replicated["template"],
    }
    kubernetes_validate.validate(job, "1.34", strict=True)


def test_gke_manifest_has_a_pod_for_each_host_of_its_topology():
    manifest = yaml.safe_load((LAUNCH / "gke.yaml").read_text())
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    rows, columns = map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
    assert job["parallelism"] * container["resources"]["limits"]["google.com/tpu"] == rows * columns
    assert job["completions"] == job["parallelism"]
    assert job["completionMode"] == "Indexed"


def test_gke_command_runs_the_training_and_distinguishes_saved_from_finished(tmp_path):
    manifest = yaml.safe_load((LAUNCH / "gke.yaml").read_text())
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]

    def ended(code):
        path = put(tmp_path / "bin", python=f"#!/bin/bash\nexit {code}\n")
        command = [*container["command"], *container["args"]]
        return subprocess.run(command, env=os.environ | {"PATH": path}).returncode

    assert [ended(code) for code in (0, 1, 2)] == [75, 1, 2]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [2]

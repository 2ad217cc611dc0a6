#!/bin/bash
# Trains on SLURM, one process a node:  sbatch --nodes=4 experiments/launch/slurm.sh --config=... --workdir=...
# Submit it from the repository's folder, in an environment where vit_jax is installed; see README.md.
#SBATCH --job-name=vit_jax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# Two minutes before the time is up every process gets SIGTERM, saves and leaves.
#SBATCH --signal=TERM@120
set -uo pipefail

MAX_RESTARTS=${MAX_RESTARTS:-20}

for argument in "$@"; do
    case $argument in --workdir=*) workdir=${argument#--workdir=} ;; esac
done
: "${workdir:?give --workdir=DIR, a folder that all nodes share, or s3://BUCKET/RUN}"

# Is there a file or an object of that name?
exists() {
    python -c 'import sys, fsspec
files, path = fsspec.url_to_fs(sys.argv[1])
sys.exit(not files.exists(path))' "$1"
}

# JAX gives a SLURM task one GPU; ours takes all of its node.
if [ -n "${SLURM_GPUS_ON_NODE:-}" ]; then
    JAX_LOCAL_DEVICE_IDS=$(seq -s, 0 $((SLURM_GPUS_ON_NODE - 1)))
    export JAX_LOCAL_DEVICE_IDS
fi

# srun does not take this over from sbatch by itself.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi

# A process that fails ends all others itself; srun only sees to it that none stays.
srun --kill-on-bad-exit=0 --wait=60 python -m vit_jax.main --coordinator=auto "$@"
code=$?

if [ $code -eq 2 ]; then
    exit 2  # A mistake in the command: the same command would make it again.
elif [ $code -eq 0 ] && exists "$workdir/report.html"; then
    exit 0
elif [ "${SLURM_RESTART_COUNT:-0}" -ge "$MAX_RESTARTS" ]; then
    echo "giving up after $MAX_RESTARTS restarts" >&2
    exit 1
fi
echo "not finished (srun's exit code is $code): requeueing, to go on from the newest checkpoint"
scontrol requeue "$SLURM_JOB_ID"

#!/bin/bash
# Trains on a Cloud TPU slice, and goes on after preemptions until the run is finished:
#   NAME=vit ZONE=us-west4-a TYPE=v5litepod-64 RUNTIME=v2-alpha-tpuv5-lite SPOT=1 \
#     experiments/launch/tpu_vm.sh --config=configs/vit_l16_i21k.py --workdir=/mnt/shared/run
# Start it from the repository's folder, on any machine with gcloud; see README.md.
set -euo pipefail

: "${NAME:?}" "${ZONE:?}" "${TYPE:?}" "${RUNTIME:?}"
SETUP=${SETUP:-true}  # Run on each host before training: mounts the shared folder, for example.
POLL_SECONDS=${POLL_SECONDS:-30}
MAX_RESTARTS=${MAX_RESTARTS:-100}

for argument in "$@"; do
    case $argument in --workdir=*) workdir=${argument#--workdir=} ;; esac
done
: "${workdir:?give --workdir=DIR, a folder that all hosts share}"

tpu() { gcloud compute tpus tpu-vm "$@" --zone="$ZONE"; }
queue() { gcloud compute tpus queued-resources "$@" --zone="$ZONE"; }

have_slice() {
    local state spot=()
    if [ -n "${SPOT:-}" ]; then spot=(--spot); fi
    while true; do
        state=$(queue describe "$NAME" --format='value(state.state)' 2>/dev/null) || state=NONE
        echo "$(date '+%F %T') $NAME: $state"
        case $state in
            ACTIVE) return ;;
            NONE)
                queue create "$NAME" --node-id="$NAME" --accelerator-type="$TYPE" \
                    --runtime-version="$RUNTIME" "${spot[@]}"
                ;;
            FAILED | SUSPENDED) queue delete "$NAME" --force --quiet ;;
        esac
        sleep "$POLL_SECONDS"
    done
}

# The slices' own Python may be older than 3.11.
install() {
    tpu scp --recurse --worker=all . "$NAME:vit_jax" &&
        tpu ssh "$NAME" --worker=all --command="cd vit_jax && python3 -m pip install -q uv &&
            python3 -m uv venv -q --allow-existing --python=3.12 &&
            python3 -m uv pip install -q -e '.[tpu]' && $SETUP"
}

# One line a host says how its process ended, since gcloud's exit code does not.
train() {
    tpu ssh "$NAME" --worker=all \
        --command="cd vit_jax && .venv/bin/python -m vit_jax.main --coordinator=auto $*; echo vit_jax-exit=\$?"
}

for ((attempt = 0; attempt <= MAX_RESTARTS; attempt++)); do
    have_slice
    install || continue  # It may be gone again.
    log=$(mktemp)
    train "$(printf '%q ' "$@")" 2>&1 | tee "$log" || true
    ended=$(grep -o 'vit_jax-exit=[0-9]*' "$log" | sort -u || true)
    rm "$log"
    if grep -q '=2$' <<<"$ended"; then
        echo "a mistake in the command (above): not started again; $NAME is kept" >&2
        exit 2
    fi
    if [ "$ended" = vit_jax-exit=0 ] &&
        tpu ssh "$NAME" --worker=0 --command="test -e $(printf '%q' "$workdir/report.html")"; then
        echo "finished; give the slice back: gcloud compute tpus queued-resources delete $NAME --zone=$ZONE --force"
        exit 0
    fi
    echo "not finished: starting again from the newest checkpoint"
done
echo "giving up after $MAX_RESTARTS restarts" >&2
exit 1

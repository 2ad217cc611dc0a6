#!/bin/bash
# Trains on a Cloud TPU slice, and goes on after preemptions until the run is finished:
#   NAME=vit ZONE=us-west4-a TYPE=v5litepod-64 RUNTIME=v2-alpha-tpuv5-lite SPOT=1 \
#     experiments/launch/tpu_vm.sh --config=configs/vit_l16_i21k.py --workdir=gs://BUCKET/run
# Start it from the repository's folder, on any machine with gcloud; see README.md. The commit that is
# checked out goes to the hosts, without changes that are not committed.
set -euo pipefail

: "${NAME:?}" "${ZONE:?}" "${TYPE:?}" "${RUNTIME:?}"
SETUP=${SETUP:-true}  # Run on each host before training: mounts the data, for example.
POLL_SECONDS=${POLL_SECONDS:-30}
MAX_RESTARTS=${MAX_RESTARTS:-100}

for argument in "$@"; do
    case $argument in --workdir=*) workdir=${argument#--workdir=} ;; esac
done
: "${workdir:?give --workdir=gs://BUCKET/RUN, or a folder that all hosts share}"
if ! git diff --quiet HEAD --; then echo "note: changes that are not committed stay here" >&2; fi

# Is there a file or an object of that name?
FINISHED="cd vit_jax && .venv/bin/python -c 'import sys, fsspec
files, path = fsspec.url_to_fs(sys.argv[1])
sys.exit(not files.exists(path))'"

tpu() { gcloud compute tpus tpu-vm "$@" --zone="$ZONE"; }
queue() { gcloud compute tpus queued-resources "$@" --zone="$ZONE"; }

have_slice() {
    local state options=()
    if [ -n "${SPOT:-}" ]; then options+=(--spot); fi
    if [ -n "${SERVICE_ACCOUNT:-}" ]; then options+=(--service-account="$SERVICE_ACCOUNT"); fi
    while true; do
        state=$(queue describe "$NAME" --format='value(state.state)' 2>/dev/null) || state=NONE
        echo "$(date '+%F %T') $NAME: $state"
        case $state in
            ACTIVE) return ;;
            NONE)
                queue create "$NAME" --node-id="$NAME" --accelerator-type="$TYPE" \
                    --runtime-version="$RUNTIME" "${options[@]}"
                ;;
            FAILED | SUSPENDED) queue delete "$NAME" --force --quiet ;;
        esac
        sleep "$POLL_SECONDS"
    done
}

# One commit as one file; a shallow clone, so that the run's manifest can say which. The slices' own Python
# may be older than 3.11.
install() {
    local folder
    folder=$(mktemp -d)
    git clone --quiet --depth=1 "file://$PWD" "$folder/vit_jax" &&
        tar -C "$folder" -czf "$folder/vit_jax.tgz" vit_jax &&
        tpu scp --worker=all "$folder/vit_jax.tgz" "$NAME:vit_jax.tgz" &&
        tpu ssh "$NAME" --worker=all --command="tar -xzf vit_jax.tgz && cd vit_jax &&
            python3 -m pip install -q uv && python3 -m uv venv -q --allow-existing --python=3.12 &&
            python3 -m uv pip install -q -e '.[tpu,cloud]' && $SETUP"
    local code=$?
    rm -rf "$folder"
    return $code
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
        tpu ssh "$NAME" --worker=0 --command="$FINISHED $(printf '%q' "$workdir/report.html")"; then
        echo "finished; give the slice back: gcloud compute tpus queued-resources delete $NAME --zone=$ZONE --force"
        exit 0
    fi
    echo "not finished: starting again from the newest checkpoint"
done
echo "giving up after $MAX_RESTARTS restarts" >&2
exit 1

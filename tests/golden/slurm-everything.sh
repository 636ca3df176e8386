#!/bin/bash
#SBATCH --job-name=bsearch-small
#SBATCH --chdir=/home/me/study
#SBATCH --output=/home/me/study/results/small/slurm-%A_%a.log
#SBATCH --open-mode=append
#SBATCH --export=HTTPS_PROXY,WANDB_API_KEY
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --signal=B:USR1@120
#SBATCH --partition=gpu,long --account vision
#SBATCH -C 'a100&ib' # our features
#SBATCH --exclude=node[07-09]
#SBATCH --exclusive
#SBATCH --mem=256G
#SBATCH --array=1-4%1
#SBATCH --requeue

module load cuda/12.4; source ~/venv/bin/activate # kept as it is, for $USER
requeues=5
export RAY_USAGE_STATS_ENABLED=0 RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0 # by then the study has stopped
set -u
stopping=0 child= again= token= scratch= cluster=
# Slurm sends USR1 to this script only, 120 s before the time limit, and TERM to the study as well.
trap 'stopping=$((stopping + 1)); again=1; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null' USR1
trap 'stopping=$((stopping + 1))' TERM INT

# Runs a command so that signals reach it, and returns its exit code: bash's wait returns early on a signal.
step() {
  [ "$stopping" = 0 ] || return 130
  local woken=$stopping code next
  "$@" &
  child=$!
  [ "$woken" = "$stopping" ] || kill -TERM "$child" # a signal that arrived just before this line
  wait "$child"; code=$?
  while [ "$woken" != "$stopping" ]; do
    woken=$stopping
    wait "$child"; next=$?
    [ "$next" = 127 ] || code=$next # 127: it had already exited and been waited for
  done
  child=
  return "$code"
}

nodes=$SLURM_JOB_NUM_NODES
on_every_node=(srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --overlap --export=ALL --kill-on-bad-exit=0)

finish() {
  trap - EXIT
  if [ -n "$cluster" ]; then
    kill -TERM "$cluster" 2>/dev/null
    timeout 30 tail --pid="$cluster" -f /dev/null || kill -KILL "$cluster" 2>/dev/null
  fi
  [ -z "$scratch" ] || "${on_every_node[@]}" rm -rf -- "$scratch" </dev/null
  [ -z "$token" ] || rm -f -- "$token"
}
trap finish EXIT

# This job's own Ray: a separate port and folder, and a token that only this user can read.
address=$(hostname -I | cut -d ' ' -f 1)
port=$((20000 + SLURM_JOB_ID % 1200 * 10))
scratch=$(mktemp -d /tmp/bsearch-XXXXXX) || exit 1
token=$(mktemp /home/me/study/results/small/.ray-token-XXXXXX) || exit 1 # mode 600
head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >"$token"
unset RAY_AUTH_TOKEN RAY_ADDRESS
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$token"

# This script runs on the first node.
"${on_every_node[@]}" --cpus-per-task=32 --gpus-per-node=4 bash -c '
  same="--num-cpus=32 --num-gpus=4 --min-worker-port=0 --max-worker-port=0"
  same="$same --dashboard-agent-listen-port=$(($2 + 2 + SLURM_NODEID % 8))"
  if [ "$SLURM_NODEID" = 0 ]; then
    exec ray start --block --head --node-ip-address="$1" --port="$2" --temp-dir="$3" --include-dashboard=false \
      --ray-client-server-port=$(($2 + 1)) $same
  fi
  until (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null; do sleep 1; done
  exec ray start --block --address="$1:$2" $same
' ray "$address" "$port" "$scratch" </dev/null >>/home/me/study/results/small/"ray-$SLURM_JOB_ID.log" 2>&1 &
cluster=$!

export RAY_ADDRESS="$address:$port"
step python -m bsearch.cluster.submit.joined "$nodes" 300 && step bsearch run study.yaml
code=$?

if [ -n "$again" ] && [[ $code = 130 || $code = 143 ]] && [ "${SLURM_RESTART_COUNT:-0}" -lt "${requeues:-20}" ]; then
  finish
  echo "bsearch: time limit reached before the study finished: requeued"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"

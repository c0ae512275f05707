#!/bin/bash
# An array job of slurm-ppo, made from slurm/templates/array.sh. Values are quoted for the shell and hold no line
# breaks, so that none can begin a line of its own; the lines of scheduler.setup are taken as they are.

#SBATCH --open-mode=append
#SBATCH --account=nlp
#SBATCH --cpus-per-task=4
#SBATCH --gpus-per-node=1
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --partition=a100
#SBATCH --requeue
#SBATCH --signal=B:USR2@120
#SBATCH --time=2:00:00
#SBATCH --job-name=slurm-ppo.r1.rollout.iter1.0123456789ab.1.0
#SBATCH --array=0-1
#SBATCH --chdir=/home/u
#SBATCH --output=/runs/r1/logs/slurm.log

# Setup and environment, from the configuration. Where a job begins with no environment (--export=NONE, or a site's
# own rule), its steps would begin without what is set here.
unset SLURM_EXPORT_ENV
SLURM_PPO_BEFORE=$(env -0 | gzip -c | base64 -w 0); [ ${#SLURM_PPO_BEFORE} -gt 100000 ] || export SLURM_PPO_BEFORE
trap '' USR1
export SLURM_PPO_STARTED=$(date +%s)
mkdir /runs/r1/logs/00001-rollout /runs/r1/logs/00001-rollout/worker-1 2>/dev/null || :; log=/runs/r1/logs/00001-rollout/worker-1/shard-"$(printf %05d $((${SLURM_ARRAY_TASK_ID-0} + 0)))".log
if { : >>"$log"; } 2>/dev/null; then exec >>"$log" 2>&1; fi
# The task runs in a container, where Slurm's commands may be missing. This loop, outside of it, reads lines from a
# FIFO until the task has ended: "pass" makes a pass, "ring 4711_0 4711_3" wakes the workers of these elements.
attend() {
  local log=$1 line='' ids='' passing='' status=0 IFS=$' \t\n'
  shift
  while kill -0 "$$" 2>/dev/null; do
    status=0
    IFS= read -r -t 2 -n 2048 line <&9 || status=$?
    if [ "$status" -ne 0 ]; then
      line=''
      [ "$status" -gt 128 ] || sleep 2 # no time-out, and no line either: in no hurry then
    fi
    case $line in
      '') ;;
      pass)
        if [ -z "$passing" ] || ! kill -0 "$passing" 2>/dev/null; then
          { : >>"$log"; } 2>/dev/null || log=/dev/null
          CUDA_VISIBLE_DEVICES='' timeout 1800 "$@" </dev/null >>"$log" 2>&1 9>&- &
          passing=$!
        fi
        ;;
      'ring '[0-9]*)
        ids=${line#ring }
        if [ "${#line}" -ge 2048 ] || [ -n "${ids//[0-9_ ]/}" ]; then
          echo 'refused a request that is none'
        else
          # scancel tries again after 5 s where others of the array wait in the queue, although it was sent.
          timeout 4 scancel --batch --signal=USR1 $ids </dev/null >/dev/null 2>&1 9>&- &
        fi
        ;;
      end) break ;;
      *) echo 'refused a request that is none' ;;
    esac
  done
}
if requests=$(mktemp -d "${TMPDIR:-/tmp}/slurm-ppo.XXXXXX") && mkfifo -m 600 "$requests/fifo"; then
export SLURM_PPO_REQUESTS="$requests/fifo"
( unset SLURM_PPO_REQUESTS
mkdir -p /runs/r1/logs/passes || :
attend /runs/r1/logs/passes/passes.log /scratch/venv/bin/python -P -m pipeline advance /runs/r1 --asked
rm -rf "$requests"
) 9<>"$requests/fifo" </dev/null &
fi

# For submitit.JobEnvironment, in code of yours.
export SUBMITIT_EXECUTOR=slurm
# Slurm sends the warning before the time limit to this process alone, so the command takes its place.
exec srun --kill-on-bad-exit=1 --wait=0 --nodes=1 --ntasks-per-node=1 --cpus-per-task=4 --container-image=/images/ppo.sqsh --no-container-mount-home --container-mounts=/scratch:/scratch,/models:/models,/data:/data,/tmp:/tmp /usr/local/bin/python -P -m slurm.element /runs/r1/slurm/00001/rollout-1-0.json


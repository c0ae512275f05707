#!/bin/bash
# An array job of slurm-ppo, made from slurm/templates/array.sh. Values are quoted for the shell and hold no line
# breaks, so that none can begin a line of its own; the lines of scheduler.setup are taken as they are.

#SBATCH --open-mode=append
#SBATCH --account=nlp
#SBATCH --begin=now+1800
#SBATCH --cpus-per-task=1
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --partition=cpu
#SBATCH --requeue
#SBATCH --signal=B:USR2@120
#SBATCH --time=0:15:00
#SBATCH --job-name=slurm-ppo.r1.guard.iter0.0123456789ab.2.0
#SBATCH --array=0
#SBATCH --chdir=/home/u
#SBATCH --output=/dev/null

# Setup and environment, from the configuration. Where a job begins with no environment (--export=NONE, or a site's
# own rule), its steps would begin without what is set here.
unset SLURM_EXPORT_ENV
log=/runs/r1/logs/slurm.log
if { : >>"$log"; } 2>/dev/null; then exec >>"$log" 2>&1; fi
mkdir /runs/r1/logs /runs/r1/logs/guard 2>/dev/null || :; log=/runs/r1/logs/guard/guard.log
if { : >>"$log"; } 2>/dev/null; then exec >>"$log" 2>&1; fi
# A line of setup that fails is named, and ends a task's job; with || true after it, it may fail.
slurm_ppo_setup=('source /scratch/miniforge3/etc/profile.d/conda.sh' 'conda activate ppo')
slurm_ppo_depth=${#BASH_SOURCE[@]}
slurm_ppo_first=$((LINENO + 7))
slurm_ppo_setup_failed() {
  # In a file that a line reads, and in a function that it calls, only what the line itself ends with counts.
  [ "${#BASH_SOURCE[@]}" -eq $((slurm_ppo_depth + 1)) ] || return 0
  echo "slurm-ppo: line $(($2 - slurm_ppo_first + 1)) of setup failed on node ${SLURMD_NODENAME:-${HOSTNAME-}} (exit code $1): ${slurm_ppo_setup[$2 - slurm_ppo_first]-}"
}
trap 'slurm_ppo_setup_failed "$?" "$LINENO"' ERR
source /scratch/miniforge3/etc/profile.d/conda.sh
conda activate ppo
trap - ERR

# For submitit.JobEnvironment, in code of yours.
export SUBMITIT_EXECUTOR=slurm
# Slurm sends the warning before the time limit to this process alone, so the command takes its place.
exec python -P -m slurm.element /runs/r1/slurm/00000/guard-2-0.json

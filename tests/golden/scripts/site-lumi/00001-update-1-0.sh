#!/bin/bash
# An array job of slurm-ppo, made from slurm/templates/array.sh. Values are quoted for the shell and hold no line
# breaks, so that none can begin a line of its own; the lines of scheduler.setup are taken as they are.

#SBATCH --open-mode=append
#SBATCH --account=project_462000000
#SBATCH --cpus-per-task=7
#SBATCH --gpus-per-node=8
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --partition=standard-g
#SBATCH --requeue
#SBATCH --signal=B:USR2@120
#SBATCH --time=1-00:00:00
#SBATCH --job-name=slurm-ppo.r1.update.iter1.0123456789ab.1.0
#SBATCH --array=0
#SBATCH --chdir=/home/u
#SBATCH --output=/scratch/r1/logs/slurm.log

# Setup and environment, from the configuration. Where a job begins with no environment (--export=NONE, or a site's
# own rule), its steps would begin without what is set here.
unset SLURM_EXPORT_ENV
SLURM_PPO_BEFORE=$(env -0 | gzip -c | base64 -w 0); [ ${#SLURM_PPO_BEFORE} -gt 100000 ] || export SLURM_PPO_BEFORE
trap '' USR1
export SLURM_PPO_STARTED=$(date +%s)
mkdir /scratch/r1/logs/00001-update /scratch/r1/logs/00001-update/worker-1 2>/dev/null || :; log=/scratch/r1/logs/00001-update/worker-1/shard-"$(printf %05d $((${SLURM_ARRAY_TASK_ID-0} + 0)))".log
if { : >>"$log"; } 2>/dev/null; then exec >>"$log" 2>&1; fi
# A line of setup that fails is named, and ends a task's job; with || true after it, it may fail.
slurm_ppo_setup=('module load LUMI/24.03 partition/G')
slurm_ppo_depth=${#BASH_SOURCE[@]}
slurm_ppo_first=$((LINENO + 7))
slurm_ppo_setup_failed() {
  # In a file that a line reads, and in a function that it calls, only what the line itself ends with counts.
  [ "${#BASH_SOURCE[@]}" -eq $((slurm_ppo_depth + 1)) ] || return 0
  echo "slurm-ppo: line $(($2 - slurm_ppo_first + 1)) of setup failed on node ${SLURMD_NODENAME:-${HOSTNAME-}} (exit code $1): ${slurm_ppo_setup[$2 - slurm_ppo_first]-}"; exit 78
}
trap 'slurm_ppo_setup_failed "$?" "$LINENO"' ERR
module load LUMI/24.03 partition/G
trap - ERR

# For submitit.JobEnvironment, in code of yours.
export SUBMITIT_EXECUTOR=slurm
# Slurm sends the warning before the time limit to this process alone, so the command takes its place.
exec srun --kill-on-bad-exit=1 --wait=0 --nodes=1 --ntasks-per-node=8 --cpus-per-task=7 /env/bin/python -P -m slurm.element /scratch/r1/slurm/00001/update-1-0.json --rank


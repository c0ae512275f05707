#!/bin/bash
# An array job of slurm-ppo, made from slurm/templates/array.sh. Values are quoted for the shell and hold no line
# breaks, so that none can begin a line of its own; the lines of scheduler.setup are taken as they are.

#SBATCH --open-mode=append
#SBATCH --cpus-per-task=1
#SBATCH --dependency='afterany:JOB-0-prepare?afterany:JOB-0-evaluate?afterany:JOB-1-rollout?afterany:JOB-1-reward?afterany:JOB-1-update'
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --signal=B:USR2@120
#SBATCH --time=0:15:00
#SBATCH --job-name=slurm-ppo.r1.driver.iter0.0123456789ab.1.0
#SBATCH --array=0
#SBATCH --chdir=/home/u
#SBATCH --output=/dev/null

# Setup and environment, from the configuration. Where a job begins with no environment (--export=NONE, or a site's
# own rule), its steps would begin without what is set here.
unset SLURM_EXPORT_ENV
log='/runs/it'"'"'s 100% "é" $HOME `touch x` $(touch x) #!/logs/slurm.log'
if { : >>"$log"; } 2>/dev/null; then exec >>"$log" 2>&1; fi
mkdir '/runs/it'"'"'s 100% "é" $HOME `touch x` $(touch x) #!/logs/00000-driver' '/runs/it'"'"'s 100% "é" $HOME `touch x` $(touch x) #!/logs/00000-driver/attempt-1' 2>/dev/null || :; log='/runs/it'"'"'s 100% "é" $HOME `touch x` $(touch x) #!/logs/00000-driver/attempt-1'/driver.log
if { : >>"$log"; } 2>/dev/null; then exec >>"$log" 2>&1; fi
# A line of setup that fails is named, and ends a task's job; with || true after it, it may fail.
slurm_ppo_setup=('module load slurm # ours')
slurm_ppo_depth=${#BASH_SOURCE[@]}
slurm_ppo_first=$((LINENO + 7))
slurm_ppo_setup_failed() {
  # In a file that a line reads, and in a function that it calls, only what the line itself ends with counts.
  [ "${#BASH_SOURCE[@]}" -eq $((slurm_ppo_depth + 1)) ] || return 0
  echo "slurm-ppo: line $(($2 - slurm_ppo_first + 1)) of setup failed on node ${SLURMD_NODENAME:-${HOSTNAME-}} (exit code $1): ${slurm_ppo_setup[$2 - slurm_ppo_first]-}"
}
trap 'slurm_ppo_setup_failed "$?" "$LINENO"' ERR
module load slurm # ours
trap - ERR
export NASTY='it'"'"'s 100% "é" $HOME `touch x` $(touch x) #!'

# For submitit.JobEnvironment, in code of yours.
export SUBMITIT_EXECUTOR=slurm
# Slurm sends the warning before the time limit to this process alone, so the command takes its place.
exec /env/bin/python -P -m slurm.element '/runs/it'"'"'s 100% "é" $HOME `touch x` $(touch x) #!/slurm/00000/driver-1-0.json'


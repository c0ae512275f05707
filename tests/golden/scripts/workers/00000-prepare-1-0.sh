#!/bin/bash
# An array job of slurm-ppo, made from slurm/templates/array.sh. Values are quoted for the shell and hold no line
# breaks, so that none can begin a line of its own; the lines of scheduler.setup are taken as they are.

#SBATCH --open-mode=append
#SBATCH --cpus-per-task=1
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --signal=B:USR2@120
#SBATCH --time=4:00:00
#SBATCH --job-name=slurm-ppo.r1.prepare.iter0.0123456789ab.1.0
#SBATCH --array=0
#SBATCH --chdir=/home/u
#SBATCH --output='/runs/it'"'"'s 100%% "é" $HOME `touch x` $(touch x) #!/logs/slurm.log'

# Setup and environment, from the configuration. Where a job begins with no environment (--export=NONE, or a site's
# own rule), its steps would begin without what is set here.
unset SLURM_EXPORT_ENV
SLURM_PPO_BEFORE=$(env -0 | gzip -c | base64 -w 0); [ ${#SLURM_PPO_BEFORE} -gt 100000 ] || export SLURM_PPO_BEFORE
trap '' USR1
export SLURM_PPO_STARTED=$(date +%s)
mkdir '/runs/it'"'"'s 100% "é" $HOME `touch x` $(touch x) #!/logs/00000-prepare' '/runs/it'"'"'s 100% "é" $HOME `touch x` $(touch x) #!/logs/00000-prepare/worker-1' 2>/dev/null || :; log='/runs/it'"'"'s 100% "é" $HOME `touch x` $(touch x) #!/logs/00000-prepare/worker-1'/prompts.log
if { : >>"$log"; } 2>/dev/null; then exec >>"$log" 2>&1; fi

# For submitit.JobEnvironment, in code of yours.
export SUBMITIT_EXECUTOR=slurm
# Slurm sends the warning before the time limit to this process alone, so the command takes its place.
exec /env/bin/python -P -m slurm.element '/runs/it'"'"'s 100% "é" $HOME `touch x` $(touch x) #!/slurm/00000/prepare-1-0.json'


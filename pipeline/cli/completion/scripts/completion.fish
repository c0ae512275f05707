# Completion of slurm-ppo in fish; written by `slurm-ppo completion install fish`.
function __slurm_ppo
    set -l before (commandline -opc)
    set -l current (commandline -ct)
    $before[1] complete plain $before[2..-1] "$current" 2>/dev/null
end
complete -c slurm-ppo -f -k -a '(__slurm_ppo)'

# Completion of slurm-ppo in bash; written by `slurm-ppo completion install bash`.
_slurm_ppo() {
    mapfile -t COMPREPLY < <("$1" complete bash "$1" "$COMP_WORDBREAKS" "${COMP_LINE:0:COMP_POINT}" 2>/dev/null)
    # What a key, a folder or a run's name goes on from gets no space.
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=./@] ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -o nosort -F _slurm_ppo slurm-ppo 2>/dev/null || complete -F _slurm_ppo slurm-ppo

#compdef slurm-ppo
# Completion of slurm-ppo in zsh; written by `slurm-ppo completion install zsh`.
_slurm_ppo() {
    local -a found whole begun quoted=(-Q)
    local form=zsh
    # In quotes zsh itself quotes what is put in.
    [[ -n $compstate[quote] ]] && quoted=() form=plain
    found=("${(@f)$("${words[1]}" complete $form "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)}")
    found=("${(@)found:#}")
    # What a key, a folder or a run's name goes on from gets no space.
    whole=("${(@)found:#*[=./@]}")
    begun=("${(@M)found:#*[=./@]}")
    (( $#whole )) && compadd $quoted -V slurm-ppo -- "${whole[@]}"
    (( $#begun )) && compadd $quoted -V slurm-ppo -S '' -- "${begun[@]}"
}
if ! (( $+functions[compdef] )); then
    autoload -Uz compinit && compinit
fi
compdef _slurm_ppo slurm-ppo

#!/bin/sh
# The cluster tests bring up a real Slurm, with a network filesystem and a container program. Install all of it where
# we may; else those tests say that they skip.
packages="slurmctld slurmd slurm-client munge slurmdbd mariadb-server glusterfs-client charliecloud-runtime"
PATH="$PATH:/usr/sbin:/sbin"
policy=/usr/sbin/policy-rc.d

complete() {
    for program in slurmctld slurmd sbatch munged slurmdbd mariadbd mariadb-install-db glusterfs glusterfsd ch-run; do
        command -v "$program" >/dev/null || return 1
    done
}

# Tests start what they need themselves: no service may start because it is being installed.
forbid_services() {
    test -e "$policy" && mv "$policy" "$policy.slurm-ppo"
    printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy"
}

allow_services() {
    rm -f "$policy"
    test -e "$policy.slurm-ppo" && mv "$policy.slurm-ppo" "$policy"
    true
}

complete && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing Slurm, GlusterFS and Charliecloud for the cluster tests"
    trap allow_services EXIT
    trap 'exit 1' INT TERM
    forbid_services
    apt-get update -qq
    # shellcheck disable=SC2086  # a list of words
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >/dev/null
    complete && exit 0
fi
echo "no Slurm, no GlusterFS or no Charliecloud: cluster tests will be skipped; to run them: sudo apt install --no-install-recommends $packages"

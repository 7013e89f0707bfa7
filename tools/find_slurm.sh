#!/usr/bin/env bash
# find_slurm.sh: sees to it that Slurm is installed (as root, by apt).
# Where that is not possible: exit status 1, and the reason in half a sentence.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin

have() {
  local tool
  for tool in munged slurmctld slurmd sbatch; do command -v "$tool" >/dev/null || return 1; done
}
sorry() {
  echo "slurm-wlm and munge are not installed, and $1"
  exit 1
}
have && exit
[[ $(id -u) == 0 ]] || sorry "only root may install them"
command -v apt-get >/dev/null || sorry "this system has no apt-get"
echo "installing slurm-wlm and munge ..." >&2
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
install=(timeout 600 apt-get install -y -q --no-install-recommends slurm-wlm munge)
# the lists of packages may be old, or not there at all
"${install[@]}" >"$log" 2>&1 || { timeout 300 apt-get update -q && "${install[@]}"; } >"$log" 2>&1 ||
  sorry "apt-get cannot install them: $(grep -m1 '^E:' "$log" || tail -n1 "$log")"
have || sorry "apt-get did not bring all of their programs"

#!/usr/bin/env bash
# What `make test-slurm` does: get Slurm where that is possible, start one of its own, run tests/slurm on it, stop it.
#   test_slurm.sh PYTHON [arguments for pytest]
# Where Slurm cannot be installed it says so in one line and is content: that is no fault of the course.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/sbin:/sbin
python=$1
shift

have() {
  local tool
  for tool in munged slurmctld slurmd sbatch; do command -v "$tool" >/dev/null || return 1; done
}

without() {
  echo "Slurm tests not run: slurm-wlm and munge are not installed, and $1."
  exit 0
}

if ! have; then
  [[ $(id -u) == 0 ]] || without "only root may install them"
  command -v apt-get >/dev/null || without "this system has no apt-get"
  echo "installing slurm-wlm and munge ..."
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  export DEBIAN_FRONTEND=noninteractive
  install=(timeout 600 apt-get install -y -q --no-install-recommends slurm-wlm munge)
  # the lists of packages may be old, or not there at all
  "${install[@]}" >"$log" 2>&1 || { timeout 300 apt-get update -q && "${install[@]}"; } >"$log" 2>&1 ||
    without "apt-get cannot install them: $(grep -m1 '^E:' "$log" || tail -n1 "$log")"
  have || without "apt-get did not bring all of their programs"
fi

# a folder of its own: several runs, or users, on one machine do not meet
SLURM_TEST_DIR=$(mktemp -d "${TMPDIR:-/tmp}/dlojz-slurm-XXXXXX")
export SLURM_TEST_DIR
trap 'tools/slurm_local.sh stop; rm -rf "$SLURM_TEST_DIR" ${log:+"$log"}' EXIT
trap 'exit 130' INT TERM
settings=$(tools/slurm_local.sh start)
eval "$settings"
DLOJZ_TEST_SLURM=1 timeout 900 "$python" -m pytest tests/slurm -m slurm "$@"

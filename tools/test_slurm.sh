#!/usr/bin/env bash
# What `make test-slurm` does: get Slurm where that is possible, start one of its own, run tests/slurm on it, stop it.
#   test_slurm.sh PYTHON [arguments for pytest]
# Where Slurm cannot be installed it says so in one line and is content: that is no fault of the course.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/sbin:/sbin
python=$1
shift

why=$(tools/find_slurm.sh) || { echo "Slurm tests not run: $why."; exit 0; }

# a folder of its own: several runs, or users, on one machine do not meet
SLURM_TEST_DIR=$(mktemp -d "${TMPDIR:-/tmp}/dlojz-slurm-XXXXXX")
export SLURM_TEST_DIR
trap 'tools/slurm_local.sh stop; rm -rf "$SLURM_TEST_DIR"' EXIT
trap 'exit 130' INT TERM
settings=$(tools/slurm_local.sh start)
eval "$settings"
DLOJZ_TEST_SLURM=1 timeout 900 "$python" -m pytest tests/slurm -m slurm "$@"

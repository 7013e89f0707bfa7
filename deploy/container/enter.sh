#!/bin/sh
# What both images run: a command in the course's folder; without one, `make lab`.
set -eu
cd "$(dirname "$0")/../.."
[ $# -gt 0 ] || set -- make lab

if [ "$(id -u)" = 0 ]; then
  echo "The course isn't run as root in a container: add --user \"\$(id -u):\$(id -g)\" (see docs/containers.md)." >&2
  exit 1
fi
# Docker's home is the container's own: only what is mounted there outlives it
case "$*" in "make lab"*) opens=yes ;; *) opens= ;; esac
if [ "$opens" ] && [ "$HOME" = /home/trainee ] && ! mountpoint -q "$HOME/dlojz-tp"; then
  echo "What you write would be lost with the container: add -v \"\$HOME/dlojz-tp:$HOME/dlojz-tp\" (see docs/containers.md)." >&2
  exit 1
fi
# Apptainer passes the environment of outside: these name another Python's files
unset PYTHON VENV PYTHONPATH PYTHONHOME
exec "$@"

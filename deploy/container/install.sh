#!/bin/sh
# What both images hold: Dockerfile and course.def run this as root while the image is built, so that it needs no network later.
set -eu
cd "$(dirname "$0")/../.."

# python3-dev: torch.compile builds against Python.h
export DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1
apt-get update
apt-get install --yes --no-install-recommends ca-certificates gcc g++ make python3 python3-dev python3-venv
rm -rf /var/lib/apt/lists/*

make data .venv/.installed-dev # for `make lab`; and for `make test`
.venv/bin/python -m compileall -q dlojz_tp tests
chmod -R a+rX .

# Docker may run it under any user's number: whoever it is can keep caches here
mkdir --mode=1777 /home/trainee

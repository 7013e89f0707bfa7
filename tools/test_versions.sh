#!/usr/bin/env bash
# What `make test-versions` does: for each pair of Python and PyTorch an environment of its own, .venv-PAIR, and in it the
# unit tests that lean on PyTorch most: pretended GPUs, probes, checks, measures, models, launches.
#   test_versions.sh 3.11-2.11 3.13-2.14 ...
# A pair whose Python is not here is said in one line, and left out.
set -uo pipefail
cd "$(dirname "$0")/.."
shopt -s nullglob
tests=(tests/test_{pretend_gpu,modelled,measure,probes,models,checking}*.py tests/test_{launch,edges,precision,data}.py)

find_python() { # 3.11: the program, on the path or among those of pyenv
  local each
  for each in "python$1" ~/.pyenv/versions/"$1".*/bin/python; do
    # with pyenv, a name on the path may be a shim for a version that is switched off
    "$each" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null && echo "$each" && return
  done
  return 1
}

install() { # PYTHON FOLDER TORCH
  "$1" -m venv --clear "$2" &&
    "$2/bin/python" -m pip install --quiet --no-compile --editable '.[webdataset,dev]' "torch==$3.*" &&
    touch "$2/.installed"
}

status=0
for pair; do
  folder=.venv-$pair
  python=$(find_python "${pair%-*}") || { echo "Versions $pair not tested: Python ${pair%-*} is not here."; continue; }
  if [[ pyproject.toml -nt $folder/.installed ]] && ! install "$python" "$folder" "${pair#*-}"; then
    echo "Versions $pair not tested: pip could not install them."
    status=1
    continue
  fi
  "$folder/bin/python" -c 'import platform, torch; print("Python", platform.python_version(), "PyTorch", torch.__version__)'
  "$folder/bin/python" -m pytest -q -p no:cacheprovider -n "${WORKERS:-2}" --dist loadfile "${tests[@]}" || status=1
done
exit $status

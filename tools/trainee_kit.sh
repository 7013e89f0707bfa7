#!/usr/bin/env bash
# trainee_kit.sh ARCHIVE DATA: what trainees need, of the last commit, without solutions, tests and the instructor's notes.
# Figures recorded on GPUs stay: notebooks show them.
set -euo pipefail
archive=$(realpath -m "$1") data=$(realpath "$2")
cd "$(dirname "$0")/.."
mkdir -p "$(dirname "$archive")"
trap 'rm -f "$archive.partial"' EXIT
git archive --prefix=dlojz-tp/ -o "$archive.partial" --format=tar HEAD -- \
  LICENSE Makefile README.md environment.yml pyproject.toml data_scripts dlojz_tp notebooks solutions/recorded \
  docs ':(exclude)docs/instructor.md' ':(exclude)docs/site'
tar --append --file "$archive.partial" --transform 's,^,dlojz-tp/data/,' --owner=0 --group=0 -C "$data" \
  photo_patches code_text search_table photo_cells pretrained
mv "$archive.partial" "$archive"
echo "$1: $(du -h "$archive" | cut -f1); on the trainees' machine: tar xf ${1##*/}, then make -C dlojz-tp lab"

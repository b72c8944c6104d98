#!/usr/bin/env bash
# `make demo`: quantizes a synthetic checkpoint and a trained one, verifies both against their sources, and prints what was done.
set -euo pipefail
cd "$(dirname "$0")/.."
quern=$PWD/$1/client/quern
work=$(mktemp -d "${TMPDIR:-/tmp}/quern-demo.XXXXXX")
trap 'rm -rf "$work"' EXIT

show() { printf '\n$ quern %s\n' "$*"; "$quern" "$@"; }

show synth "$work/synthetic" --family laguna --layers 3 --experts 16 --hidden 512 --intermediate 256 --vocab 4096 --seed 1
for source in "$work/synthetic" "$PWD/tests/data/laguna-micro"; do
  out=$work/$(basename "$source")-W4A16
  show plan "$source" --scheme W4A16_ASYM --group-size 32 --targets routed_experts
  show quantize "$source" -o "$out" --scheme W4A16_ASYM --group-size 32 --targets routed_experts
  show verify "$out" --against "$source"
done

#!/usr/bin/env bash
# `make bench`: ours, the peer's and the hardware's limit side by side. QUERN_BENCH_DIR names a directory on the disk to measure (default: one
# under $TMPDIR or /tmp); it needs 30 GB free for the full width. Arguments go to disk_bench.py (see --help).
set -euo pipefail
cd "$(dirname "$0")/../.."
[[ " $* " == *" --help "* ]] && exec python3 tests/bench/disk_bench.py --help
if [[ -x build/release/tests/bench/quern_quant_bench ]]; then
  build/release/tests/bench/quern_quant_bench --benchmark_min_time=0.2
fi
if [[ -x build/release/tests/bench/load_bench ]]; then
  TMPDIR="${QUERN_BENCH_DIR:-${TMPDIR:-/tmp}}" build/release/tests/bench/load_bench --quernd build/release/daemon/quernd
fi
# Skips with a reason where there is no root or no iperf3.
python3 tests/bench/link_bench.py --bin build/release || [[ $? == 77 ]]
exec python3 tests/bench/disk_bench.py --build build/release "$@"

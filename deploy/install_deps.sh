#!/usr/bin/env bash
# Installs what building and testing Quern needs on Debian 12. Does nothing, and asks no network, when all of it is there.
# NVIDIA's CUDA Toolkit, which only the GPU backend wants, is not among Debian's packages and stays the user's choice.
set -euo pipefail

# --build-only: without the tests' tools.
packages=(
  cmake ninja-build g++ pkg-config python3 dpkg-dev file
  libgrpc++-dev protobuf-compiler-grpc libprotobuf-dev protobuf-compiler
  librocksdb-dev libabsl-dev liburing-dev libhwy-dev libre2-dev nlohmann-json3-dev
  libyaml-cpp-dev libmimalloc-dev libcli11-dev libspdlog-dev libssl-dev libxxhash-dev
  prometheus-cpp-dev
  libbenchmark-dev libgtest-dev libgmock-dev
)
if [[ ${1:-} != --build-only ]]; then
  packages+=(
    clang libclang-rt-14-dev clang-format clang-tidy
    fio python3-venv time
    iproute2 iperf3 openssl
    slurm-wlm munge systemd systemd-container groff-base
  )
fi

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f='${db:Status-Abbrev}' "$package" 2>/dev/null || true)
  [[ $status == ii* ]] || missing+=("$package")
done
if ((${#missing[@]} == 0)); then
  echo "install_deps: all ${#packages[@]} packages are installed"
  exit 0
fi

as_root=()
if ((EUID != 0)); then
  command -v sudo >/dev/null || { echo "install_deps: run as root or install sudo; missing: ${missing[*]}" >&2; exit 1; }
  as_root=(sudo)
fi
echo "install_deps: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -q
"${as_root[@]}" apt-get install -y -q --no-install-recommends "${missing[@]}"

#!/usr/bin/env bash
# Makes the Python environment of the compatibility tests and prints its directory on the last line. It is kept in the user's cache
# directory under the digest of the pins, so that it is made once (8 to 9 GB, about 2 minutes: PyPI has no CPU-only torch for x86-64).
set -euo pipefail
cd "$(dirname "$0")"
digest=$(sha256sum requirements.txt | cut -c1-16)
env=${XDG_CACHE_HOME:-$HOME/.cache}/quern/oracle-$digest
mkdir -p "$(dirname "$env")"
exec 9>"$env.lock"
flock 9
if [[ ! -e $env/.complete ]]; then
  rm -rf "$env"  # what an interrupted run left
  python3 -m venv "$env"
  # The pins are a full closure; --no-deps keeps vllm from asking for GPU packages that its configuration classes do not need.
  # uv unpacks in parallel; pip takes three times as long.
  "$env/bin/pip" install -q --disable-pip-version-check --no-cache-dir uv==0.13.9
  "$env/bin/uv" pip install -q --python "$env/bin/python" --no-cache --no-deps -r requirements.txt
  touch "$env/.complete"
fi
echo "$env"

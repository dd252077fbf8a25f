#!/bin/bash
# Every name and signature that the plugin uses, against each supported SGLang: the wheels' own code, nothing installed.
#   scripts/sglang_versions.sh VENV [VERSION ...]      VENV as made by sglang_cpu_env.sh
# Exit status 1 if a version is not as the plugin expects.
set -uo pipefail
venv=$(cd "$1" && pwd); shift; root=$(cd "$(dirname "$0")/.." && pwd); stage=$(mktemp -d); code=0
trap 'rm -rf "$stage"' EXIT
[ $# -gt 0 ] || set -- 0.5.17 0.5.18 0.5.19 0.5.20 0.5.21 0.5.22 0.5.23
for version in "$@"; do
  rm -rf "$stage/site"
  "$venv/bin/python" -m pip install --disable-pip-version-check -q --no-deps --target "$stage/site" "sglang==$version" || exit 2
  # Up to 0.5.19 SGLang wants the older transformers, which the environment keeps beside its 0.5.17.
  case $version in 0.5.17 | 0.5.18 | 0.5.19) older=$venv/sglang-0.5.17 ;; *) older= ;; esac
  PYTHONPATH=$stage/site:$root/src${older:+:$older} TRITON_INTERPRET=1 "$venv/bin/python" -W ignore -c "
from treeverify.integrations.sglang import compat, names
assert names.version() == '$version', names.version()
compat.check()
from treeverify.integrations.sglang.ddtree import compat as ddtree
ddtree.check()
print('$version: every name and signature is as expected')" 2>"$stage/error" || { tail -1 "$stage/error"; code=1; }
done
exit $code

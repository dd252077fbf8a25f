#!/bin/bash
# Real SGLang 0.5.17 servers on one GPU: the parts of sglang_live.py, or of the script that LIVE names.
#   OUT=FOLDER [LIVE=ddtree_live.py] scripts/gpu/sglang_live.sh [--parts packaged,forced] [--kinds eager,graph]
# From the repository root, with .sglang/site.tar.xz (an installed tree of SGLang) and, if they are there, FA3 for it in
# .sglang/fa3.tar.xz and, to save compiling, its caches in .sglang/cache.tar.xz (KEEP_CACHE=1 writes them to $OUT again).
# LIVE=none only unpacks and compiles. Records and logs go to $OUT.
set -u
root=$PWD; bundle=${SGLANG_BUNDLE:-$root/.sglang}; stage=$HOME/.cache/treeverify-live; out=${OUT:?a folder for the records}
start=$(date +%s); lap() { echo "$1: $(($(date +%s) - start)) s"; }
site=$stage/site; export PYTHONPATH=$site:$root/src PYTHONUNBUFFERED=1
if [ ! -f "$stage/.ready" ]; then # a second run on the same machine finds it
  mkdir -p "$site/treeverify-0.dist-info"
  [ -f "$bundle/cache.tar.xz" ] && tar -C "$HOME" -xJf "$bundle/cache.tar.xz" &
  [ -f "$bundle/fa3.tar.xz" ] && tar -C "$site" -xJf "$bundle/fa3.tar.xz" &
  tar -C "$site" -xJf "$bundle/site.tar.xz" || exit 9
  # What pip would write for the plugin to be found.
  printf 'Metadata-Version: 2.1\nName: treeverify\nVersion: 0\n' >"$site/treeverify-0.dist-info/METADATA"
  printf '[sglang.srt.plugins]\ntreeverify = treeverify.integrations.sglang.plugin:activate\n' \
    >"$site/treeverify-0.dist-info/entry_points.txt"
  lap "unpacked"
  python3 -m compileall -q -j 8 "$site/sglang" "$site/transformers" >/dev/null 2>&1 &
  wait
  touch "$stage/.ready"
fi
python3 -c 'import torch
from treeverify.ops import compiled
from treeverify.ops.tree_attention import cuda
device = torch.device("cuda", 0)
compiled.prepare(device)
cuda.prepare(device)' || exit 8
lap "kernels ready"
[ "${LIVE:-}" = none ] && exit 0
# exec would lose the caches; a signal to this script goes on to the run, which then leaves its record.
python3 "$root/scripts/gpu/${LIVE:-sglang_live.py}" --out "$out" "$@" &
run=$!
trap 'kill -TERM $run 2>/dev/null' TERM INT
wait $run; code=$?
trap - TERM INT; wait $run 2>/dev/null
[ -n "${KEEP_CACHE:-}" ] && tar -C "$HOME" -cJf "$out/cache.tar.xz" .triton/cache .cache/tvm-ffi .cache/sglang 2>/dev/null
lap "all"
exit $code

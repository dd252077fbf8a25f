#!/bin/bash
# Real SGLang 0.5.17 servers with the attention backend treeverify, on one GPU: see sglang_live.py for the parts.
#   OUT=FOLDER [LIVE=kimi_rank.py] scripts/gpu/sglang_live.sh [--parts packaged,forced] [--kinds eager,graph]
# From the repository root, with .sglang/site.tar.xz (an installed tree of SGLang) and, to save compiling, its caches
# in .sglang/cache.tar.xz (KEEP_CACHE=1 writes them to $OUT again). Records and logs go to $OUT.
set -u
root=$PWD; bundle=${SGLANG_BUNDLE:-$root/.sglang}; stage=$HOME/.cache/treeverify-live; out=${OUT:?a folder for the records}
start=$(date +%s); lap() { echo "$1: $(($(date +%s) - start)) s"; }
site=$stage/site; export PYTHONPATH=$site:$root/src PYTHONUNBUFFERED=1
if [ ! -f "$stage/.ready" ]; then # a second run on the same machine finds it
  mkdir -p "$site/treeverify-0.dist-info"
  [ -f "$bundle/cache.tar.xz" ] && tar -C "$HOME" -xJf "$bundle/cache.tar.xz" &
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
from treeverify.ops.tree_attention.cuda import prepare
prepare(torch.device("cuda", 0))' || exit 8
lap "kernel ready"
python3 "$root/scripts/gpu/${LIVE:-sglang_live.py}" --out "$out" "$@"
code=$?
[ -n "${KEEP_CACHE:-}" ] && tar -C "$HOME" -cJf "$out/cache.tar.xz" .triton/cache .cache/tvm-ffi .cache/sglang 2>/dev/null
lap "all"
exit $code

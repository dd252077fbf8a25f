#!/bin/bash
# Real SGLang 0.5.17 servers with the attention backend treeverify, on one GPU: see sglang_live.py.
# From the repository root, with .sglang/site.tar.xz (an installed tree of SGLang) and, to save compiling, its caches
# in .sglang/cache.tar.xz (KEEP_CACHE=1 writes them to $OUT again). Records and logs go to $OUT.
set -u
root=$PWD; bundle=${SGLANG_BUNDLE:-$root/.sglang}; stage=$(mktemp -d); out=${OUT:?a folder for the records}
start=$(date +%s); lap() { echo "$1: $(($(date +%s) - start)) s"; }
mkdir -p "$stage/site/treeverify-0.dist-info"
export PYTHONPATH=$stage/site:$root/src PYTHONUNBUFFERED=1
[ -f "$bundle/cache.tar.xz" ] && tar -C "$HOME" -xJf "$bundle/cache.tar.xz" &
tar -C "$stage/site" -xJf "$bundle/site.tar.xz" || exit 9
# What pip would write for the plugin to be found.
printf 'Metadata-Version: 2.1\nName: treeverify\nVersion: 0\n' >"$stage/site/treeverify-0.dist-info/METADATA"
printf '[sglang.srt.plugins]\ntreeverify = treeverify.integrations.sglang.plugin:activate\n' \
  >"$stage/site/treeverify-0.dist-info/entry_points.txt"
lap "unpacked"
python3 -m compileall -q -j 8 "$stage/site/sglang" "$stage/site/transformers" >/dev/null 2>&1 &
python3 -c 'import torch
from treeverify.ops.tree_attention.cuda import prepare
prepare(torch.device("cuda", 0))' || exit 8
wait
lap "kernel ready"
python3 "$root/scripts/gpu/sglang_live.py" --out "$out" "$@"
code=$?
[ -n "${KEEP_CACHE:-}" ] && tar -C "$HOME" -cJf "$out/cache.tar.xz" .triton/cache .cache/tvm-ffi .cache/sglang 2>/dev/null
lap "all"
exit $code

#!/usr/bin/env bash
# Prepare .carry/rivals/site.tar.xz: the other libraries' kernels that `treeverify bench attention` compares with, as one
# folder of Python packages for a Hopper machine without network (Python 3.12, torch 2.11 for CUDA 13, Triton 3.6).
#   benchmarks/rivals/build.sh [WORKDIR]     run in the repository's root; a WORKDIR kept from before saves the downloads
# Needs python3 with pip, nvcc 13.0, unzip, xz and GNU tar, and 3 GB of disk. Everything comes from official packages.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$PWD/.carry/rivals
work=${1:-$(mktemp -d)}
mkdir -p "$out" "$work/dl"
cd "$work"

platforms=(--platform any --platform manylinux2014_x86_64 --platform manylinux1_x86_64)
for n in 34 31 28 27 26 24 17 5; do platforms+=(--platform "manylinux_2_${n}_x86_64"); done
fetch() { # fetch NAME VERSION: a wheel for the target's Python, unless it is there
  compgen -G "dl/${1//-/_}-$2-*.whl" >/dev/null && return
  python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp --abi cp312 --abi abi3 --abi none "${platforms[@]}" -d dl "$1==$2"
}
fetch sglang 0.5.23
fetch sglang-kernel 0.4.5
fetch sgl-flash-mla 1.0.0
fetch flashinfer-python 0.7.2
fetch apache-tvm-ffi 0.1.15.post2
rm -rf site && mkdir -p site

# tvm-ffi, to call FlashInfer's module (and ours)
unzip -qo dl/apache_tvm_ffi-*.whl -d site

# FlashMLA, as it is
unzip -qo dl/sgl_flash_mla-*.whl -d site

# SGLang: the Triton kernels alone, with stand-ins for what they import from the server
ops=sglang/kernels/ops/attention
unzip -qo dl/sglang-0.5.23-*.whl "$ops/extend_attention.py" "$ops/decode_attention.py" "$ops/score_mod.py" \
  "$ops/merge_state.py" -d site
mkdir -p site/sglang/srt
for package in sglang sglang/kernels sglang/kernels/ops "$ops" sglang/srt; do
  echo '"""Stand-in: the benchmark needs only some modules of this package."""' >"site/$package/__init__.py"
done
cat >site/sglang/srt/environ.py <<'PY'
"""Stand-in: every switch that the attention kernels ask for is off."""


class _Off:
    def get(self):
        return False


class _Switches:
    def __getattr__(self, name):
        return _Off()


envs = _Switches()
PY
cat >site/sglang/srt/utils.py <<'PY'
"""Stand-in: an NVIDIA GPU."""

import torch


def is_cuda():
    return torch.cuda.is_available()


def is_hip():
    return False


is_gfx95_supported = is_gfx1250_supported = is_hip


def get_device_core_count(device_id=0):
    return torch.cuda.get_device_properties(device_id).multi_processor_count
PY

# FlashAttention 3 from sglang-kernel: 1.1 GB, of which the bf16 MLA kernels for sm_90 are kept
if [ ! -f flash_ops.abi3.so ]; then
  unzip -qo dl/sglang_kernel-0.4.5-*.whl sgl_kernel/flash_ops.abi3.so -d unpacked
  python3 "$here/slim_fatbin.py" unpacked/sgl_kernel/flash_ops.abi3.so flash_ops.part --arch 90 \
    --keep Li512ENS_10bfloat16_t --keep-without CollectiveMainloopFwd
  rm -rf unpacked && mv flash_ops.part flash_ops.abi3.so
fi
unzip -qo dl/sglang_kernel-0.4.5-*.whl sgl_kernel/flash_attn.py sgl_kernel/debug_utils.py -d site
echo '"""Stand-in: only flash_attn and its extension are here."""' >site/sgl_kernel/__init__.py
cp --sparse=always flash_ops.abi3.so site/sgl_kernel/

# FlashInfer's FA2 MLA module: bf16, 512 + 64, compiled as its own build would for this GPU
if [ ! -f batch_mla_fa2.so ]; then
  rm -rf fi && mkdir fi
  unzip -qo dl/flashinfer_python-0.7.2-*.whl 'flashinfer/data/include/*' 'flashinfer/data/csrc/batch_mla_*' \
    flashinfer/data/csrc/tvm_ffi_utils.h 'flashinfer/data/cccl/cub/*' 'flashinfer/data/cccl/libcudacxx/include/*' \
    'flashinfer/data/cccl/thrust/*' -d fi
  data=fi/flashinfer/data
  mkdir fi/gen && cp "$data"/csrc/batch_mla_{plan,run,binding}.cu fi/gen/
  sed -e 's/{{ dtype_\(q\|kv\|o\) }}/nv_bfloat16/; s/{{ dtype_idx }}/int32_t/' \
    -e 's/{{ head_dim_ckv }}/512/; s/{{ head_dim_kpe }}/64/' "$data/csrc/batch_mla_config.jinja" >fi/gen/batch_mla_config.inc
  nice -n 10 nvcc -O3 -std=c++17 -shared -Xcompiler -fPIC --expt-relaxed-constexpr -static-global-template-stub=false \
    -use_fast_math -diag-suppress 177,946 -gencode=arch=compute_90a,code=sm_90a -DNDEBUG -DFLASHINFER_ENABLE_F16 \
    -DFLASHINFER_ENABLE_BF16 -DFLASHINFER_ENABLE_FP8_E4M3 -DFLASHINFER_ENABLE_FP8_E5M2 -DFLASHINFER_ENABLE_FP8_E8M0 \
    -DFLASHINFER_ENABLE_FP4_E2M1 -Ifi/gen -I"$data/include" -I"$data/csrc" -I"$data/cccl/cub" \
    -I"$data/cccl/libcudacxx/include" -I"$data/cccl/thrust" -Isite/tvm_ffi/include \
    fi/gen/batch_mla_{plan,run,binding}.cu -o batch_mla_fa2.part
  mv batch_mla_fa2.part batch_mla_fa2.so
fi
mkdir site/flashinfer_batch_mla && cp batch_mla_fa2.so site/flashinfer_batch_mla/
echo '"""FlashInfer 0.7.2: batch_mla for FA2, bf16, head dimensions 512 + 64, sm_90a."""' >site/flashinfer_batch_mla/__init__.py

tar --sparse -C site -cf - . | xz -T1 -9 >"$out/site.part"
mv "$out/site.part" "$out/site.tar.xz"
size=$(stat -c %s "$out/site.tar.xz")
echo "$out/site.tar.xz: $size bytes"
[ "$size" -le $((28 * 1024 * 1024)) ] || { echo "larger than 28 MiB" >&2; exit 1; }

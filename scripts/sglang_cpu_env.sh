#!/bin/bash
# A virtual environment in which real SGLang runs on a machine without a GPU (its Triton kernels in the interpreter),
# with this project installed beside it; 2.3 GB, a few minutes. Used by `make test-sglang`.
#   scripts/sglang_cpu_env.sh VENV
set -euo pipefail
venv=$1; root=$(cd "$(dirname "$0")/.." && pwd)
test -x "$venv/bin/python" || "${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip install --disable-pip-version-check -q "$@"; }
pip torch==2.13.0
# What SGLang imports on a CPU; its own requirements would bring the CUDA packages.
pip triton==3.7.1 numpy orjson psutil pybase64 requests packaging pillow starlette msgspec pydantic "pyzmq>=25.1.2" \
  tqdm ipython aiohttp transformers==5.19.0 dill sentencepiece==0.2.1 apache-tvm-ffi==0.1.11 loguru gguf openai==2.8.0 \
  partial_json_parser einops ninja setproctitle "uvicorn>=0.51" fastapi uvloop jsonschema python-multipart prometheus-client
pip --no-deps sglang==0.5.23 torchvision==0.28.0 compressed-tensors==0.18.0 xgrammar==0.2.7
pip pytest==9.2.0 pytest-timeout==2.4.0 "filelock>=3.24" "typer>=0.15" "hatchling>=1.27" hatch-vcs editables
pip --no-deps --no-build-isolation -e "$root"
# The oldest version supported, apart, to check its names and signatures (PYTHONPATH puts it in front).
rm -rf "$venv/sglang-0.5.17"
pip --no-deps --target "$venv/sglang-0.5.17" sglang==0.5.17 transformers==5.12.1 tokenizers==0.22.2 \
  "huggingface-hub>=1.5,<2"
# A torch built for the CPU lacks two operators that torchvision declares at import.
packages=$("$venv/bin/python" -c "import site; print(site.getsitepackages()[0])")
cp "$root/scripts/torchvision_on_cpu.py" "$packages/"
echo "import torchvision_on_cpu" >"$packages/torchvision_on_cpu.pth"
touch "$venv/.installed"

"""Let torchvision be imported beside a torch built for the CPU; loaded through a ``.pth`` file in each process.

torchvision registers fake kernels for two operators that only its CUDA library declares, and dies if they are missing.
Declaring their schemas on the first import of torchvision is enough; its Python transforms then work.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType


class _DeclareOperators(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Declare the operators when torchvision is first looked for; finds nothing itself."""
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch  # only now: this file runs in every process of the environment

            for operator in ("nms", "qnms"):
                schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                torch.library.define(f"torchvision::{operator}", schema)
        return None


sys.meta_path.insert(0, _DeclareOperators())

from __future__ import annotations

from pathlib import Path

import gpu_observing
import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", gpu_observing.CHECKS)
def test_observing(name: str, tmp_path: Path) -> None:
    gpu_observing.CHECKS[name](tmp_path)

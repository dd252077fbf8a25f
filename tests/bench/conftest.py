from __future__ import annotations

import pytest

ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "driver": "580.0",
    "cpu": "x",
    "torch": "2.11.0",
    "commit": "abc",
    "date": "2026-11-30T00:00:00Z",
}
RATES = {"copy": 4.26e12, "matmul": 8.08e14, "mma_sync": 6.0e14}


@pytest.fixture
def attention_record():
    """Makes a valid attention record; keywords replace its fields, those of the case included."""

    def make(impl="treeverify-portable", us=50.0, point=(1, 9, 8, 131072), indices="scatter", **fields):
        bs, nodes, heads, prefix = point
        case = {"bs": bs, "nodes": nodes, "heads": heads, "prefix": prefix, "indices": indices}
        measured = us is not None
        return {
            "benchmark": "attention",
            "impl": impl,
            "case": case,
            "us": us,
            "us_runs": [us] * 5 if measured else [],
            "floor_us": 25.0,
            "bound": "mem",
            "ratio": us / 25.0 if measured else None,
            "error": 1.8e-3 if measured else None,
            "reason": None if measured else "not here",
            "rates": RATES,
            **ENVIRONMENT,
            **fields,
        }

    return make


@pytest.fixture
def ceiling_record():
    def make(impl="copy", rate=4.26e12, unit="B/s"):
        fields = {"case": {}, "rate": rate, "rate_runs": [rate], "unit": unit, "reason": None}
        return {"benchmark": "ceiling", "impl": impl, **fields, **ENVIRONMENT}

    return make

"""Launch one point a few times: `ncu -k regex:portable python3 scripts/gpu/profile_one.py LIBRARY POINT SCHEDULE`."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.gpu.bench_quick import ROW, Library, Problem, Variant, parse_point


def main() -> None:
    """Run it."""
    library, point, schedule = Library(Path(sys.argv[1])), parse_point(sys.argv[2]), sys.argv[3]
    pool = torch.randn(4 * sum(point.prefixes) + 64, ROW, device="cuda").bfloat16()
    problem = Problem(point, pool, 2)
    for number in range(2):
        library.launch(problem.params(number), Variant(schedule))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()

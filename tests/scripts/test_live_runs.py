"""The live runs of scripts/gpu against a stand-in server, so that no time on a GPU is lost to the scripts."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.ports import free_port

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts/gpu"
SLOTS = 32
"""Servers that a run may number, each with a port of its own."""
NAMES = ("live_server", "live_windows", "live_part", "live_speed", "live_tokens", "live_dumps", "kimi_rank")
DDTREE = ("ddtree_servers", "ddtree_parts", "ddtree_sampling", "ddtree_speed")


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The scripts' modules, with the stand-in as ``sglang.launch_server`` and short windows."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    package = tmp_path / "path/sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text((Path(__file__).parent / "fake_server.py").read_text())
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    found = SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES + DDTREE})
    monkeypatch.setattr(found.live_server, "PORTS", free_port(SLOTS))
    monkeypatch.setattr(found.live_server, "SPACING", 1)
    for name, value in {"ROUNDS": 5, "SHORTEST": 0.02, "LONGEST": 0.03}.items():
        monkeypatch.setattr(found.live_windows, name, value)
    monkeypatch.setattr(found.ddtree_speed, "ROUNDS", 5)
    monkeypatch.setattr(found.live_speed, "PROFILES", 1.0)
    monkeypatch.setattr(found.live_speed, "POINTS", ((130, 1),))
    monkeypatch.setattr(found.ddtree_speed, "AUTO_START", 1)
    monkeypatch.setattr(found.ddtree_speed, "TREES", ("ddtree9", "ddtree33"))
    monkeypatch.setattr(found.ddtree_parts, "TEXTS", 1)
    return found


@pytest.fixture
def part(live: SimpleNamespace, tmp_path: Path) -> Any:
    """A part with time to spend: nothing here waits for its end."""
    folder = tmp_path / "logs"
    folder.mkdir()
    return live.live_part.Part("rehearsal", tmp_path / "rehearsal.json", folder, tmp_path, startup=1200, seconds=3600)


def record(part: Any) -> dict[str, Any]:
    """What is on disk."""
    found: dict[str, Any] = json.loads(part.record.read_text())
    return found


def test_speed_compares_every_side_in_turns(live: SimpleNamespace, part: Any) -> None:
    live.live_part.run(part, live.live_speed.speed)
    (point,) = record(part)["found"]["points"]
    assert part.failures[0] == "fa3: its library is not in the bundle"
    assert set(point["sides"]) == {"off", "on", "stock"}
    assert [len(rows) for rows in point["windows"].values()] == [5, 5, 5]
    assert all(side["fewest_steps"] >= live.live_windows.STEPS for side in point["sides"].values())
    assert point["sides"]["on"]["tokens_per_step"] == pytest.approx(4, rel=0.1)
    assert point["waited_ms"] == {"off": pytest.approx(0.001), "on": pytest.approx(0.001)}
    assert point["attention_ms"] == {"off": pytest.approx(0.004), "on": pytest.approx(0.004)}
    assert not [failure for failure in part.failures if "Error" in failure or live.live_part.UNFINISHED in failure]


def test_a_held_part_waits_with_its_servers_up(
    live: SimpleNamespace, part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = tmp_path / "ended"
    monkeypatch.setattr(live.live_server, "HOLD", str(ended))
    server = live.live_server.Server("held", tmp_path, 0, part.folder, [])
    begin = part.begin
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: (server.wait(time.time() + 1200), time.sleep(0.5), ended.touch()))
        with live.live_server.running(part, [server]):
            assert ended.exists()
    assert part.begin - begin > 0.3


def test_a_floor_is_judged_by_the_time_of_a_step(live: SimpleNamespace) -> None:
    point: dict[str, Any] = {"prefix": 32768, "batch": 1, "reachable": 6.0, "sides": {"on": {"fewest_steps": 12}}}
    for ratio, count in ((6.1, 0), (5.9, 1), (5.0, 2)):
        point["on_over_off"] = {"steps": {"ratio": ratio}}
        assert len(live.live_speed._judge(point)) == count
    point["sides"]["on"]["fewest_steps"] = 11
    assert "windows of 11 steps" in live.live_speed._judge(point)[-1]


def test_no_more_can_be_saved_than_the_host_waits(live: SimpleNamespace) -> None:
    def profile(attention_us: float, waited_us: float) -> list[dict[str, Any]]:
        name = "_fwd_kernel" if attention_us > 100 else "tree_attention_portable"
        calls = [{"cat": "cuda_runtime", "name": "cudaStreamSynchronize", "dur": waited_us}]
        return [{"cat": "kernel", "name": name, "dur": attention_us}] * live.live_speed.LAYERS + calls

    found = live.live_speed.limit(8.0, profile(1500, 9000), profile(50, 0))
    assert found["amdahl"] == found["reachable"] == pytest.approx(8 / 2.2)
    found = live.live_speed.limit(8.0, profile(1500, 4000), profile(50, 0))
    assert found["reachable"] == pytest.approx(2)


def test_ratio_of_steps_is_more_where_the_other_is_faster(live: SimpleNamespace) -> None:
    windows = {name: [{"step_ms": ms + 0.1 * n} for n in range(5)] for name, ms in (("off", 12.0), ("on", 4.0))}
    found = live.live_windows.ratio(windows, "off", "on", "step_ms")
    assert found["low"] < found["ratio"] < found["high"]
    assert found["ratio"] == pytest.approx(2.9, rel=0.05)


@pytest.mark.parametrize(("fault", "failing"), [("", 0), ("hot", 2)])
def test_law_passes_the_right_one_and_refutes_a_wrong_one(
    live: SimpleNamespace, part: Any, monkeypatch: pytest.MonkeyPatch, fault: str, failing: int
) -> None:
    monkeypatch.setenv("FAKE_FAULT", fault)
    monkeypatch.setattr(live.ddtree_sampling, "CASES", live.ddtree_sampling.CASES[:2])
    live.live_part.run(part, lambda part: live.ddtree_sampling.law(part, live.ddtree_servers.Choice(1, 8, 1500)))
    assert len(record(part)["found"]["tests"]) == 6  # plain decoding, trees, runs of plain steps
    wrong = [failure for failure in part.failures if "ddtree17" in failure and "after Holm" in failure]
    assert len(wrong) == failing, part.failures
    assert not [failure for failure in part.failures if "plain" in failure], part.failures


def test_tokens_acceptance_seeds_and_two_gpus(
    live: SimpleNamespace, part: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live.ddtree_parts, "_embedded", lambda prefixes: [(root(ids), 4) for ids in prefixes])
    choice = live.ddtree_servers.Choice(2, 16, 1)
    for work in (live.ddtree_parts.tokens, live.ddtree_parts.acceptance, live.ddtree_sampling.sampling):
        assert not live.live_part.run(part, lambda part, work=work: work(part, choice)), part.failures
    assert record(part)["found"]["batch"]["ddtree17"]["identical"] == 2
    assert record(part)["found"]["compared"] == {
        "prefixes": 4,
        "used": 4,
        "same": 4,
        "means": {"server": 4, "engine": 4},
    }
    live.live_part.run(part, lambda part: live.ddtree_parts.tp2(part, choice))
    missing = "files of accepted ids: 0, steps [], expected two that are the same"
    assert part.failures == [f"{two}: {missing}" for two in live.ddtree_parts.TWO]


def root(ids: list[int]) -> int:
    """The stand-in's likeliest next token."""
    law = importlib.import_module("tests.scripts.fake_server").law(ids[-1])
    return max(law, key=law.__getitem__)


def test_gap_and_waits(live: SimpleNamespace, part: Any) -> None:
    live.live_part.run(part, lambda part: live.ddtree_speed.gap(part, None))
    found = record(part)["found"]
    assert found["gap_1"]["median_ms"] == pytest.approx(0.896)
    assert found["gap_1"]["busy_median_ms"] == pytest.approx(0.1)
    assert found["waits_ddtree33_16"] == {"steps": 200, "per_step": found["waits_dflash-on_16"]["per_step"]}
    assert part.failures == ["gap at 1: 0.896 ms, aim 0.3", "gap at 16: 0.896 ms, aim 0.6"]


def test_the_cost_of_off_is_told_beside_its_error(live: SimpleNamespace, part: Any) -> None:
    cores = os.sched_getaffinity(0)
    live.live_part.run(part, live.live_speed.off)
    assert os.sched_getaffinity(0) == cores
    found = record(part)["found"]
    assert part.failures == []
    for batch in (1, 8):
        one = found[f"batch_{batch}"]
        assert set(one["steps"]) == {
            "stock-b over stock-a",
            "off-b over off-a",
            "off-a over stock-a",
            "off-b over stock-b",
        }
        assert all(pair["low"] <= pair["ratio"] <= pair["high"] for pair in one["steps"].values())


def test_ddtree_windows_and_kimi(live: SimpleNamespace, part: Any) -> None:
    choice = live.ddtree_servers.Choice(1, 8, 1, (2,))
    live.live_part.run(part, lambda part: live.ddtree_speed.speed(part, choice))
    (point,) = record(part)["found"]["points"]
    auto, trees = live.ddtree_speed.AUTO, live.ddtree_speed.TREES
    assert set(point["tokens_over"]["plain"]) == {"dflash-on", *trees, auto}
    judged = point["auto_over_best"]
    assert judged["best"] in ("plain", "dflash-on", *trees)
    assert judged["low"] < judged["ratio"] < judged["high"]
    assert set(record(part)["found"]["ddtree"]) == {*trees, auto}
    part.failures = [failure for failure in part.failures if not failure.startswith(f"batch 2: {auto} over")]
    options = SimpleNamespace(prefixes="64", layers=4, windows=5)
    live.live_part.run(part, lambda part: live.kimi_rank.measure(part, options))
    (point,) = record(part)["found"]["points"]
    assert point["on"]["profile"]["steps"] == 6
    assert part.failures == ["fa3: its library is not in the bundle"]


def test_widths_by_cost_are_judged_by_the_whole_interval(live: SimpleNamespace) -> None:
    judged = {"best": "ddtree17", "aim": 0.97, "ratio": 0.99, "low": 0.97, "high": 1.01}
    assert live.ddtree_speed.judge_auto(4, {"auto_over_best": judged}) == []
    judged["low"] = 0.969
    (failure,) = live.ddtree_speed.judge_auto(4, {"auto_over_best": judged})
    assert failure == "batch 4: auto65 over ddtree17: 0.990 (0.969 to 1.010), aim 0.97"
    assert live.ddtree_speed.judge_auto(4, {}) == ["batch 4: auto65 is not there"]


def test_widths_by_cost_are_left_out_for_want_of_time(
    live: SimpleNamespace, part: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    part.seconds = 12 + live.ddtree_speed.ROUNDS * 4 * live.ddtree_speed.LEAST
    monkeypatch.setattr(live.ddtree_speed, "AUTO_START", 12)
    live.live_part.run(part, lambda part: live.ddtree_speed.speed(part, live.ddtree_servers.Choice(1, 8, 1, (2,))))
    assert [failure for failure in part.failures if failure.startswith("auto65 not started for want of time: ")]
    (point,) = record(part)["found"]["points"]
    assert set(point["sides"]) == {"plain", "dflash-on", *live.ddtree_speed.TREES}
    assert "batch 2: auto65 is not there" in part.failures


def test_only_the_server_with_widths_by_cost_is_told_so(
    live: SimpleNamespace, part: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {}

    def server(name: str, *_: Any, **environment: str) -> None:
        settings[name] = environment.get("KDTREE_BUDGET")

    monkeypatch.setattr(live.ddtree_servers, "Server", server)
    live.ddtree_servers.servers_of(part, ["plain", "dflash-on", "ddtree65", "auto65"])
    assert settings == {"plain": None, "dflash-on": None, "ddtree65": None, "auto65": "auto"}
    given = [live.ddtree_servers.flags(mode, Path("draft")) for mode in ("ddtree65", "auto65")]
    assert given[0] == given[1]


def test_a_window_of_the_draft_is_one_flag_more(live: SimpleNamespace) -> None:
    for mode in ("dflash-on", "ddtree17"):
        without, verify = live.ddtree_servers.flags(mode, Path("draft"))
        given, same = live.ddtree_servers.flags(f"{mode}-win2048", Path("draft"))
        assert sorted(given) == sorted([*without, "--speculative-draft-window-size", "2048"])
        assert verify == same == "on"


@pytest.mark.slow
def test_the_backends_other_parts(live: SimpleNamespace, part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the stand-in cannot do is a failure by name; nothing else is."""
    monkeypatch.setattr(live.live_speed, "ROWS", 20_000)
    for name, work, failures in (
        ("validate", live.live_speed.validate, []),
        ("forced", live.live_tokens.forced, []),
        (
            "algorithms",
            live.live_tokens.algorithms,
            ["standalone_graph: 1 backends, expected the target's and the draft's"],
        ),
        ("packaged", live.live_tokens.packaged, ["bad_mode: not refused by name", "bad_list: not refused by name"]),
        ("dumps", live.live_dumps.dumps, ["dumps: 0 files, expected at least 3"]),
    ):
        part.failures, part.found, part.name = [], {}, name
        live.live_part.run(part, work)
        assert part.failures == failures
        assert record(part)["found"]["up_s"] > 0


def test_two_ranks_switch_at_one_step(live: SimpleNamespace, part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    live.live_part.run(part, live.live_tokens.ranks)
    assert not part.failures
    assert [set(one) for one in record(part)["found"]["switched_at"]] == [{"0", "1"}] * 4


def test_a_part_that_is_ended_leaves_its_record_and_no_server(live: SimpleNamespace, tmp_path: Path) -> None:
    code = """
import live_part, live_server, pathlib, sys, time
part = live_part.Part("ended", pathlib.Path(sys.argv[1]), live_part.new_folder(), startup=1200)
def work(part):
    server = live_server.Server("one", pathlib.Path("."), 0, part.folder, [])
    with live_server.running(part, [server]):
        part.keep("pid", server.process.pid)
        time.sleep(1800)
live_part.run(part, work)
"""
    path = f"{os.environ['PYTHONPATH']}:{SCRIPTS}"
    settings = os.environ | {"PYTHONPATH": path, "LIVE_PORTS": str(live.live_server.PORTS)}
    file = tmp_path / "ended.json"
    run = subprocess.Popen([sys.executable, "-c", code, str(file)], env=settings, stdout=subprocess.DEVNULL)
    while not (file.exists() and "pid" in json.loads(file.read_text())["found"]):
        assert run.poll() is None
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    assert run.wait() == 1
    found = json.loads(file.read_text())
    assert found["failures"] == [live.live_part.UNFINISHED]
    assert is_gone(found["found"]["pid"])
    with tarfile.open(tmp_path / "logs_ended.tar.gz") as archive:
        assert archive.getnames() == ["one.log"]


def is_gone(group: int) -> bool:
    """Whether no process of the group is left, within two minutes."""
    for _ in range(6000):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def test_lanes_keep_limits_order_ports_and_what_parts_leave(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    plan.write_text(
        """
a one   0 900 - echo '{"part": "one"}'; echo $LIVE_PORTS $CUDA_VISIBLE_DEVICES >$OUT/one.json; exit 3
a two   0 5 -   setsid sleep 1800 & echo $! >$LIVE_PIDS; echo kept >$OUT/two.json; sleep 1800
c four  1 900 +two until [ -e $LIVE_HOLD ]; do sleep 0.1; done; cat $LANES/*/two/two.json >$OUT/four.json
b three 1 900 two head -c 90000 /dev/zero >$OUT/three.log; cat $LANES/*/two/two.json - <<<$LIVE_PORTS >$OUT/three.json
"""
    )
    (tmp_path / "work").mkdir()
    settings = os.environ | {"OUT": str(tmp_path), "TMPDIR": str(tmp_path / "work"), "LANES": str(tmp_path / "work")}
    done = subprocess.run(
        ["bash", str(SCRIPTS / "live_lanes.sh"), str(plan), "1400"],
        env=settings,
        capture_output=True,
        text=True,
    )
    for told in ("one: rc 3, ", '{"part": "one"}', "two: rc 124, "):
        assert told in done.stdout
    with tarfile.open(tmp_path / "lanes.tar.gz") as archive:
        kept = {name.removeprefix("./"): archive.extractfile(name) for name in archive.getnames()}
        texts = {name: file.read() for name, file in kept.items() if file}
    assert texts["one/one.json"] == b"10000 0\n"
    assert texts["three/three.json"] == b"kept\n18100\n"
    assert texts["four/four.json"] == b"kept\n"
    assert len(texts["three/three.log"]) == 60000

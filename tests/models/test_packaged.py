"""The packaged model: packed without loss, unpacked as listed, damage found on either side."""

from __future__ import annotations

import hashlib
import json
import lzma

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training.pack import CORPUS, PAIR, WEIGHTS, store

from training import corpus
from treeverify.cutover.samples import BUILTIN
from treeverify.errors import ConfigError, WeightsError
from treeverify.models import packaged
from treeverify.models.heldout import load_heldout
from treeverify.models.tokenizer import Tokenizer

NAMES = (*PAIR, *CORPUS)


@given(st.binary(max_size=300))
def test_packing_loses_nothing(content):
    assert packaged.unpack(packaged.pack(content)) == content


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """A small model's assets, and a cache of their own."""
    monkeypatch.setenv("TREEVERIFY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packaged, "STORED", tmp_path / "assets")
    for name in NAMES:
        file = tmp_path / "made" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(name.encode() * 3)
    store(tmp_path / "made", tmp_path / "made", tmp_path / "assets")
    return tmp_path / "assets"


def test_the_checkouts_model_is_whole_and_its_weights_are_small():
    folder = packaged.assets()
    lines = dict(reversed(line.split("  ")) for line in (packaged.STORED / packaged.SUMS).read_text().splitlines())
    assert set(lines) == set(NAMES)
    for name, digest in lines.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    for name in WEIGHTS:
        assert not (packaged.STORED / name).exists()
        assert (packaged.STORED / f"{name}.xz").stat().st_size < 0.7 * (folder / name).stat().st_size


def test_what_is_stored_comes_out_once(stored, tmp_path):
    folder = packaged.assets()
    assert folder.is_relative_to(tmp_path / "cache")
    assert sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()) == sorted(NAMES)
    assert all((folder / name).read_bytes() == name.encode() * 3 for name in NAMES)
    before = {name: (folder / name).stat().st_ino for name in NAMES}
    assert packaged.assets() == folder
    assert {name: (folder / name).stat().st_ino for name in NAMES} == before


@pytest.mark.parametrize("name", NAMES)
def test_what_is_damaged_or_gone_in_the_cache_is_unpacked_again(stored, name):
    folder = packaged.assets()
    (folder / name).write_bytes(b"half")
    assert (packaged.assets() / name).read_bytes() == name.encode() * 3
    (folder / name).unlink()
    assert (packaged.assets() / name).read_bytes() == name.encode() * 3


def test_another_model_gets_a_folder_of_its_own(stored, tmp_path):
    first = packaged.assets()
    (tmp_path / "made" / "heldout.json").write_bytes(b"other")
    store(tmp_path / "made", tmp_path / "made", stored)
    second = packaged.assets()
    assert first != second
    assert (first / "heldout.json").read_bytes() != (second / "heldout.json").read_bytes() == b"other"


@pytest.mark.parametrize("damage", ["cut", "other", "no xz", "gone"])
def test_a_damaged_store_is_named(stored, damage):
    file = stored / f"{WEIGHTS[0]}.xz"
    whole = file.read_bytes()
    contents = {"cut": whole[:-9], "other": packaged.pack(b"other"), "no xz": b"other"}
    file.unlink() if damage == "gone" else file.write_bytes(contents[damage])
    with pytest.raises(WeightsError, match=rf"{WEIGHTS[0]}.*: the packaged model (cannot be read|is damaged)"):
        packaged.assets()


def test_a_store_without_a_model_says_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(packaged, "STORED", tmp_path)
    with pytest.raises(WeightsError, match=r'no model: .* pip install -e "\.\[lab\]", or name a folder'):
        packaged.assets()


def test_a_cache_that_cannot_be_written_is_named(stored, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TREEVERIFY_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot be unpacked.*TREEVERIFY_CACHE"):
        packaged.assets()


def test_the_packed_form_is_plain_xz():
    assert lzma.decompress(packaged.pack(b"a1b2c3d")) == b"abcd123"


def test_the_prompts_of_a_cutover_are_the_first_held_out_ones():
    found = [json.loads(line) for line in BUILTIN.read_text().splitlines()]
    decode = Tokenizer.load(packaged.assets() / "tokenizer.json").decode
    expected = [
        {"name": text.file, "input": decode(text.prompt_ids), "forced": decode(text.continuation_ids)}
        for text in load_heldout()[: corpus.TEXTS]
    ]
    assert found == expected

"""The text of ``generate`` with a tokenizer whose first token loses its space."""

from __future__ import annotations

import json
import shutil

import pytest
from tokenizers import Tokenizer, decoders, models

from treeverify.models.packaged import assets


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Metaspace(),
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    ],
    ids=["Metaspace", "Llama"],
)
def test_the_streamed_text_is_that_of_decoding_at_once(run, tmp_path, decoder):
    shutil.copytree(assets(), tmp_path / "pair")
    raw = Tokenizer(models.BPE(vocab={f"▁w{index}": index for index in range(2048)}, merges=[]))
    raw.decoder = decoder
    raw.save(str(tmp_path / "pair" / "tokenizer.json"))
    arguments = ("generate", "-", "--max-new-tokens", "12", "--model", str(tmp_path / "pair"))
    code, out, err = run(*arguments, "--json")
    assert code == 0, err
    report = json.loads(out)
    wanted = " ".join(f"w{token}" for token in report["tokens"])
    assert report["text"] == wanted
    assert run(*arguments)[1].strip() == wanted

"""Pack the standard library of one CPython release into token arrays.

`python -m training.corpus` checks every file against `corpus_files.json` and writes the packed corpus, the tokenizer
and the held-out prompts; `--list` writes `corpus_files.json` anew (only for another release).
"""

import argparse
import hashlib
import io
import json
import lzma
import random
import sys
import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from training.shapes import BOS, EOS, TargetShape
from training.tokenizer import save, train_tokenizer

RELEASE = (3, 11, 7)
LIST = Path(__file__).parent / "corpus_files.json"
SPLITS = ("library", "tests", "valid", "heldout")
PROMPTS, PROMPT, CONTINUATION = 96, 128, 160
TEXTS = 48
"""Of the prompts, so many are written as text as well."""
SKIP = ("site-packages", "__pycache__", "encodings", "pydoc_data", "config-3", "__phello__")
HELD_FILES, HELD_LARGEST, VALID_FILES = 100, 24_000, 24


def standard_library() -> Path:
    """Folder of the running interpreter's standard library; refuses another release."""
    if sys.version_info[:3] != RELEASE:
        raise SystemExit(
            f"the corpus is CPython {'.'.join(map(str, RELEASE))}'s library, not {sys.version.split()[0]}'s"
        )
    return Path(sysconfig.get_paths()["stdlib"])


def list_files(root: Path) -> list[dict[str, str]]:
    """Choose the files and their splits: tests apart, 100 held-out and 24 validation files of at most 24 kB."""
    library, tests = [], []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if any(name.startswith(s) or f"/{s}" in name for s in SKIP) or name.startswith("_sysconfigdata"):
            continue
        data = path.read_bytes()
        try:
            data.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if not 200 <= len(data) <= 400_000:
            continue
        is_test = any(part in ("test", "tests", "idle_test", "test.py") for part in name.split("/"))
        (tests if is_test else library).append((name, data))
    chosen = [name for name, data in library if 1000 <= len(data) <= HELD_LARGEST]
    random.Random(7).shuffle(chosen)
    split = dict.fromkeys(chosen[:HELD_FILES], "heldout")
    split |= dict.fromkeys(chosen[HELD_FILES : HELD_FILES + VALID_FILES], "valid")
    rows = [(name, data, split.get(name, "library")) for name, data in library]
    rows += [(name, data, "tests") for name, data in tests]
    return [{"path": n, "sha256": hashlib.sha256(d).hexdigest(), "split": s} for n, d, s in sorted(rows)]


def read_files(root: Path, rows: list[dict[str, str]]) -> dict[str, list[tuple[str, str]]]:
    """Read every listed file into its split; a missing file or another digest is an error."""
    texts: dict[str, list[tuple[str, str]]] = {s: [] for s in SPLITS}
    for row in rows:
        try:
            data = (root / row["path"]).read_bytes()
        except OSError as error:
            raise SystemExit(f"corpus file {row['path']} cannot be read: {error.strerror}") from error
        if hashlib.sha256(data).hexdigest() != row["sha256"]:
            raise SystemExit(f"corpus file {row['path']} differs from the listed digest")
        texts[row["split"]].append((row["path"], data.decode("utf-8")))
    return texts


def encode(tokenizer: Tokenizer, texts: list[tuple[str, str]]) -> list[np.ndarray]:
    """Token ids of each file between its begin and end marks."""
    return [
        np.array([BOS, *encoding.ids, EOS], dtype=np.uint16)
        for encoding in tokenizer.encode_batch([text for _, text in texts])
    ]


def held_out_prompts(names: list[str], files: list[np.ndarray]) -> list[dict]:
    """One window a file, going round until there are enough; from held-out files only."""
    rng, prompts = random.Random(11), []
    size = PROMPT + CONTINUATION
    usable = [i for i, ids in enumerate(files) if len(ids) > size + 20]
    rng.shuffle(usable)
    while len(prompts) < PROMPTS:
        i = usable[len(prompts) % len(usable)]
        start = rng.randrange(1, len(files[i]) - size)
        ids = files[i][start : start + size].tolist()
        prompts.append({"file": names[i], "offset": start, "tokens": ids})
    return prompts


def as_text(prompts: list[dict], tokenizer: Tokenizer) -> str:
    """Prompts as a cutover asks them, JSON Lines."""
    rows = []
    for prompt in prompts:
        parts = [tokenizer.decode(ids) for ids in (prompt["tokens"][:PROMPT], prompt["tokens"][PROMPT:])]
        rows.append(json.dumps({"name": prompt["file"], "input": parts[0], "forced": parts[1]}) + "\n")
    return "".join(rows)


def pack(arrays: dict[str, np.ndarray], path: Path) -> None:
    """Write an .npz inside xz, about a third smaller than .npz's own compression."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    path.write_bytes(lzma.compress(buffer.getvalue(), preset=6))


def unpack(path: Path) -> dict[str, np.ndarray]:
    """Read what `pack` wrote."""
    with np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) as data:
        return {name: data[name] for name in data.files}


def build(root: Path, out: Path, vocab: int) -> dict[str, int]:
    """Tokenizer, packed corpus and held-out prompts; returns the count of tokens per split."""
    texts = read_files(root, json.loads(LIST.read_text())["files"])
    tokenizer = train_tokenizer((text for _, text in texts["library"]), vocab)
    save(tokenizer, out / "tokenizer.json")
    encoded = {split: encode(tokenizer, texts[split]) for split in SPLITS}
    order = random.Random(3)
    for split in ("library", "tests"):
        order.shuffle(encoded[split])
    arrays = {split: np.concatenate(files) for split, files in encoded.items()}
    for split in ("valid", "heldout"):
        arrays[f"{split}_lengths"] = np.array([len(ids) for ids in encoded[split]])
    prompts = held_out_prompts([name for name, _ in texts["heldout"]], encoded["heldout"])
    document = {
        "source": "CPython 3.11.7 standard library, held-out files",
        "licence": "PSF-2.0",
        "prompt_tokens": PROMPT,
        "continuation_tokens": CONTINUATION,
        "prompts": prompts,
    }
    (out / "heldout.json").write_text(json.dumps(document, indent=None, separators=(",", ":")) + "\n")
    (out / "prompts.jsonl").write_text(as_text(prompts[:TEXTS], tokenizer))
    arrays["heldout_prompts"] = np.array([p["tokens"] for p in prompts], dtype=np.uint16)
    pack(arrays, out / "corpus.npz.xz")
    counts = {split: len(arrays[split]) for split in SPLITS}
    counts["heldout_bytes"] = sum(len(text.encode()) for _, text in texts["heldout"])
    return counts


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(".carry"), help="folder for the packed corpus")
    parser.add_argument("--list", action="store_true", help="write corpus_files.json anew")
    arguments = parser.parse_args()
    root = standard_library()
    if arguments.list:
        rows = list_files(root)
        rows_text = ",\n".join("  " + json.dumps(row) for row in rows)
        LIST.write_text('{"release": "3.11.7", "files": [\n' + rows_text + "\n]}\n")
    arguments.out.mkdir(parents=True, exist_ok=True)
    print(json.dumps(build(root, arguments.out, TargetShape().vocab)))


if __name__ == "__main__":
    main()

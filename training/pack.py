"""Put a trained pair, its tokenizer and the held-out tokens into the package's assets, the weights packed.

python -m training.pack PAIR CORPUS [--into FOLDER]: PAIR holds target/ and drafter/, CORPUS what
`training.corpus` wrote.
"""

import argparse
import hashlib
from pathlib import Path

from treeverify.models.packaged import PACKED, STORED, SUMS, pack

WEIGHTS = ("target/model.safetensors", "drafter/model.safetensors")
PAIR = ("target/config.json", "drafter/config.json", *WEIGHTS)
CORPUS = ("tokenizer.json", "heldout.json")


def store(pair: Path, corpus: Path, into: Path) -> None:
    """Write every file of the model into `into`, weights packed, and the list of their digests."""
    lines = []
    for name in sorted((*PAIR, *CORPUS)):
        content = ((pair if name in PAIR else corpus) / name).read_bytes()
        lines.append(f"{hashlib.sha256(content).hexdigest()}  {name}\n")
        file = into / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if name in WEIGHTS:
            file.with_name(file.name + PACKED).write_bytes(pack(content))
        else:
            file.write_bytes(content)
    (into / SUMS).write_text("".join(lines))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pair", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--into", type=Path, default=STORED)
    given = parser.parse_args()
    store(given.pair, given.corpus, given.into)


if __name__ == "__main__":
    main()

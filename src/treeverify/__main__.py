"""``python -m treeverify``."""

from treeverify.cli.main import main

main()

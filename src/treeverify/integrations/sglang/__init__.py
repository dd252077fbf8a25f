"""SGLang attention backend ``treeverify``: off, validate or on by ``KDTREE_VERIFY``. See docs/use/sglang.md."""

"""The draft tree: pure numpy, no tensor library."""

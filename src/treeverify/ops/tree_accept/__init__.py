"""The acceptance walk: greedy, or sampled from the target's law."""

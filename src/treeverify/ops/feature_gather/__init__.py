"""The accepted nodes' features, slots and positions, packed for the next draft."""

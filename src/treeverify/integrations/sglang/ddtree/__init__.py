"""``--speculative-algorithm DDTREE``: DFlash's drafter, a tree per step, our verify attention (docs/use/ddtree.md)."""

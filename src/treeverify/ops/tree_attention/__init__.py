"""Tree-verify attention for absorbed MLA."""

"""Masks, positions and SGLang's tree links from parents."""

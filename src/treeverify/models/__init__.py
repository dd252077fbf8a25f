"""The MLA target, its DFlash drafter, their tokenizer and their weights."""

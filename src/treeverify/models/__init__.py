"""The MLA target, its DFlash drafter, the tokenizer and their weights."""

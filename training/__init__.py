"""Scripts that make the shipped tokenizer, target and drafter from the Python standard library's source."""

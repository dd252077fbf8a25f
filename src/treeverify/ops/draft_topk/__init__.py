"""Per-depth top-K of the draft's logits with full-vocabulary log-probabilities, over vocabulary shards."""

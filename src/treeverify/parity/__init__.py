"""Do two implementations agree: on tensors, on tokens, on the law of tokens?"""

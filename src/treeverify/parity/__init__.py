"""Does the engine's output follow the law of the target?"""

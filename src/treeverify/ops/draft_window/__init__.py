"""What a step begins with: each request's slots, and the drafter's block."""

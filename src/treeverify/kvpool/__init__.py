"""The paged KV pool: slot ownership, move plans, their execution."""

"""Slow, line-by-line statements of what the product computes; tests compare with them."""

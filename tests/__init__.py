"""The tests; `synthetic` and `reference` are shared by all of them."""

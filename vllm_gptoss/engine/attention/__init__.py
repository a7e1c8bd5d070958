"""Attention backends, one file per GPU family."""

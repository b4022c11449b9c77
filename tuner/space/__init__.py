"""Knobs, the rules between them, and the candidates they span."""

"""Ranks: how they are laid out, the groups they form, and what they must agree on."""

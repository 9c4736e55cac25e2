"""Backends: the only files that import optional packages."""

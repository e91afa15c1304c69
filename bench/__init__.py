"""Measurements against the peers: `python -m bench`."""

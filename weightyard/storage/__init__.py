"""Stores: places that keep packs, manifests and records. Immutable files, written once."""

"""The bytes at rest: blocks, packs, manifests, splitting. Pure, without I/O (docs/format.md)."""

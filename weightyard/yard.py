"""Yard: a store and its one registry."""

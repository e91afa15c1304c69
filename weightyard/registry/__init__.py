"""The registry: the SQL catalogue of models, versions, aliases, blocks and packs."""

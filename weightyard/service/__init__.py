"""The service: the registry over HTTP."""

"""The service: a yard over REST. Routes parse, call one function of the registry, and answer."""
